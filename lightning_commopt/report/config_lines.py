"""The lines of configuration that reproduce a setting."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from lightning_commopt.report.model import Run
from lightning_commopt.report.names import is_ranks
from lightning_commopt.report.settings import changes_training

_CONFIG_GROUPS = re.compile(
    r".*[/@].*|(variant|method|experiment|model|data|strategy|callbacks|trainer|commopt|plan|world_size)"
)
_STRATEGIES = ("strategy.", "trainer.strategy.")


def config_lines(run: Run, varied: Mapping[str, str]) -> tuple[str, ...]:
    """Returns YAML for a configuration, with the command line and Python as comments.

    Args:
        run: of the setting.
        varied: its settings that differ from other runs.

    Returns:
        Lines: the overrides for the command line; the node ``strategy`` (in users' projects often
        ``trainer.strategy``) and other varied values; and the strategy in Python, if it has a `CommPlan`.
    """
    plan = None if run.record.plan is None else _nested(run, "plan.", run.record.plan)
    has_unnamed_compressor = "plan.comm_hook" in run.settings  # recorded by its repr
    if plan is not None:
        strategy = {"_target_": "lightning_commopt.CommOptDDP", **plan}
    else:
        known = [name for name, value in run.settings.items() if value is not None]
        strategy = next(filter(None, (_nested(run, prefix, known) for prefix in _STRATEGIES)), {})
    nodes: dict[str, Any] = {"strategy": strategy} if strategy and not has_unnamed_compressor else {}
    for name in run.record.chosen:
        is_group = _CONFIG_GROUPS.fullmatch(name) or any(other.startswith(f"{name}.") for other in run.settings)
        is_varied = name in varied or ("ranks" in varied and is_ranks(name))
        if is_varied and not is_group and not name.startswith(_STRATEGIES):
            _put(nodes, name, run.settings.get(name))
    chosen = zip(run.record.overrides, run.record.chosen, strict=False)
    words = [override for override, name in chosen if changes_training(name)]
    lines = [f"# on the command line: {shlex.join(words)}"] if words else []
    lines += yaml.safe_dump(nodes, sort_keys=False, width=1000).splitlines() if nodes else []
    if plan is not None:
        code = {"comm_hook"} if has_unnamed_compressor else set()
        arguments = ", ".join(f"{name}={value if name in code else repr(value)}" for name, value in plan.items())
        lines.append(f"# in Python: CommOptDDP({arguments})")
    return tuple(lines)


def _nested(run: Run, prefix: str, names: Iterable[str]) -> dict[str, Any]:
    """Returns the settings that begin with a prefix, without it and as nested nodes."""
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
