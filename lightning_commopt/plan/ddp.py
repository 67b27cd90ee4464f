"""CommPlan: the options of gradient sync in DDP, which are validated here."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Integral, Real
from typing import Any, ClassVar, get_type_hints

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.compressors import Compressor, compressor_from_config
from lightning_commopt.compressors.words import option_in_words, short_name
from lightning_commopt.plan.base import OptionError, Plan, check_known, option_errors

DDP_OPTION_SINCE = {
    "init_sync": "2.7",
    "skip_all_reduce_unused_params": "2.8",
    "bucket_cap_mb_list": "2.11",
    "batched_grad_copy": "2.12",
    "forward_sync_buffers": "2.13",
    "lazy_bucket_allocation": "2.15",
}
"""The first torch release whose ``DistributedDataParallel`` has the option."""


@cache
def ddp_options() -> frozenset[str]:
    """Returns the names of the options that the installed torch's ``DistributedDataParallel`` takes."""
    return frozenset(inspect.signature(DistributedDataParallel.__init__).parameters) - {"self", "module"}


@dataclass(frozen=True, kw_only=True)
class CommPlan(Plan):
    """The options of gradient sync: DDP's own, and the compressor of its comm hook.

    None always means that the option is not passed, so that DDP's own default holds. This matters for
    ``bucket_cap_mb``: an explicit 25 loses the small first bucket of the default.

    Attributes:
        static_graph: the graph and the set of used parameters are the same in every step. With gradient
            accumulation the first backward is still synchronized, because DDP records the graph in it.
        gradient_as_bucket_view: gradients are views of the buckets, which saves a copy and its memory.
        bucket_cap_mb: size of a bucket in MiB; or a list with the size of each bucket, in the order in which gradients
            become ready (torch >= 2.11).
        find_unused_parameters: look in every step for parameters without a gradient.
        comm_hook: how buckets are averaged: a name ("none", "bf16", "fp16", "powersgd", ...), a mapping of a name
            and options (``{"name": "powersgd", "matrix_rank": 2}``), or a compressor; the plan turns the first two into
            a compressor. None and "none" leave DDP's own all-reduce. All except "none" and "all_reduce" are lossy.
        broadcast_buffers: send rank 0's buffers to all ranks before each forward.
        forward_sync_buffers: the successor of ``broadcast_buffers`` (torch >= 2.13).
        init_sync: check and send parameters when the model is wrapped (torch >= 2.7).
        skip_all_reduce_unused_params: do not all-reduce gradients that no rank has used (torch >= 2.8).
        batched_grad_copy: copy gradients into buckets in batches (torch >= 2.12).
        lazy_bucket_allocation: allocate buckets in the first backward (torch >= 2.15).

    Raises:
        OptionError: a value is out of range, two options exclude each other, or the installed torch lacks an option.
    """

    searched: ClassVar[tuple[str, ...]] = ("bucket_cap_mb", "comm_hook")

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
        with option_errors("comm_hook: "):
            object.__setattr__(self, "comm_hook", compressor_from_config(self.comm_hook))
        if self.comm_hook is not None and self.skip_all_reduce_unused_params:
            raise OptionError(
                "comm_hook and skip_all_reduce_unused_params=True exclude each other: DDP then leaves out buckets"
                " without telling the hook"
            )

    @property
    def is_lossy(self) -> bool:
        """Whether the plan changes numbers."""
        return self.comm_hook is not None and self.comm_hook.claims.is_lossy

    def with_comm_hook(self, comm_hook: str | Mapping[str, Any] | Compressor) -> CommPlan:
        """Returns this plan with another compressor; None is an OptionError, as "none" means no compressor."""
        try:
            if comm_hook is None:
                raise TypeError("got None")
            compressor = compressor_from_config(comm_hook)
        except (ValueError, TypeError) as error:
            raise OptionError(
                "a plan must be a CommPlan (CommPlan.load reads one from a file, CommPlan.from_dict makes one from a"
                f" mapping of its options), or what comm_hook takes (such as 'bf16' or 'none'): {error}"
            ) from error
        return dataclasses.replace(self, comm_hook=compressor)

    @classmethod
    def check_names(cls, names: Sequence[str]) -> None:
        check_option_names(names, known=cls.options())

    @property
    def name(self) -> str:
        """The short name of the plan in all tables and figures, with everything that differs from the defaults.

        It has the compressor with its options (see `short_name`) or "uncompressed", then the buckets, then the switches
        in the order of the attributes. A switch that is set to DDP's own default is left out.

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
        parameters = inspect.signature(DistributedDataParallel.__init__).parameters
        for name in _SWITCHES:
            value = getattr(self, name)
            if value not in (None, getattr(parameters.get(name), "default", None)):
                words.append(option_in_words(_SHORTER.get(name, name), value))
        return ", ".join(words)

    def ddp_kwargs(self) -> dict[str, Any]:
        """Returns the keywords for ``DistributedDataParallel``, without options that are None."""
        kwargs = {name: getattr(self, name) for name in self.options() if name != "comm_hook"}
        if isinstance(self.bucket_cap_mb, tuple):
            kwargs["bucket_cap_mb_list"] = list(kwargs.pop("bucket_cap_mb"))
        return {name: value for name, value in kwargs.items() if value is not None}


_FSDP2_OPTIONS = (
    *("param_hook", "accumulate_grads"),
    *("separate_reduce_scatter_group", "reduce_scatter_max_input_buffers"),
)
_SHORTER = {"gradient_as_bucket_view": "bucket_view"}
_SWITCHES = tuple(name for name, hint in get_type_hints(CommPlan).items() if hint == bool | None)


def check_option_names(options: Iterable[str], known: Sequence[str]) -> None:
    """Raises an UnknownOptionError for a name that is not ``known``, or an OptionError if it needs another torch."""
    for name in options:
        if name not in known:
            if name in _FSDP2_OPTIONS:
                raise OptionError(f"{name} is an option of CommOptModelParallel, for models that FSDP2 shards")
            if name in DDP_OPTION_SINCE:
                _check_available(name, name)
            check_known(name, known)


def _check_available(ddp_option: str, label: str) -> None:
    """Raises an OptionError, which begins with ``label``, if the installed torch's DDP lacks an option."""
    if ddp_option not in ddp_options():
        since = DDP_OPTION_SINCE.get(ddp_option, "another version")
        raise OptionError(f"{label} needs torch >= {since}, but torch {torch.__version__} is installed")


def _check_bucket_cap(value: object) -> float | tuple[float, ...] | None:
    if value is None:
        return None
    if isinstance(value, Sequence) and not isinstance(value, str):
        if not value:
            raise OptionError("bucket_cap_mb must not be an empty list")
        return tuple(_check_mib(item) for item in value)
    return _check_mib(value)


def _check_mib(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not (0 < float(value) < math.inf):
        raise OptionError(f"bucket_cap_mb must be a number of MiB above 0, or a list of such numbers, got {value!r}")
    return int(value) if isinstance(value, Integral) else float(value)
