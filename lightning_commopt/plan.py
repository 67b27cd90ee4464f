"""CommPlan: how the gradients of a model travel, validated once, here."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.compat.lightning import MisconfigurationException
from lightning_commopt.compressors import Compressor, compressor_from_config, compressor_to_config
from lightning_commopt.compressors.words import option_in_words, short_name
from lightning_commopt.measure.runs.files import RUN_FILE
from lightning_commopt.measure.runs.settings import nested
from lightning_commopt.text.validation import did_you_mean

DDP_OPTION_SINCE = {
    "init_sync": "2.7",
    "skip_all_reduce_unused_params": "2.8",
    "bucket_cap_mb_list": "2.11",
    "batched_grad_copy": "2.12",
    "forward_sync_buffers": "2.13",
    "lazy_bucket_allocation": "2.15",
}
"""The first torch release whose ``DistributedDataParallel`` has the option."""


class OptionError(MisconfigurationException, ValueError):
    """A user's option is unknown, out of range, or not available here."""


class UnknownOptionError(OptionError, TypeError):
    """A user's option has an unknown name."""


@cache
def ddp_options() -> frozenset[str]:
    """Returns the names of the options that the installed torch's ``DistributedDataParallel`` takes."""
    return frozenset(inspect.signature(DistributedDataParallel.__init__).parameters) - {"self", "module"}


@dataclass(frozen=True, kw_only=True)
class CommPlan:
    """How gradients travel: DDP's options, and the compressor that its comm hook drives.

    None always means "not passed": DDP's own default holds. That matters for ``bucket_cap_mb``, as an explicit 25
    drops the small first bucket of the default.

    Attributes:
        static_graph: the graph and the set of used parameters are the same in every step. With gradient
            accumulation the first backward is synchronized all the same, as DDP records the graph in it.
        gradient_as_bucket_view: gradients are views of the buckets, which saves a copy and their memory.
        bucket_cap_mb: MiB in a bucket; or one number for each bucket, in the order in which gradients become
            ready (torch >= 2.11).
        find_unused_parameters: look in every step for parameters without a gradient.
        comm_hook: how buckets are averaged: a name ("none", "bf16", "fp16", "powersgd", ...), a mapping of a name
            and options (``{"name": "powersgd", "matrix_rank": 2}``), or a compressor, which is what the plan holds.
            None and "none" leave DDP's own all-reduce. Lossy but for "none" and "all_reduce".
        broadcast_buffers: send rank 0's buffers to all ranks before each forward.
        forward_sync_buffers: its successor (torch >= 2.13).
        init_sync: check and send parameters when the model is wrapped (torch >= 2.7).
        skip_all_reduce_unused_params: do not all-reduce gradients that no rank used (torch >= 2.8).
        batched_grad_copy: copy gradients into buckets in batches (torch >= 2.12).
        lazy_bucket_allocation: allocate buckets in the first backward (torch >= 2.15).

    Raises:
        OptionError: a value is out of range, two exclude each other, or the installed torch lacks the option.
    """

    static_graph: bool | None = None
    gradient_as_bucket_view: bool | None = None
    bucket_cap_mb: float | Sequence[float] | None = None
    find_unused_parameters: bool | None = None
    comm_hook: Compressor | None = None
    broadcast_buffers: bool | None = None
    forward_sync_buffers: bool | None = None
    init_sync: bool | None = None
    skip_all_reduce_unused_params: bool | None = None
    batched_grad_copy: bool | None = None
    lazy_bucket_allocation: bool | None = None

    def __post_init__(self) -> None:
        for name in _SWITCHES:
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, int) or value not in (0, 1):
                raise OptionError(f"{name} must be true, false or None, got {value!r}")
            object.__setattr__(self, name, bool(value))
            _check_available(name, name)
        object.__setattr__(self, "bucket_cap_mb", _check_bucket_cap(self.bucket_cap_mb))
        if isinstance(self.bucket_cap_mb, tuple):
            _check_available("bucket_cap_mb_list", "a list as bucket_cap_mb")
        try:
            object.__setattr__(self, "comm_hook", compressor_from_config(self.comm_hook))
        except (ValueError, TypeError) as error:
            raise OptionError(f"comm_hook: {error}") from error
        if self.comm_hook is not None and self.skip_all_reduce_unused_params:
            raise OptionError(
                "comm_hook and skip_all_reduce_unused_params=True exclude each other: DDP then leaves out buckets"
                " without telling the hook"
            )

    def with_comm_hook(self, comm_hook: str | Mapping[str, Any] | Compressor) -> CommPlan:
        """Returns this plan with another compressor; None is an OptionError, as "none" means no compressor."""
        try:
            if comm_hook is None:
                raise TypeError("got None")
            compressor = compressor_from_config(comm_hook)
        except (ValueError, TypeError) as error:
            raise OptionError(
                f"a plan must be a CommPlan, or what comm_hook takes (such as 'bf16' or 'none'): {error}. CommPlan.load"
                " reads a plan from a file, CommPlan.from_dict makes one from a mapping of its options."
            ) from error
        return dataclasses.replace(self, comm_hook=compressor)

    @property
    def name(self) -> str:
        """The one short name of the plan, for tables and figures: all that differs from the defaults.

        First the compressor with its options (see `short_name`), or "uncompressed"; then the buckets, then the
        switches in the order of the attributes. A switch that is set to DDP's own default is left out.

        >>> CommPlan().name
        'uncompressed'
        >>> CommPlan(comm_hook={"name": "powersgd", "matrix_rank": 4}, bucket_cap_mb=25, static_graph=True).name
        'powersgd rank 4, 25 MiB buckets, static graph'
        """
        words = ["uncompressed" if self.comm_hook is None else short_name(self.comm_hook)]
        if isinstance(self.bucket_cap_mb, tuple):
            words.append(f"buckets of {', '.join(f'{size:.3g}' for size in self.bucket_cap_mb)} MiB")
        elif self.bucket_cap_mb is not None:
            words.append(f"{self.bucket_cap_mb:g} MiB buckets")
        of_ddp = inspect.signature(DistributedDataParallel.__init__).parameters
        for name in _SWITCHES:
            value = getattr(self, name)
            if value not in (None, getattr(of_ddp.get(name), "default", None)):
                words.append(option_in_words(_SHORTER.get(name, name), value))
        return ", ".join(words)

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> CommPlan:
        """Makes a plan from a mapping of option names to values, as `to_dict` gives it; raises an OptionError."""
        _refuse_records(options)
        check_option_names(options, known=plan_options())
        return cls(**options)

    def to_dict(self) -> dict[str, Any]:
        """Returns the options that are set, in types that JSON has; a compressor without a name is a ValueError."""
        options: dict[str, Any] = {name: getattr(self, name) for name in plan_options()}
        if isinstance(self.bucket_cap_mb, tuple):
            options["bucket_cap_mb"] = list(self.bucket_cap_mb)  # kept as a tuple, to compare and hash
        if self.comm_hook is not None:
            options["comm_hook"] = compressor_to_config(self.comm_hook)
        return {name: value for name, value in options.items() if value is not None}

    @classmethod
    def from_json(cls, text: str) -> CommPlan:
        """Makes a plan from what `to_json` gave; raises an OptionError for other text."""
        try:
            options = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise OptionError(f"a plan must be JSON: {error}") from error
        if not isinstance(options, dict):
            raise OptionError(f"a plan must be a JSON object, got {text[:80]!r}")
        return cls.from_dict(options)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def load(cls, path: str | Path) -> CommPlan:
        """Reads a plan that `save` wrote; raises an OptionError that names a file without one, or an OSError."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:  # UnicodeDecodeError among them
            kind = type(error) if isinstance(error, OptionError) else OptionError
            raise kind(f"{path} holds no plan: {error}") from error

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    def ddp_kwargs(self) -> dict[str, Any]:
        """Returns the keywords for ``DistributedDataParallel``: those that are set, and no others."""
        kwargs = {name: getattr(self, name) for name in plan_options() if name != "comm_hook"}
        if isinstance(self.bucket_cap_mb, tuple):
            kwargs["bucket_cap_mb_list"] = list(kwargs.pop("bucket_cap_mb"))
        return {name: value for name, value in kwargs.items() if value is not None}


@cache
def plan_options() -> tuple[str, ...]:
    """Returns the names of a plan's options."""
    return tuple(field.name for field in dataclasses.fields(CommPlan))


_SHORTER = {"gradient_as_bucket_view": "bucket_view"}
_SWITCHES = tuple(name for name, hint in get_type_hints(CommPlan).items() if hint == bool | None)


def check_option_names(options: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raises an UnknownOptionError for a name that is not ``known``, or an OptionError if a newer torch has it."""
    for name in options:
        if name not in known:
            if name in DDP_OPTION_SINCE:
                _check_available(name, name)
            hint = did_you_mean(name, known)
            raise UnknownOptionError(f"unknown option {name!r}; known options: {', '.join(sorted(known))}{hint}")


def _refuse_records(options: Mapping[str, Any]) -> None:
    """Raises an OptionError that shows where the plan stands, if these are another file's content: a run's."""
    if {"status", "sync_method"} <= options.keys():
        what, where = f"the record of a run ({RUN_FILE})", "under the names in 'settings' that begin with 'plan.'"
        settings = options.get("settings")
        plan = options.get("plan")  # of older records
        if not isinstance(plan, Mapping):
            plan = nested(settings).get("plan") if isinstance(settings, Mapping) else None
    elif "kind" in options and "format" in options:
        what, where, plan = f"the result of {options['kind']}", "under 'plan'", options.get("plan")
    else:
        return
    if not isinstance(plan, Mapping):
        raise OptionError(f"this is {what}, which has no plan")
    shown = json.dumps({name: value for name, value in plan.items() if value is not None}, default=str)
    raise OptionError(f"this is {what}; its plan stands {where}: save that alone as the plan: {shown}")


def _check_available(ddp_option: str, asked: str) -> None:
    if ddp_option not in ddp_options():
        since = DDP_OPTION_SINCE.get(ddp_option, "another version")
        raise OptionError(f"{asked} needs torch >= {since}, but torch {torch.__version__} is installed")


def _check_bucket_cap(value: Any) -> float | tuple[float, ...] | None:
    if value is None:
        return None
    if isinstance(value, Sequence) and not isinstance(value, str):
        if not value:
            raise OptionError("bucket_cap_mb must not be an empty list")
        return tuple(_check_mib(item) for item in value)
    return _check_mib(value)


def _check_mib(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not (0 < float(value) < math.inf):
        raise OptionError(f"bucket_cap_mb must be a number of MiB above 0, or a list of such, got {value!r}")
    return int(value) if isinstance(value, Integral) else float(value)
