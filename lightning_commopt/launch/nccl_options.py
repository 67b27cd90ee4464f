"""NcclOptions: settings of NCCL, checked, and put into the environment before a process group is made."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lightning_commopt.launch.conf_path import conf_dir
from lightning_commopt.launch.nccl_variables import PREFIX, nccl_variables
from lightning_commopt.plan import OptionError
from lightning_commopt.text.validation import did_you_mean, info


@dataclass(frozen=True, kw_only=True)
class NcclOptions:
    """Settings of NCCL.

    Attributes:
        settings: by name: ``"NCCL_ALGO"``, or ``"algo"`` for short. True and False stand for 1 and 0.
        override: replace what the user's environment has; otherwise that counts.

    Raises:
        OptionError: NCCL has no such variable, or it does not take the value.
    """

    settings: Mapping[str, Any]
    override: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.override, bool):
            raise OptionError(f"nccl: override must be true or false, got {self.override!r}")
        object.__setattr__(self, "settings", dict(_checked(name, value) for name, value in self.settings.items()))

    @classmethod
    def from_config(cls, config: Any) -> NcclOptions | None:
        """Makes options from what a strategy was given.

        That is options; the name of a profile; a mapping of settings, also with ``override`` and ``profile``; or None.

        Raises:
            OptionError: there is no such profile or setting.
        """
        if config is None or isinstance(config, cls):
            return config
        if isinstance(config, str):
            return cls(settings=_load_profile(config))
        if not isinstance(config, Mapping):
            raise OptionError(f"nccl must be the name of a profile or a mapping of settings, got {config!r}")
        settings = {str(name): value for name, value in config.items()}
        override = settings.pop("override", False)
        profile = settings.pop("profile", None)
        of_profile = {} if profile is None else cls(settings=_load_profile(profile)).settings
        return cls(settings={**of_profile, **cls(settings=settings).settings}, override=override)

    def apply(self, environment: MutableMapping[str, str] = os.environ) -> dict[str, str]:
        """Sets the variables before a process group is made; returns what was set.

        Where the environment has another value, that stays, unless ``override`` is set.
        """
        chosen = {}
        for name, value in self.settings.items():
            if self.override or environment.get(name, value) == value:
                chosen[name] = value
            else:
                info(f"{name}={environment[name]} of the environment is kept, not {value}: nccl has no override=True.")
        environment.update(chosen)
        return chosen


def profiles() -> dict[str, Path]:
    """Returns the file of each profile: the configs of the group ``nccl``."""
    return {path.stem: path for path in sorted((conf_dir() / "nccl").glob("*.yaml"))}


def _load_profile(name: Any) -> dict[str, Any]:
    known = profiles()
    if not isinstance(name, str) or name not in known:
        raise OptionError(f"nccl={name!r} is no profile; known: {', '.join(known)}{did_you_mean(name, known)}")
    settings: dict[str, Any] = yaml.safe_load(known[name].read_text(encoding="utf-8"))
    return settings


def _checked(name: str, value: Any) -> tuple[str, str]:
    """Returns the full name of a setting, and its value as NCCL reads it."""
    full = name.upper() if name.upper().startswith(PREFIX) else PREFIX + name.upper()
    variables = nccl_variables()
    if full not in variables:
        short = [each.removeprefix(PREFIX).lower() for each in variables]
        raise OptionError(f"nccl: NCCL has no setting {name!r}{did_you_mean(full.removeprefix(PREFIX).lower(), short)}")
    variable = variables[full]
    if variable.removed_in is not None:
        raise OptionError(f"nccl: {full} has no effect since NCCL {variable.removed_in}, which removed it")
    text = str(int(value)) if isinstance(value, bool) else str(value)
    if not isinstance(value, str | int | float) or not variable.accepts(text):
        raise OptionError(f"nccl: {full} must be {variable.allowed}, got {value!r}")
    return full, text
