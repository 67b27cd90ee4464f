"""Settings: the values of a run's options, from its configuration, overrides and plan, each of them once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

Value: TypeAlias = object
"""A bool, an int, a float, a text, None, or a tuple of these. Numbers are equal if they are as numbers: 25 and 25.0."""

# A project may put these config groups into any package, so their names are recorded without it.
_OWN_GROUPS = ("commopt", "commopt_record")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a run. Names are dotted, and lists become tuples."""

    # The resolved configuration, and under the names of config groups the chosen options. It has no option of a
    # strategy that the plan has with the same value.
    values: Mapping[str, Value] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()  # Hydra's overrides, as written on the command line
    plan: Mapping[str, Value] | None = None  # the plan's options that differ from their defaults; None without a plan
    plan_defaults: Mapping[str, Value] = field(default_factory=dict)  # the other options of its compressor
    plan_type: str | None = None  # class of the plan; None without one

    def __post_init__(self) -> None:
        for name in ("values", "plan", "plan_defaults"):
            values = getattr(self, name)
            if values is not None:
                object.__setattr__(self, name, {key: typed(value) for key, value in values.items()})

    @cached_property
    def chosen(self) -> dict[str, Value]:
        """The names that overrides have set, with their resolved values."""
        return {name: self.get(name) for name in map(override_name, self.overrides)}

    @cached_property
    def plan_options(self) -> dict[str, Value]:
        """All options of the plan and of its compressor, by dotted names; empty without a plan."""
        return {**self.plan_defaults, **(self.plan or {})}

    def __contains__(self, name: str) -> bool:
        """Returns whether the configuration has a name, or the plan has this option of a strategy."""
        return name in self.values or name.rpartition("strategy.")[2] in self.plan_options

    def get(self, name: str) -> Value:
        """Returns the value of a name of the configuration; None if it is unset, or unknown."""
        return self.values[name] if name in self.values else self.plan_options.get(name.rpartition("strategy.")[2])

    def with_plan(self, plan: Mapping[str, Value], plan_defaults: Mapping[str, Value], plan_type: str) -> Settings:
        """Returns these settings with a plan, whose options the configuration does not repeat."""
        known = Settings(plan=plan, plan_defaults=plan_defaults)
        values = {name: value for name, value in self.values.items() if name not in known or known.get(name) != value}
        return dataclasses.replace(self, values=values, plan=plan, plan_defaults=plan_defaults, plan_type=plan_type)

    def to_record(self) -> dict[str, Any]:
        """Returns the keys of ``run.json`` that hold the settings; the plan is nested, as in ``plan.json``."""
        plan = None if self.plan is None else nested(self.plan)
        of_plan = {"plan": plan, "plan_defaults": nested(self.plan_defaults), "plan_type": self.plan_type}
        return {"settings": self.values, "overrides": self.overrides, **of_plan}

    @staticmethod
    def fields_in(record: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields of the settings in the keys of a ``run.json``."""
        plan = record.get("plan")
        return {
            "values": record.get("settings", {}),
            "overrides": record.get("overrides", ()),
            "plan": flat(plan) if isinstance(plan, Mapping) else plan,
            "plan_defaults": flat(record.get("plan_defaults", {})),
            "plan_type": record.get("plan_type"),
        }


def typed(value: object, folder: Path | None = None) -> Value:
    """Returns a value in the types of `Value`. In texts the path of ``folder`` becomes "."."""
    if isinstance(value, list | tuple):
        return tuple(typed(element, folder) for element in value)
    if value is None or isinstance(value, int | float):
        return value
    text = str(value)
    return text if folder is None else text.replace(str(folder.resolve()), ".").replace(str(folder), ".")


def flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the leaves of nested mappings by dotted names; lists are leaves.

    >>> flat({"model": {"size": 64, "name": None}, "seed": 1})
    {'model.size': 64, 'model.name': None, 'seed': 1}
    """
    leaves: dict[str, Any] = {}
    for name, inner in value.items():
        leaves |= flat(inner, f"{prefix}{name}.") if isinstance(inner, Mapping) else {f"{prefix}{name}": inner}
    return leaves


def nested(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Reverts `flat` for the names that begin with a prefix. Names below another name with a value are dropped.

    >>> nested({"plan.comm_hook.name": "int8", "seed": 1})
    {'plan': {'comm_hook': {'name': 'int8'}}, 'seed': 1}
    """
    nodes: dict[str, Any] = {}
    for name, value in values.items():
        *parents, last = name.removeprefix(prefix).split(".")
        inner = nodes if name.startswith(prefix) else None
        for parent in parents:
            inner = inner.setdefault(parent, {}) if isinstance(inner, dict) else None
        if isinstance(inner, dict):
            inner[last] = value
    return nodes


def hydra_settings(folder: Path, config: Mapping[str, Any] | None = None) -> Settings:
    """Returns the settings of this process's Hydra job, without a plan.

    The path of ``folder``, of the run, becomes "." in values, as it does not affect training. ``config`` is resolved
    and in plain types; None for the one that Hydra saved in the job's directory.
    """
    from hydra.core.hydra_config import HydraConfig

    job = HydraConfig.get()
    plain = _saved_config(Path(job.runtime.output_dir)) if config is None else config
    choices = {str(group): option for group, option in job.runtime.choices.items()}
    return settings_of(folder, plain, job.overrides.task, choices)


def settings_of(
    folder: Path, config: Mapping[str, Any], overrides: Sequence[str], choices: Mapping[str, Any] | None = None
) -> Settings:
    """Returns the result of `hydra_settings` for any Hydra job, also without its choices of config groups."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    groups = {
        override_name(group): option for group, option in (choices or {}).items() if not group.startswith("hydra/")
    }
    values = {name: typed(value, folder) for name, value in {**groups, **flat(config)}.items()}
    for override in overrides:
        if (name := override_name(override)) not in values:  # the configuration has it under another name, or lacks it
            parsed = OverridesParser.create().parse_override(override)
            values[name] = None if parsed.is_delete() else _unquoted(parsed.value())
    return Settings(values=values, overrides=tuple(overrides))


def override_name(override: str) -> str:
    """Returns the name that an override sets: of a value, or of a config group with its package.

    >>> [override_name(override) for override in ("++trainer.devices=2", "~a.b", "+commopt@fit=bf16", "optim@b=sgd")]
    ['trainer.devices', 'a.b', 'commopt', 'optim@b']
    """
    name = override.lstrip("+~").partition("=")[0].strip()
    group = name.partition("@")[0]
    return group if group in _OWN_GROUPS else name


def text_of(value: Value) -> str:
    """Returns a value as written on a command line.

    >>> [text_of(value) for value in (None, True, 25.0, (1, 25), "bf16")]
    ['null', 'true', '25', '[1,25]', 'bf16']
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"{value:.10g}"
    return f"[{','.join(map(text_of, value))}]" if isinstance(value, tuple) else str(value)


def _unquoted(value: Any) -> Value:
    """Returns a value of Hydra's parser in the types of `Value`."""
    if isinstance(value, list):
        return tuple(map(_unquoted, value))
    return typed(getattr(value, "text", value))


def _saved_config(output_dir: Path) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        config = OmegaConf.load(output_dir / ".hydra" / "config.yaml")
        try:
            plain = OmegaConf.to_container(config, resolve=True)
        except OmegaConfBaseException:  # some values resolve only within the application
            plain = OmegaConf.to_container(config, resolve=False)
    except (OSError, ValueError, YAMLError, OmegaConfBaseException):
        return {}
    return {str(name): value for name, value in plain.items()} if isinstance(plain, dict) else {}
