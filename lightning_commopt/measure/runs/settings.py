"""The settings of a run, flat: dotted names and JSON values, and the names that overrides set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

# A project may put these config groups into any package, so their names are recorded without it.
_OWN_GROUPS = ("commopt", "commopt_record")


def flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the leaves of nested mappings by dotted names; lists are leaves.

    >>> flat({"model": {"size": 64, "name": None}, "seed": 1})
    {'model.size': 64, 'model.name': None, 'seed': 1}
    """
    leaves: dict[str, Any] = {}
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            leaves |= flat(inner, f"{prefix}{name}.")
        else:
            leaves[f"{prefix}{name}"] = inner
    return leaves


def nested(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Reverts `flat` for the names that begin with a prefix. A name below another that has a value is left out.

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


def hydra_settings(folder: Path, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns ``settings``, ``overrides`` and ``chosen`` of a `RunRecord` for this process's Hydra job.

    The settings are the leaves of the configuration and, under the names of config groups, the chosen options. The path
    of ``folder``, of the run, becomes "." in values, as it does not affect training. ``config`` is resolved and in
    plain types; None for the one that Hydra saved in the job's directory.
    """
    from hydra.core.hydra_config import HydraConfig

    job = HydraConfig.get()
    plain = _saved_config(Path(job.runtime.output_dir)) if config is None else config
    choices = {str(group): option for group, option in job.runtime.choices.items()}
    return settings_of(folder, plain, job.overrides.task, choices)


def settings_of(
    folder: Path, config: Mapping[str, Any], overrides: Sequence[str], choices: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Returns the result of `hydra_settings` for any Hydra job, also without its choices of config groups."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed = OverridesParser.create().parse_overrides(list(overrides))
    groups = {
        _name(*group.partition("@")[::2]): option
        for group, option in (choices or {}).items()
        if not group.startswith("hydra/")
    }
    settings = {name: _relative(value, folder) for name, value in {**groups, **flat(config)}.items()}
    chosen = tuple(_name(override.key_or_group, override.package or "") for override in parsed)
    for name, override in zip(chosen, parsed, strict=True):
        settings.setdefault(name, _value_of(override))
    return {"settings": settings, "overrides": tuple(overrides), "chosen": chosen}


def text_of(value: Any) -> str:
    """Returns a setting's value as written on a command line.

    >>> [text_of(value) for value in (None, True, 25.0, [1, 25], "bf16")]
    ['null', 'true', '25', '[1,25]', 'bf16']
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return f"{value:.10g}"
    return f"[{','.join(map(text_of, value))}]" if isinstance(value, Iterable) and not isinstance(value, str) else value


def _name(group: str, package: str) -> str:
    return group if not package or group in _OWN_GROUPS else f"{group}@{package}"


def _value_of(override: Override) -> Any:
    """Returns the value of an override that the configuration has under another name, or lacks."""
    if override.is_delete():
        return None
    value = override.value()
    return value if isinstance(value, (int, float, type(None))) else override.get_value_element_as_str().strip("'\"")


def _saved_config(output_dir: Path) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        config = OmegaConf.load(output_dir / ".hydra" / "config.yaml")
        try:
            plain = OmegaConf.to_container(config, resolve=True)
        except OmegaConfBaseException:  # some values resolve only within the application
            plain = OmegaConf.to_container(config, resolve=False)
    except (OSError, ValueError):
        return {}
    return {str(name): value for name, value in plain.items()} if isinstance(plain, dict) else {}


def _relative(value: Any, folder: Path) -> Any:
    """Returns a value in JSON types, with "." for the folder."""
    if isinstance(value, str):
        return value.replace(str(folder.resolve()), ".").replace(str(folder), ".")
    if isinstance(value, (list, tuple)):
        return [_relative(element, folder) for element in value]
    return value if isinstance(value, (int, float, bool, type(None))) else str(value)
