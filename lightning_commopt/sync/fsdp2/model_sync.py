"""ShardedModelSync: applies the plan of a strategy, and changes of the plan, to a model that FSDP2 shards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module

from lightning_commopt.compressors import ShardedCompressor
from lightning_commopt.compressors.sharded import ShardedExact
from lightning_commopt.plan import OptionError
from lightning_commopt.plan.sharded import ShardedPlan
from lightning_commopt.sync.fsdp2.gradients import ShardedSync, place_on_nodes, sharded_units
from lightning_commopt.sync.fsdp2.parameters import GatheredParameters
from lightning_commopt.sync.gather import values_of_all_ranks
from lightning_commopt.sync.state import CommState
from lightning_commopt.sync.unit_layout import UnitLayout
from lightning_commopt.text.formatting import list_some
from lightning_commopt.text.validation import warn, warn_once

_MAX_FLUSHES = 100
"""Number of backwards after which unsent residuals are dropped, so that the plan's compressor takes over."""


class ShardedModelSync:
    """The plan of a strategy, and the comm objects that apply it in the units of a model.

    Residuals survive a change of the plan within a fit. If the new compressor keeps no residual, gradients are first
    sent uncompressed together with the residual, until all units have sent theirs, and then the new compressor takes
    over. Residuals are lost, with a warning, if their parameters are frozen or not reached by `_MAX_FLUSHES` backwards,
    and in a change of the plan between two fits.

    Attributes:
        plan: the plan in use.
        gradients: compresses reduce-scatters; None if FSDP2's own are used.
        model: the model that the plan is applied to; None outside of a fit.
    """

    def __init__(self, plan: ShardedPlan) -> None:
        self.plan = plan
        self.gradients = _sync_for(plan.comm_hook)
        self._parameters: GatheredParameters | None = None
        self.model: Module | None = None
        self._ranks_per_node: int | None = None
        self._timeout: timedelta | None = None
        self._earlier_bytes = 0
        self._num_flushes = self._flushed_bytes = 0  # since `gradients` was replaced
        self._has_compressed = plan.comm_hook is not None

    @property
    def wire_bytes(self) -> int | None:
        """Payload bytes of gradients handed to reduce-scatters; None if no plan has had a ``comm_hook``."""
        if not self._has_compressed:
            return None
        return self._earlier_bytes + (0 if self.gradients is None else self.gradients.wire_bytes)

    def attach(self, model: Module, *, ranks_per_node: int, timeout: timedelta | None) -> None:
        """Applies the plan to a model whose units are sharded. All ranks must call it.

        Raises:
            OptionError: the model has no unit, or the plan cannot be applied to its units.
        """
        self.model, self._ranks_per_node, self._timeout = model, ranks_per_node, timeout
        if not self.has_units and self.plan.is_lossy:
            raise OptionError(
                "comm_hook: configure_model has not sharded the model, so there is no reduce-scatter to compress: call"
                " lightning_commopt.shard or fully_shard in it"
            )
        self._gather_parameters()
        if self.gradients is not None:
            self._attach(self.gradients)

    def check_plan(self, plan: ShardedPlan) -> None:
        """Raises an OptionError if this model cannot change to a plan."""
        if self.model is not None and plan.unit_options() != self.plan.unit_options():
            setters = {**plan.unit_options(), **self.plan.unit_options()}
            names = ", ".join(setter.removeprefix("set_") for setter in setters)
            raise OptionError(f"{names} cannot change in the middle of a fit, because the units have been set up")
        if self.model is not None and plan.is_lossy and not self.has_units:
            raise OptionError("comm_hook: the model is not sharded, so there is no reduce-scatter to compress")

    def change_plan(self, plan: ShardedPlan) -> None:
        """Switches to another plan. All ranks must call it between two batches, with equal plans.

        Raises:
            OptionError: the plan cannot be applied to the units of the model; the old plan stays.
        """
        old, self.plan = self.plan, plan
        self._has_compressed |= plan.comm_hook is not None
        if self.model is None:
            if plan.comm_hook != old.comm_hook:
                self._count_bytes()
                if self.gradients is not None and self.gradients.residuals():
                    warn("comm_hook was changed between two fits, so the residuals of the last fit are lost.")
                self.gradients = _sync_for(plan.comm_hook)
            return
        try:
            self._gather_parameters()
            if plan.comm_hook != old.comm_hook:
                self._replace(plan.comm_hook)
        except OptionError:
            self.plan = old
            self._gather_parameters()
            raise

    def resume(self, state: CommState[UnitLayout]) -> None:
        """Continues from a state that `agree_on_state` has returned, between two backwards. All ranks must call it."""
        sync = self.gradients
        keeps_residual = sync is not None and sync.compressor.claims.keeps_residual
        if not keeps_residual and on_any_rank(bool(state.residuals)):
            self._replace(self.plan.comm_hook, state)
        elif sync is not None:
            sync.restore(state)

    def end_flush(self) -> None:
        """Switches to the plan's compressor once the old residuals are sent. All ranks must call it between batches."""
        sync = self.gradients
        if sync is None or not isinstance(sync.compressor, ShardedExact) or sync.wire_bytes == self._flushed_bytes:
            return
        self._num_flushes, self._flushed_bytes = self._num_flushes + 1, sync.wire_bytes
        state = sync.state()
        unsent = {*state.residuals, *(name for names, _, _ in state.buckets.values() for name in names)}
        if on_any_rank(bool(unsent & sync.trained_names()) and self._num_flushes < _MAX_FLUSHES):
            return
        if unsent:
            warn(
                f"Rank {dist.get_rank()}: comm_hook has lost the residuals of {list_some(sorted(unsent), 8)}, because"
                f" these parameters are frozen, or were not used in {self._num_flushes} backwards.",
                on_every_rank=True,
            )
        self._replace(self.plan.comm_hook, CommState(num_syncs=state.num_syncs))

    def detach(self) -> None:
        """Restores the units' own collectives, and keeps the state for checkpoints and a further fit."""
        for comm_objects in (self.gradients, self._parameters):
            if comm_objects is not None:
                comm_objects.detach()
        self._parameters = self.model = None

    @property
    def has_units(self) -> bool:
        """Whether the model is sharded, while attached."""
        assert self.model is not None
        return any(isinstance(module, FSDPModule) for module in self.model.modules())

    def _attach(self, sync: ShardedSync) -> None:
        assert self.model is not None
        sync.attach(self.model, ranks_per_node=self._ranks_per_node, timeout=self._timeout)
        sync.allow_overlap()

    def _replace(self, compressor: ShardedCompressor | None, state: CommState[UnitLayout] | None = None) -> None:
        """Replaces `gradients` by one with another compressor, which gets the residuals, or those of ``state``."""
        assert self.model is not None
        if compressor is not None:  # called for its errors, before anything changes
            place_on_nodes(compressor, sharded_units(self.model), self._ranks_per_node)
        old = self.gradients
        if state is None:
            state = CommState() if old is None else old.state()
        residuals = state.all_residuals()
        keeps = compressor is not None and compressor.claims.keeps_residual
        chosen = compressor if keeps or not on_any_rank(bool(residuals)) else ShardedExact()
        if old is not None:
            old.detach()
        new = _sync_for(chosen)
        try:
            if new is not None:
                self._attach(new)
                new.restore(CommState(chosen, state.num_syncs, {}, residuals))
        except OptionError:
            if new is not None:
                new.detach()  # some units may have got a comm object
            if old is not None:
                self._attach(old)
            raise
        self._count_bytes()
        self._num_flushes = self._flushed_bytes = 0
        self.gradients = new

    def _count_bytes(self) -> None:
        """Adds up the bytes of `gradients`, which is about to be replaced."""
        self._earlier_bytes += 0 if self.gradients is None else self.gradients.wire_bytes

    def _gather_parameters(self) -> None:
        """Compresses all-gathers if the plan has a ``param_hook``, else restores FSDP2's own."""
        assert self.model is not None
        is_wanted = self.plan.param_hook is not None
        if is_wanted and self._parameters is None:
            self._parameters = GatheredParameters()
            self._parameters.attach(self.model)
        elif not is_wanted and self._parameters is not None:
            self._parameters.detach()
            self._parameters = None


def _sync_for(compressor: ShardedCompressor | None) -> ShardedSync | None:
    return None if compressor is None else ShardedSync(compressor)


def on_any_rank(is_true: bool) -> bool:
    """Returns whether something is true on any rank. All ranks must call it.

    Ranks may differ because a sync that failed has left residuals on some of them.
    """
    return any(values_of_all_ranks(is_true))


def set_unit_options(model: Module, plan: ShardedPlan) -> None:
    """Sets the options of a plan for FSDP2's units; warns once if the model has no units."""
    covered: set[Module] = set()
    for module in model.modules():
        if isinstance(module, FSDPModule) and module not in covered:
            # The setters apply to all units below the module, and called once they let these share process groups.
            covered.update(module.modules())
            for setter, value in plan.unit_options().items():
                getattr(module, setter)(value)
    names = ", ".join(setter.removeprefix("set_") for setter in plan.unit_options())
    if names and not covered:
        warn_once(f"{names} has no effect: the model has no unit of FSDP2.")


def gradient_bytes(sharded: Sequence[FSDPModule]) -> tuple[int, int]:
    """Returns the bytes of a rank's gradients without and with sharding, in the parameters' dtype."""
    for module in sharded:
        module.reshard()  # the forward of a validation may have left its parameters gathered
    unsharded_bytes = sharded_bytes = 0
    for parameter in {p for module in sharded for p in module.parameters()}:  # type: ignore[attr-defined]
        if isinstance(parameter, DTensor) and parameter.requires_grad:
            local = parameter.to_local()
            # In a mesh of replicas, shards and tensor parallelism, the first sharded dimension is FSDP's.
            dimension = next(
                (i for i, placement in enumerate(parameter.placements) if not placement.is_replicate()), None
            )
            num_shards = 1 if dimension is None else parameter.device_mesh.size(dimension)
            sharded_bytes += local.numel() * local.element_size()
            unsharded_bytes += min(local.numel() * num_shards, parameter.numel()) * local.element_size()
    return unsharded_bytes, sharded_bytes


def require_sync(sharded: Iterable[FSDPModule], is_required: bool, *, unsharded: bool) -> None:
    """Sets whether the next backward reduces gradients: at all if ``unsharded``, else only between replicas."""
    for module in sharded:
        if unsharded:
            module.set_requires_gradient_sync(is_required, recurse=False)
        else:
            module.set_requires_all_reduce(is_required, recurse=False)
