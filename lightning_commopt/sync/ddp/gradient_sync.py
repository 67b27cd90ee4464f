"""GradientSync: synchronizes the gradients of one model in DDP for a strategy."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lightning_commopt.compat.torch import add_hooks, comm_hooks, flush_static_graph, hook_numbers, hooks_of
from lightning_commopt.compressors.wrappers import start_step_of
from lightning_commopt.measure.observer import Observers
from lightning_commopt.plan import CommPlan, OptionError
from lightning_commopt.sync.ddp.attach import (
    ResidualAdder,
    Trainable,
    attach_bucket_hook,
    find_foreign_hook,
    note_accumulated,
    place_compressor,
    preserve_buffers,
    unwrap,
)
from lightning_commopt.sync.ddp.buckets import gradient_bytes, separate_sparse_gradients
from lightning_commopt.sync.ddp.checkpoint import usable_state
from lightning_commopt.sync.ddp.hook import BucketHook
from lightning_commopt.sync.ddp.observed import TorchHook, observe_all_reduce
from lightning_commopt.sync.state import AnyState, CommState
from lightning_commopt.text.formatting import list_some
from lightning_commopt.text.validation import warn


class GradientSync:
    """The gradient sync of one model: the plan, DDP's hook, observers, state and bytes.

    A strategy owns it, wraps the model in DDP, calls `attach` for every wrapper, and `detach` before it drops the
    wrapper, which this object does not keep alive. The hook is the plan's compressor or the ``torch_hook``.

    Attributes:
        plan: the plan in use.
        observers: notified of every bucket.
        num_syncs: number of gradient syncs in this fit, including those before a checkpoint that it resumed.
        hook: drives the plan's compressor, while attached.
        trainable: the parameters that DDP synchronizes, while attached.

    Raises:
        OptionError: the plan has a compressor, and there is a ``torch_hook`` too.
    """

    def __init__(self, plan: CommPlan, torch_hook: TorchHook | None = None, observers: Observers | None = None) -> None:
        self._torch_hook = torch_hook
        self._model_ref: weakref.ref[DistributedDataParallel] | None = None
        self._ranks_per_node: int | None = None
        self._own_hooks: set[int] | None = None
        self._has_attached = False
        self.check_plan(plan)
        self.plan = plan
        self.observers = observers if observers is not None else Observers()
        self.num_syncs = 0
        self.hook: BucketHook | None = None
        self.trainable: Trainable | None = None
        self._residual_adder: ResidualAdder | None = None
        self._sparse_handles: list[RemovableHandle] = []
        self._is_graph_recorded = False
        self._accumulates = False
        self._gradient_bytes = 0
        self._earlier_bytes = 0
        self._restored: AnyState | None = None
        self._last_fit_state: CommState | None = None

    def check_plan(self, plan: CommPlan) -> None:
        """Raises an OptionError if DDP would have two hooks; while attached, also if `place_compressor` does."""
        if plan.comm_hook is None:
            return
        if self._torch_hook is not None:
            raise OptionError(f"comm_hook={plan.comm_hook!r} and ddp_comm_hook exclude each other: DDP takes one hook")
        if self.model is not None:
            place_compressor(self.model, plan.comm_hook, self._ranks_per_node)

    @property
    def model(self) -> DistributedDataParallel | None:
        return None if self._model_ref is None else self._model_ref()

    @property
    def unused_hook(self) -> str | None:
        """The name of the option whose hook is not used if there is only one rank."""
        if self.plan.comm_hook is not None:
            return "comm_hook"
        return "ddp_comm_hook" if self._torch_hook is not None else None

    @property
    def wire_bytes(self) -> int:
        """Payload bytes of gradients passed to collectives so far; without a compressor, the gradients' own bytes."""
        return self._earlier_bytes + (self.hook.bytes_sent if self.hook is not None else 0)

    def attach(
        self, model: DistributedDataParallel, *, timeout: timedelta | None, ranks_per_node: int | None = None
    ) -> None:
        """Registers the plan's hook with a wrapper; see `attach_bucket_hook`. All ranks must call it."""
        self._model_ref = weakref.ref(model)
        self._ranks_per_node = ranks_per_node
        self._gradient_bytes = gradient_bytes(model)
        self.trainable = Trainable(model)
        self._sparse_handles = separate_sparse_gradients(model)
        self._is_graph_recorded = False
        if self.plan.comm_hook is not None:
            if self.plan.find_unused_parameters and self.plan.comm_hook.claims.keeps_residual:
                warn(
                    "find_unused_parameters=True with error feedback: part of a parameter's residual is lost in each"
                    " step in which no rank uses that parameter."
                )
            self.hook = attach_bucket_hook(
                model, self.plan.comm_hook, timeout, self.num_syncs, ranks_per_node, self.observers
            )
        elif self._torch_hook is not None:
            if self._has_attached:
                self._torch_hook.forget_buckets()
            self._torch_hook.attach(model, self.observers)
        elif self.observers:
            observe_all_reduce(model, self.observers)
        self._has_attached = True

    def note_set_up(self) -> None:
        """Notes that the strategy has set up its wrapper; `rewrap` keeps hooks that are registered from now on."""
        if self.model is not None:
            self._own_hooks = hook_numbers(self.model)

    @property
    def must_sync(self) -> bool:
        """Whether the next backward must be synchronized, because DDP records a static graph in the first one."""
        return bool(self.plan.static_graph) and not self._is_graph_recorded

    def must_rewrap(self, optimizers: Sequence[torch.optim.Optimizer], *, is_first_batch: bool) -> bool:
        """Returns whether DDP's buckets are no longer right: parameters were frozen, or unfrozen for optimizers.

        Added parameters count only in the first batch of an epoch, since looking for them takes time.
        """
        model, trainable = self.model, self.trainable
        if model is None or trainable is None:
            return False
        if is_first_batch and trainable.has_added(model.module, optimizers):
            return True
        return trainable.has_unfrozen(optimizers) or (trainable.has_frozen() and not self.plan.find_unused_parameters)

    def note_accumulation(self) -> None:
        """Notes that a backward only accumulates gradients, which a later one synchronizes."""
        self._accumulates = True

    def end_backward(self, *, ends_static_graph: bool) -> None:
        """Counts a backward, if it was synchronized.

        Args:
            ends_static_graph: whether to finish the first backward of a static graph, because under manual optimization
                neither DDP nor Lightning does.
        """
        model = self.model
        if model is None:
            return
        if not model.require_backward_grad_sync:
            self.note_accumulation()
            return
        self._accumulates = False
        if model.static_graph and not self._is_graph_recorded:
            self._is_graph_recorded = True
            if ends_static_graph:
                flush_static_graph(model)
        self.num_syncs += 1
        if self.hook is None:
            self._earlier_bytes += self._gradient_bytes

    def change_plan(self, plan: CommPlan, wrap: Callable[[Module], None]) -> None:
        """Switches to another plan. All ranks must call it between two batches, with equal plans.

        ``wrap`` must wrap a module in DDP, and call `attach`.
        """
        self.plan = plan
        if self.model is not None:
            self.rewrap(wrap)

    def rewrap(self, wrap: Callable[[Module], None]) -> None:
        """Unwraps the model and wraps it again. All ranks must call it.

        Residuals of buckets whose last gradient sync did not end are lost, with a warning; all others are kept.
        """
        model = self.model
        assert model is not None
        resumed = self.hook.state() if self.hook is not None and self.hook.has_only_resumed else None
        device, hook, trainable = model.device, self.hook, self.trainable
        assert trainable is not None
        hooks, own_hooks = hooks_of(model), self._own_hooks
        comm_hook = find_foreign_hook(model) if self._torch_hook is None else None
        module = unwrap(model)
        residuals = trainable.keep_existing(module, self.detach())
        if hook is not None and hook.lost:
            warn(
                f"Rank {dist.get_rank()}: the last gradient sync of {list_some(hook.lost, 8)} did not end, so their"
                " residuals are lost; the residuals of other parameters are kept.",
                on_every_rank=True,
            )
        # Both differ if the last gradient sync has failed on some ranks only.
        agreed = torch.tensor([self.num_syncs, len(residuals)], device=device)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        self.num_syncs, most_residuals = agreed.tolist()
        # With find_unused_parameters, parameters may be frozen for this batch only, because parts are trained in turn.
        unfrozen = trainable.unfrozen(module, takes_turns=bool(self.plan.find_unused_parameters))
        with preserve_buffers(module), unfrozen:  # wrapping overwrites buffers with rank 0's
            _synchronize(device)  # a program may wrap on a stream that waits for no other, as Lightning does
            wrap(module)
            if self._accumulates and self.plan.find_unused_parameters:
                note_accumulated(module)
            _synchronize(device)
            if own_hooks is not None and self.model is not None:
                self.note_set_up()  # wrapping has registered the strategy's own hooks again
                add_hooks(self.model, hooks, left_out=own_hooks)
            if comm_hook is not None and self.model is not None and not comm_hooks(self.model):
                comm_hook.forget_buckets()
                comm_hook.attach(self.model, Observers())
            if resumed is not None:  # after resuming, a callback has frozen parameters as they were in the checkpoint
                self._resume(resumed, module)
            elif self.hook is not None:
                self.hook.add_residuals(residuals)
            elif most_residuals:  # also on a rank that has lost its residuals
                self._residual_adder = ResidualAdder(module, residuals)

    def state(self) -> CommState | None:
        """Returns the state of this fit or of one that has just ended, without copying; None if there is no state."""
        if self._last_fit_state is not None:
            return self._last_fit_state
        if self.hook is not None:
            return self.hook.state()
        if self._residual_adder is not None:
            return CommState(None, self.num_syncs, {}, dict(self._residual_adder.residuals))
        return CommState(None, self.num_syncs, is_common=True) if self.num_syncs else None

    def restore(self, state: AnyState) -> None:
        self._restored = state

    def resume(self, module: Module) -> None:
        """Resumes once from the state of a checkpoint, if there is one. All ranks must call it, between two batches."""
        self._last_fit_state = None
        if self._restored is not None:
            state, self._restored = self._restored, None
            self._resume(state, module)

    def _resume(self, state: AnyState, module: Module) -> None:
        compressor = self.hook.compressor if self.hook is not None else None
        usable = usable_state(state, compressor, module)
        self.num_syncs = usable.num_syncs
        self._cancel_residual_adder()
        if self.hook is not None:
            self.hook.resume(usable.buckets, usable.residuals, usable.num_syncs)
        elif not state.is_common:
            self._residual_adder = ResidualAdder(module, usable.residuals)

    def detach(self) -> dict[str, Tensor]:
        """Closes the hook, before its wrapper is dropped; returns this rank's unsent residuals by parameter name."""
        self.release_wrapper()
        while self._sparse_handles:
            self._sparse_handles.pop().remove()
        pending = self._cancel_residual_adder()
        if self.hook is None:
            return pending
        hook, self.hook = self.hook, None
        residuals = hook.close()
        self._earlier_bytes += hook.bytes_sent
        return residuals

    def keep_state(self) -> None:
        """Keeps the state for checkpoints that are saved after the fit. Must be called between two batches."""
        state = self.state()
        if state is not None:
            self._last_fit_state = state.on_cpu()

    def release_wrapper(self) -> None:
        """Drops the wrapper, before the end of a fit."""
        self._model_ref = self.trainable = None

    def end_fit(self) -> None:
        """Closes the hook, and resets what belongs to one fit."""
        try:
            start_step = start_step_of(self.plan.comm_hook)
            if self.hook is not None and 0 < self.num_syncs <= start_step:
                warn(f"comm_hook never compressed: training took {self.num_syncs} steps, but start_step={start_step}.")
        finally:
            self.detach()
            self._restored = None
            self.num_syncs = 0

    def _cancel_residual_adder(self) -> dict[str, Tensor]:
        """Returns the residuals that were not added yet."""
        adder, self._residual_adder = self._residual_adder, None
        return {} if adder is None else adder.cancel()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
