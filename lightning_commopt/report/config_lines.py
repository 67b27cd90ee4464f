"""Writes the lines of configuration that reproduce a setting."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from lightning_commopt.measure.runs.settings import Value, nested, override_name
from lightning_commopt.report.choices import STRATEGIES, changes_training, is_ranks
from lightning_commopt.report.model import Run

_CONFIG_GROUPS = re.compile(
    r".*[/@].*|(variant|method|experiment|model|data|strategy|callbacks|trainer|commopt|plan|world_size)"
)
_COMMAND, _PYTHON = "# on the command line: ", "# in Python: "
_CLASSES = {"CommPlan": "CommOptDDP", "ShardedPlan": "CommOptModelParallel", "DiLoCoPlan": "CommOptDiLoCo"}
# Options of the strategy beside its plan without which other ranks would share a model.
_BESIDES = ("data_parallel_size", "tensor_parallel_size")


def config_lines(run: Run, varied: Mapping[str, Value]) -> tuple[str, ...]:
    """Returns YAML for a configuration, with the command line and Python as comments.

    It has the node ``strategy`` (in users' projects often ``trainer.strategy``) and other values that were varied.
    """
    settings = run.settings
    words = [override for override in settings.overrides if changes_training(override_name(override))]
    lines = [f"{_COMMAND}{shlex.join(words)}"] if words else []
    known = {name: value for name, value in settings.values.items() if value is not None}
    strategy = next(filter(None, (nested(known, prefix) for prefix in STRATEGIES)), {})
    options = None
    if settings.plan is not None:
        name = _CLASSES.get(settings.plan_type or "", "CommOptDDP")
        besides = _BESIDES if name == "CommOptModelParallel" else ()
        if run.record.sync_method == "auto":
            strategy, besides = {**strategy, "plan": "auto"}, (*besides, "plan", "lossy")
        options = {option: strategy[option] for option in besides if option in strategy}
        options = json.loads(json.dumps(nested(settings.plan) | options))  # lists, where settings have tuples
        options = {option: _short(value) for option, value in options.items()}
        strategy = {"_target_": f"lightning_commopt.{name}", **options}
    # A compressor without a registered name was recorded by its repr, which YAML cannot make again.
    code = {"comm_hook"}.intersection(settings.plan or ())
    nodes = {**({"strategy": strategy} if strategy and not code else {}), **nested(_others(run, varied))}
    lines += yaml.safe_dump(nodes, sort_keys=False, width=1000).splitlines() if nodes else []
    if options is not None:
        arguments = [f"{option}={value if option in code else repr(value)}" for option, value in options.items()]
        lines.append(f"{_PYTHON}{name}({', '.join(arguments)})")
    return tuple(lines)


def _short(value: Any) -> Any:
    """Returns the name of a compressor for a mapping of nothing but that."""
    return value["name"] if isinstance(value, dict) and value.keys() == {"name"} else value


def config_forms(lines: Iterable[str]) -> dict[str, str]:
    """Returns the lines of `config_lines` by the place that they are for, each form whole and ready to paste."""
    shown = list(lines)
    python = [line.removeprefix(_PYTHON) for line in shown if line.startswith(_PYTHON)]
    imports = [f"from lightning_commopt import {line.partition('(')[0]}\n\nstrategy = " for line in python]
    command = [line.removeprefix(_COMMAND) for line in shown if line.startswith(_COMMAND)]
    config = [line for line in shown if not line.startswith((_COMMAND, _PYTHON))]
    forms = {
        "Python": "".join(map("".join, zip(imports, python, strict=True))),
        "YAML": "\n".join(config),
        "Command line": "".join(command),
    }
    return {place: text for place, text in forms.items() if text}


def _others(run: Run, varied: Mapping[str, Value]) -> dict[str, Value]:
    """Returns values that were varied, beside those of the strategy and the choices of config groups."""
    others = {}
    for name, value in run.settings.chosen.items():
        is_group = _CONFIG_GROUPS.fullmatch(name) or any(other.startswith(f"{name}.") for other in run.settings.values)
        is_varied = name in varied or ("ranks" in varied and is_ranks(name))
        if is_varied and not is_group and not name.startswith(STRATEGIES):
            others[name] = value
    return others
