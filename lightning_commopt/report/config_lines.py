"""The lines of configuration that make a run's setting happen again."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

import yaml

from lightning_commopt.compressors.registry import compressor_from_config, compressor_to_config
from lightning_commopt.report.model import Run
from lightning_commopt.report.runs import split_override
from lightning_commopt.report.settings import changes_training

_TARGET = "lightning_commopt.CommOptDDP"
_NOT_VALUES = re.compile(
    r".*[/@].*|(variant|method|experiment|model|data|strategy|callbacks|trainer|commopt|plan|world_size)"
)
_OF_STRATEGY = ("strategy.", "trainer.strategy.")


def config_lines(run: Run, varied: Mapping[str, str]) -> tuple[str, ...]:
    """Returns YAML for a configuration, with the two other ways to say it as comments.

    Args:
        run: of the setting.
        varied: of the run's overrides those that differ from other runs.

    Returns:
        Lines: the overrides for the command line; the node ``strategy`` (in a project of one's own often
        ``trainer.strategy``) and what else was varied; and the strategy in Python, where it has a `CommPlan`.
    """
    nodes: dict[str, Any] = {}
    strategy = _strategy(run)
    if strategy and not _has_own_compressor(run):
        nodes["strategy"] = strategy
    for name, value in varied.items():
        if name in run.overrides and _is_value(name, run) and not name.startswith(_OF_STRATEGY):
            _put(nodes, name, value)
    words = [text for text in run.record.overrides if changes_training(split_override(text)[0])]
    lines = [f"# on the command line: {shlex.join(words)}"] if words else []
    lines += yaml.safe_dump(nodes, sort_keys=False, width=1000).splitlines() if nodes else []
    if run.record.plan is not None:
        is_code = {"comm_hook"} if _has_own_compressor(run) else set()
        options = _plan(run.record.plan).items()
        arguments = ", ".join(f"{name}={value if name in is_code else repr(value)}" for name, value in options)
        lines.append(f"# in Python: CommOptDDP({arguments})")
    return tuple(lines)


def _has_own_compressor(run: Run) -> bool:
    """Returns whether the run's compressor is of a class without a name: it is recorded by its repr."""
    return isinstance((run.record.plan or {}).get("comm_hook"), str)


def _is_value(name: str, run: Run) -> bool:
    """Returns whether an override sets a value, rather than choose one of the files of a config group."""
    has_options = any(other.startswith(f"{name}.") for other in run.overrides)
    return not _NOT_VALUES.fullmatch(name) and not has_options and not isinstance(run.config.get(name), Mapping)


def _strategy(run: Run) -> dict[str, Any]:
    if run.record.plan is not None:
        return {"_target_": _TARGET, **_plan(run.record.plan)}
    trainer = run.config.get("trainer")
    of_trainer = trainer.get("strategy") if isinstance(trainer, Mapping) else None
    strategy = run.config.get("strategy", of_trainer)
    return {name: value for name, value in strategy.items() if value is not None} if isinstance(strategy, dict) else {}


def _plan(plan: Mapping[str, Any]) -> dict[str, Any]:
    hook = plan.get("comm_hook")
    return {**plan, "comm_hook": _without_defaults(hook)} if isinstance(hook, Mapping) else dict(plan)


def _without_defaults(hook: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a compressor's configuration without the options that have their defaults."""
    inner = hook.get("inner")
    short = {**hook, "inner": _without_defaults(inner)} if isinstance(inner, Mapping) else dict(hook)
    needed: dict[str, Any] = {name: short[name] for name in ("name", "inner") if name in short}
    try:
        compressor = compressor_from_config(needed)
        assert compressor is not None
        defaults = compressor_to_config(compressor)
    except (AssertionError, TypeError, ValueError):  # of another version, or with options that have no default
        return short
    return {name: value for name, value in short.items() if name in needed or value != defaults.get(name)}


def _put(nodes: dict[str, Any], name: str, value: str) -> None:
    """Sets a value under a dotted name."""
    *parents, last = name.split(".")
    for parent in parents:
        nodes = nodes.setdefault(parent, {})
    try:
        nodes[last] = yaml.safe_load(value)
    except yaml.YAMLError:
        nodes[last] = value
