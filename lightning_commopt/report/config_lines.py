"""The lines of configuration that make a run's setting happen again."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from lightning_commopt.report.model import Run
from lightning_commopt.report.names import is_ranks
from lightning_commopt.report.settings import changes_training

_TARGET = "lightning_commopt.CommOptDDP"
_NOT_VALUES = re.compile(
    r".*[/@].*|(variant|method|experiment|model|data|strategy|callbacks|trainer|commopt|plan|world_size)"
)
_OF_STRATEGY = ("strategy.", "trainer.strategy.")


def config_lines(run: Run, varied: Mapping[str, str]) -> tuple[str, ...]:
    """Returns YAML for a configuration, with the command line and Python as comments.

    Args:
        run: of the setting.
        varied: of its settings those that differ from other runs.

    Returns:
        Lines: the overrides for the command line; the node ``strategy`` (in a project of one's own often
        ``trainer.strategy``) and what else was varied; and the strategy in Python, where it has a `CommPlan`.
    """
    nodes: dict[str, Any] = {}
    strategy = _strategy(run)
    if strategy and not _has_own_compressor(run):
        nodes["strategy"] = strategy
    for name in run.record.chosen:
        is_varied = name in varied or ("ranks" in varied and is_ranks(name))
        if is_varied and _is_value(name, run) and not name.startswith(_OF_STRATEGY):
            _put(nodes, name, run.settings.get(name))
    chosen = zip(run.record.overrides, run.record.chosen, strict=False)
    words = [override for override, name in chosen if changes_training(name)]
    lines = [f"# on the command line: {shlex.join(words)}"] if words else []
    lines += yaml.safe_dump(nodes, sort_keys=False, width=1000).splitlines() if nodes else []
    if run.record.plan is not None:
        is_code = {"comm_hook"} if _has_own_compressor(run) else set()
        options = _nested(run, "plan.", run.record.plan).items()
        arguments = ", ".join(f"{name}={value if name in is_code else repr(value)}" for name, value in options)
        lines.append(f"# in Python: CommOptDDP({arguments})")
    return tuple(lines)


def _has_own_compressor(run: Run) -> bool:
    """Returns whether the run's compressor is of a class without a name: it is recorded by its repr."""
    return "plan.comm_hook" in run.settings


def _is_value(name: str, run: Run) -> bool:
    """Returns whether an override sets a value, rather than choose one of the files of a config group."""
    has_options = any(other.startswith(f"{name}.") for other in run.settings)
    return not _NOT_VALUES.fullmatch(name) and not has_options


def _strategy(run: Run) -> dict[str, Any]:
    if run.record.plan is not None:
        return {"_target_": _TARGET, **_nested(run, "plan.", run.record.plan)}
    known = [name for name, value in run.settings.items() if value is not None]
    return next(filter(None, (_nested(run, place, known) for place in _OF_STRATEGY)), {})


def _nested(run: Run, prefix: str, names: Iterable[str]) -> dict[str, Any]:
    """Returns those of some settings that begin with a prefix, without it and as nodes in nodes."""
    nodes: dict[str, Any] = {}
    for name in names:
        if name.startswith(prefix):
            _put(nodes, name.removeprefix(prefix), run.settings[name])
    return nodes


def _put(nodes: dict[str, Any], name: str, value: Any) -> None:
    """Sets a value under a dotted name."""
    *parents, last = name.split(".")
    for parent in parents:
        nodes = nodes.setdefault(parent, {})
    nodes[last] = value
