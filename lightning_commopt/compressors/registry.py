"""Compressors by name, as a configuration writes them, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from lightning_commopt.compressors.all_reduce import AllReduce
from lightning_commopt.compressors.alternating import AlternatingLowRank, AlternatingPowerSGD
from lightning_commopt.compressors.base import Compressor
from lightning_commopt.compressors.cast import Cast
from lightning_commopt.compressors.hierarchical import Hierarchical
from lightning_commopt.compressors.int8 import BlockInt8, Int8
from lightning_commopt.compressors.powersgd import LowRank, PowerSGD
from lightning_commopt.compressors.wrappers import AfterSteps, BySize, ErrorFeedback


class _Entry(NamedTuple):
    cls: type[Compressor]
    fixed: dict[str, Any]

    @property
    def options(self) -> list[str]:
        return [field.name for field in dataclasses.fields(self.cls) if field.name not in self.fixed]  # type: ignore[arg-type]


_BY_NAME: dict[str, _Entry] = {
    "all_reduce": _Entry(AllReduce, {}),
    "bf16": _Entry(Cast, {"dtype": torch.bfloat16}),
    "fp16": _Entry(Cast, {"dtype": torch.float16}),
    "powersgd": _Entry(PowerSGD, {}),
    "alternating_powersgd": _Entry(AlternatingPowerSGD, {}),
    "int8": _Entry(Int8, {}),
    "hierarchical": _Entry(Hierarchical, {}),
    "low_rank": _Entry(LowRank, {}),
    "alternating_low_rank": _Entry(AlternatingLowRank, {}),
    "block_int8": _Entry(BlockInt8, {}),
    "error_feedback": _Entry(ErrorFeedback, {}),
    "after_steps": _Entry(AfterSteps, {}),
    "by_size": _Entry(BySize, {}),
}


def compressor_names() -> list[str]:
    """Returns the names that `compressor_from_config` knows, "none" first."""
    return ["none", *_BY_NAME]


def compressor_from_config(config: str | Mapping[str, Any] | Compressor | None) -> Compressor | None:
    """Builds a compressor from what a user writes.

    Args:
        config: a name; a mapping with ``name`` and that compressor's options (``inner`` of a wrapper is again any
            of these); or a compressor, which is returned as it is.

    Returns:
        The compressor, or None for None and "none".

    Raises:
        ValueError: unknown name or option, or an option's value is out of range.
        TypeError: ``config`` is none of these.
    """
    if config is None or isinstance(config, Compressor):
        return config
    if isinstance(config, str):
        config = {"name": config}
    if not isinstance(config, Mapping):
        raise TypeError(f"must be a name, a mapping with a name, or a compressor, got {config!r}")
    options = {str(key): value for key, value in config.items()}
    name = options.pop("name", None)
    if name is None and "name" not in config:
        raise ValueError(f"has no 'name' in {dict(config)!r}; known names: {', '.join(compressor_names())}")
    if name in (None, "none"):
        if options:
            raise ValueError(f"'none' has no options, got {options!r}")
        return None
    entry = _BY_NAME.get(name) if isinstance(name, str) else None
    if entry is None:
        raise ValueError(f"{name!r} is unknown; known names: {', '.join(compressor_names())}")
    unknown = [option for option in options if option not in entry.options]
    if unknown:
        known = ", ".join(entry.options) or "no options"
        raise ValueError(f"{name!r} has no option {', '.join(map(repr, unknown))}; it has: {known}")
    if "inner" in options:
        options["inner"] = compressor_from_config(options["inner"])
    missing = [
        field.name
        for field in dataclasses.fields(entry.cls)  # type: ignore[arg-type]
        if field.default is dataclasses.MISSING and field.name not in {*options, *entry.fixed}
    ]
    if missing:
        raise ValueError(f"{name!r} needs the option {', '.join(map(repr, missing))}")
    return entry.cls(**entry.fixed, **options)


def compressor_to_config(compressor: Compressor) -> dict[str, Any]:
    """Returns the mapping that `compressor_from_config` makes an equal compressor from.

    Raises:
        ValueError: the compressor is of a class without a name.
    """
    values = {field.name: getattr(compressor, field.name) for field in dataclasses.fields(compressor)}  # type: ignore[arg-type]
    for name, entry in _BY_NAME.items():
        if type(compressor) is entry.cls and all(values[key] == value for key, value in entry.fixed.items()):
            options = {key: value for key, value in values.items() if key not in entry.fixed}
            if "inner" in options:
                options["inner"] = compressor_to_config(options["inner"])
            return {"name": name, **options}
    raise ValueError(f"{type(compressor).__name__} has no name in configurations; known names: {compressor_names()}")


def compressor_name(compressor: Compressor) -> str:
    """Returns the name that configurations use, or that of the class where there is none."""
    try:
        return str(compressor_to_config(compressor)["name"])
    except ValueError:
        return type(compressor).__name__
