"""ShardedPlan: the options of communication for models that FSDP2 shards, which are validated here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed.fsdp import FSDPModule

from lightning_commopt.compressors import Compressor, ShardedCompressor
from lightning_commopt.compressors.configs import sharded_from_config
from lightning_commopt.compressors.words import short_name
from lightning_commopt.plan.base import OptionError, Plan, option_errors
from lightning_commopt.plan.ddp import CommPlan
from lightning_commopt.text.validation import check_choice, check_integer, check_switch

_NO_BUCKETS = "FSDP2 has no buckets"
_INAPPLICABLE = {
    "static_graph": "FSDP2 records no graph",
    "gradient_as_bucket_view": _NO_BUCKETS,
    "bucket_cap_mb": f"{_NO_BUCKETS}; what travels together is a unit, whose size shard(..., blocks=...) sets",
    "bucket_cap_mb_list": f"{_NO_BUCKETS}; what travels together is a unit, whose size shard(..., blocks=...) sets",
    "find_unused_parameters": "FSDP2 does not wait for gradients of parameters that a backward has not used",
    "broadcast_buffers": "FSDP2 sends no buffers",
    "forward_sync_buffers": "FSDP2 sends no buffers",
    "init_sync": "FSDP2 compares no parameters when it shards a model",
    "skip_all_reduce_unused_params": _NO_BUCKETS,
    "batched_grad_copy": _NO_BUCKETS,
    "lazy_bucket_allocation": _NO_BUCKETS,
    "ddp_comm_hook": "hooks of DDP average whole gradients",
}
"""For each option of DDP that cannot apply to FSDP2, the reason."""


@dataclass(frozen=True, kw_only=True)
class ShardedPlan(Plan):
    """The options of communication for models that FSDP2 shards.

    Attributes:
        comm_hook: how gradients travel in FSDP2's reduce-scatters: None or "none" for FSDP2's own; "bf16", "int8" or
            "int4"; or a mapping of a name and options (``{"name": "int8", "error_feedback": True}``), see `ShardedInt8`
            and the other classes there; "hierarchical" compresses only across nodes, with its ``inner``. Parameters of
            one dimension and all-reduces between replicas are not compressed. It is lossy, and needs torch >= 2.9.
        param_hook: how parameters travel in FSDP2's all-gathers: None for FSDP2's own, "int8" for blocks of 128 with
            one scale each. Forward and backward then compute with rounded parameters; the optimizer keeps exact ones.
            Parameters of one dimension are not compressed. It is lossy, and needs torch >= 2.9.
        accumulate_grads: what a rank adds up over ``accumulate_grad_batches``. "sharded": its shard, which is
            reduce-scattered in every batch; replicas (HSDP) are averaged only in the last batch, which costs no memory.
            "unsharded": the gradients of all parameters, which are reduce-scattered only in the last batch. During
            accumulation each rank then holds gradients as large as the model instead of its shard of them; the first
            use prints the number of bytes.
        separate_reduce_scatter_group: give reduce-scatters their own process groups, so that they overlap with
            all-gathers; see ``FSDPModule.set_separate_reduce_scatter_group``, which not all versions of torch have.
        reduce_scatter_max_input_buffers: the number of input buffers that a rank may have at a time, None for FSDP2's
            default; see ``FSDPModule.set_reduce_scatter_max_input_buffers``, which not all versions of torch have.

    Raises:
        OptionError: a value is out of range.
    """

    comm_hook: ShardedCompressor | None = None
    param_hook: Literal["int8"] | None = None
    accumulate_grads: Literal["sharded", "unsharded"] = "sharded"
    separate_reduce_scatter_group: bool = False
    reduce_scatter_max_input_buffers: int | None = None

    def __post_init__(self) -> None:
        with option_errors("comm_hook: "):
            object.__setattr__(self, "comm_hook", sharded_from_config(self.comm_hook))
        with option_errors():
            check_choice("param_hook", self.param_hook, ("int8", None))
            check_choice("accumulate_grads", self.accumulate_grads, ("sharded", "unsharded"))
            check_switch("separate_reduce_scatter_group", self.separate_reduce_scatter_group)
            if (size := self.reduce_scatter_max_input_buffers) is not None:
                check_integer("reduce_scatter_max_input_buffers", size, at_least=1)

    def check_torch(self) -> None:
        """Raises an OptionError if this torch cannot carry out the plan, which another machine may have written."""
        for name in ("comm_hook", "param_hook"):
            if getattr(self, name) is not None:
                check_available(name)
        for setter in self.unit_options():
            if not hasattr(FSDPModule, setter):
                raise OptionError(
                    f"{setter.removeprefix('set_')} needs a newer torch: {torch.__version__} has no FSDPModule.{setter}"
                )

    @classmethod
    def check_names(cls, names: Sequence[str]) -> None:
        for name in names:
            if name in _INAPPLICABLE:
                raise OptionError(
                    f"{name} is an option of DDP, which cannot apply to sharded models: {_INAPPLICABLE[name]}"
                )
        super().check_names(names)

    @classmethod
    def of(cls, plan: Any, words: Sequence[str] = ()) -> ShardedPlan:
        """Returns a plan for FSDP2 from a plan, from a plan of DDP, or from the path of a file with either.

        A `CommPlan` gives the compressor with the same name, with the options that differ from their defaults. The
        other arguments and errors are those of `Plan.of`.

        Raises:
            OptionError: ``plan`` has an option that cannot apply to FSDP2.
        """
        if isinstance(plan, CommPlan):
            options = {name: value for name in plan.options() if (value := getattr(plan, name)) is not None}
            cls.check_names([*options])
            return cls(**options)
        try:
            return super().of(plan, words)
        except OptionError as error:
            with suppress(OptionError):  # the file may have a plan of DDP, whose compressor has other options
                return cls.of(CommPlan.of(plan))
            raise error from None

    def with_comm_hook(self, comm_hook: str | Mapping[str, Any] | Compressor | ShardedCompressor) -> ShardedPlan:
        """Returns this plan with another compressor; None is an OptionError, as "none" means no compressor."""
        if comm_hook is None:
            raise OptionError("a plan must be a ShardedPlan, or what comm_hook takes (such as 'int8' or 'none')")
        return self.replaced(comm_hook=comm_hook)

    @property
    def name(self) -> str:
        """The short name of the plan in all tables and figures, with everything that differs from the defaults.

        >>> ShardedPlan(accumulate_grads="unsharded").name
        'uncompressed, accumulate unsharded'
        """
        words = ["uncompressed" if self.comm_hook is None else short_name(self.comm_hook)]
        if self.param_hook is not None:
            words.append(f"{self.param_hook} parameters")
        if self.accumulate_grads != "sharded":
            words.append(f"accumulate {self.accumulate_grads}")
        if self.separate_reduce_scatter_group:
            words.append("separate reduce-scatter group")
        if self.reduce_scatter_max_input_buffers is not None:
            words.append(f"{self.reduce_scatter_max_input_buffers} input buffers")
        return ", ".join(words)

    @property
    def is_lossy(self) -> bool:
        """Whether the plan changes numbers."""
        return self.comm_hook is not None or self.param_hook is not None

    def unit_options(self) -> dict[str, Any]:
        """Returns the values to set on each unit, by the names of the setters of ``FSDPModule``."""
        values = {
            "set_separate_reduce_scatter_group": self.separate_reduce_scatter_group,
            "set_reduce_scatter_max_input_buffers": self.reduce_scatter_max_input_buffers,
        }
        return {setter: value for setter, value in values.items() if value not in (None, False)}


def check_available(option: str = "comm_hook") -> None:
    """Raises an OptionError with the name of the option if this torch has no comm objects."""
    needed = ("set_custom_reduce_scatter", "set_force_sum_reduction_for_comms", "set_gradient_divide_factor")
    if not all(hasattr(FSDPModule, name) for name in needed):
        raise OptionError(
            f"{option} of CommOptModelParallel needs torch >= 2.9, where FSDP2 takes other collectives, but torch"
            f" {torch.__version__} is installed"
        )
