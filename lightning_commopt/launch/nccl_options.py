"""NcclOptions: settings of NCCL that a strategy asks for, and the environment of the process that has them."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_commopt.launch.conf_path import conf_dir
from lightning_commopt.launch.nccl_variables import PREFIX, nccl_variables
from lightning_commopt.plan import OptionError
from lightning_commopt.text.validation import did_you_mean, info, warn_once


@dataclass(frozen=True, kw_only=True)
class NcclOptions:
    """Settings of NCCL, set as environment variables before a process group is made.

    Attributes:
        settings: values by name, ``"NCCL_ALGO"`` or ``"algo"`` for short. True and False stand for 1 and 0.
        override: whether to replace values in the user's environment, which are kept otherwise.

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
        """Makes options from the argument ``nccl`` of a strategy.

        Args:
            config: options, the name of a profile, or a mapping of settings that may also have ``override`` and
                ``profile``; None for none.

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

        A different value in the environment is kept unless ``override`` is set.
        """
        chosen = {}
        for name, value in self.settings.items():
            if self.override or environment.get(name, value) == value:
                chosen[name] = value
            else:
                info(
                    f"{name}={environment[name]} in the environment takes precedence over {value} from the option nccl;"
                    " override=True in nccl replaces it."
                )
        environment.update(chosen)
        return chosen


_replaced: dict[str, tuple[str | None, str]] = {}
"""For each variable that `set_in_process` has set, its earlier value (None if unset), and the value that was set."""
_in_use: dict[str, str] | None = None
"""The variables that it has set last, which NCCL may have read; None before the first process group over NCCL."""


def set_in_process(options: NcclOptions | None) -> None:
    """Sets a strategy's variables in place of an earlier one's, before it creates a process group over NCCL."""
    global _in_use
    restore_process()
    before = dict(os.environ)
    chosen = {} if options is None else options.apply()
    _replaced.update({name: (before.get(name), value) for name, value in chosen.items()})
    if _in_use not in (None, chosen):
        warn_once(
            "nccl: an earlier Trainer of this process had other settings, and NCCL reads most of its variables only"
            " once per process. Run each Trainer in a process of its own, as commopt-train does for each job."
        )
    _in_use = chosen


def restore_process() -> None:
    """Restores the variables that `set_in_process` has set, except those that other code has changed since."""
    for name, (before, own) in _replaced.items():
        if os.environ.get(name) != own:
            continue
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
    _replaced.clear()


def profiles() -> dict[str, Path]:
    """Returns the profiles, which are the configs of the group ``nccl``, with their files."""
    return {path.stem: path for path in sorted((conf_dir() / "nccl").glob("*.yaml"))}


def _load_profile(name: Any) -> dict[str, Any]:
    known = profiles()
    if not isinstance(name, str) or name not in known:
        raise OptionError(f"nccl={name!r} is not a profile; known: {', '.join(known)}{did_you_mean(name, known)}")
    from omegaconf import OmegaConf  # its import takes time, and only profiles need it

    return dict(OmegaConf.load(known[name]))


def _checked(name: str, value: Any) -> tuple[str, str]:
    """Returns the full name of a setting, and its value as NCCL reads it."""
    full = name.upper() if name.upper().startswith(PREFIX) else PREFIX + name.upper()
    variables = nccl_variables()
    if full not in variables:
        short = [known.removeprefix(PREFIX).lower() for known in variables]
        raise OptionError(f"nccl: NCCL has no setting {name!r}{did_you_mean(full.removeprefix(PREFIX).lower(), short)}")
    variable = variables[full]
    if variable.removed_in is not None:
        raise OptionError(f"nccl: {full} has no effect since NCCL {variable.removed_in}, which removed it")
    text = str(int(value)) if isinstance(value, bool) else str(value)
    if not isinstance(value, str | int | float) or not variable.accepts(text):
        raise OptionError(f"nccl: {full} must be {variable.allowed}, got {value!r}")
    return full, text
