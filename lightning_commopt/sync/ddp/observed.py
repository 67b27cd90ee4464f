"""Observes the gradient sync of strategies, with hooks that average as DDP does without a hook.

DDP compares the annotations of a hook by identity and reads its ``__qualname__``. Therefore this module has no
``from __future__ import annotations``, and the hook is a bound method.
"""

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.compat.collectives import has_collective_hooks
from lightning_commopt.compat.fsdp import units_of
from lightning_commopt.compat.lightning import wrap_comm_hook
from lightning_commopt.compat.torch import registered_hooks, sparse_values
from lightning_commopt.measure.observer import ARRIVE, END, SEND, START, BucketInfo, Observers, SyncObserver
from lightning_commopt.sync.ddp.buckets import BucketOrder, synced_parameters
from lightning_commopt.sync.ddp.observed_reducer import ObservedReducer, can_observe_reducer
from lightning_commopt.sync.strategies import LightningStrategy
from lightning_commopt.text.validation import warn, warn_once

_CASTING_HOOKS = (
    "fp16_compress_hook",
    "fp16_compress_wrapper_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper_hook",
)

# The attributes in which torch's PowerSGDState keeps something for each bucket, by the bucket's index.
_POWERSGD_MEMORIES = ("error_dict", "p_memory_dict", "q_memory_dict")

# DDP rebuilds its buckets once, in the second or third backward. From the fifth on, descriptions of buckets are reused.
_SETTLING_BACKWARDS = 4

DDPHook = Callable[[Any, Any], torch.futures.Future[Any]]

# For each model, a function to call before every backward. The functions do not refer to the model.
_BEFORE_BACKWARD: WeakKeyDictionary[DistributedDataParallel, Callable[[], None]] = WeakKeyDictionary()

# For each model, a hook that is still to be registered. The hooks do not refer to the model.
_NEW_HOOKS: WeakKeyDictionary[DistributedDataParallel, DDPHook] = WeakKeyDictionary()


class _AddedObservers(Observers):
    """Observers of a strategy that has no ``sync_observers`` itself."""


class _HookWrapper:
    """Wraps the hook that Lightning's ``DDPStrategy`` registers. It is a class because strategies are pickled."""

    def __init__(self, strategy: LightningStrategy, observers: Observers) -> None:
        self._strategy, self._observers = strategy, observers

    def __call__(self, hook: DDPHook) -> DDPHook:
        assert isinstance(self._strategy.model, DistributedDataParallel)
        return ObservedHook(hook, self._strategy.model, self._observers).reduce


def observe(strategy: LightningStrategy, observer: SyncObserver) -> None:
    """Notifies ``observer`` of every bucket of a strategy.

    Call it before the strategy wraps the model, `observe_wrapped` after that, and `before_backward` before every
    backward. Our strategies have ``sync_observers``, and notify them without the other two calls.

    Without a ``comm_hook``, the all-reduces that DDP issues are observed on CPU from torch 2.14 on. On CUDA, and with
    older versions, they are issued from Python with the same arithmetic, which gives the same bits and takes one more
    pass over the gradients. If gradient sync cannot be observed, this warns once.
    """
    observers = _observers_of(strategy)
    if observers is None:
        observers = _AddedObservers()
        vars(strategy)["sync_observers"] = observers
        wrap_comm_hook(strategy, _HookWrapper(strategy, observers))
    observers.add(observer)


def stop_observing(strategy: LightningStrategy, observer: SyncObserver) -> None:
    """Reverts `observe`, if it was called."""
    if (observers := _observers_of(strategy)) is not None:
        observers.remove(observer)


def _observers_of(strategy: LightningStrategy) -> Observers | None:
    return getattr(strategy, "sync_observers", None)


def observe_wrapped(strategy: LightningStrategy) -> None:
    """Completes `observe` once the strategy has wrapped the model."""
    model, observers = strategy.model, _observers_of(strategy)
    if not isinstance(observers, _AddedObservers) or not observers:
        return
    if not isinstance(model, DistributedDataParallel):
        # The collectives of FSDP2 say all that buckets would.
        has_units = model is not None and bool(units_of(model))
        if getattr(strategy, "world_size", 1) > 1 and not has_units:
            phases = "the phases of steps"
            timed = f"{phases} and their collectives" if has_collective_hooks() else f"only {phases}"
            warn_once(f"{type(strategy).__name__} has no DDP buckets to observe: {timed} are timed.")
        return
    if model in _BEFORE_BACKWARD:
        return
    if not registered_hooks(model):
        observe_all_reduce(model, observers)
    elif not any(isinstance(owner, ObservedBuckets) for owner in registered_hooks(model)):
        _warn_of_unknown_hook()


def observe_all_reduce(model: DistributedDataParallel, observers: Observers) -> None:
    """Notifies ``observers`` of DDP's own average, for a model that was just wrapped and has no hook.

    DDP takes one hook, so ours is registered in the first backward: a callback may register one in ``on_train_start``.
    """
    if can_observe_reducer(model):
        _BEFORE_BACKWARD[model] = ObservedReducer(model, observers).before_backward
    else:
        hook = ObservedAllReduce(model, observers)
        _NEW_HOOKS[model] = hook.reduce
        _BEFORE_BACKWARD[model] = hook.look_for_kept_gradients


def before_backward(model: object) -> None:
    """Prepares observers for a backward. Must be called before every backward of a model that may be observed."""
    if not isinstance(model, DistributedDataParallel):
        return
    if (hook := _NEW_HOOKS.pop(model, None)) is not None:
        if registered_hooks(model):
            _warn_of_unknown_hook()
        else:
            model.register_comm_hook(None, hook)
    if (prepare := _BEFORE_BACKWARD.get(model)) is not None:
        prepare()


def _warn_of_unknown_hook() -> None:
    warn_once("A comm hook that the strategy has not registered cannot be observed: only phases of steps are timed.")


class ObservedBuckets:
    """Describes the buckets of a model that was just wrapped to observers."""

    def __init__(self, model: DistributedDataParallel, observers: Observers) -> None:
        self._observers = observers
        self._names = {id(parameter): name for name, parameter in model.module.named_parameters()}
        self._order = BucketOrder(len(synced_parameters(model)))
        self._settled: dict[int, BucketInfo] = {}
        self._num_backwards = 0

    def __getstate__(self) -> dict[str, object]:
        """Returns nothing, so that a copy is empty; see `BucketHook`."""
        return {}

    def _info(self, bucket: dist.GradBucket, flat: torch.Tensor) -> BucketInfo:
        index = bucket.index()
        if index in self._settled:
            return self._settled[index]
        names = tuple(self._names[id(parameter)] for parameter in bucket.parameters())
        index, is_last = self._order.place(index, bucket.is_last(), names)
        info = BucketInfo(index, sparse_values(flat).nbytes, names, is_last)
        self._num_backwards += index == 0
        if self._num_backwards > _SETTLING_BACKWARDS and not flat.is_sparse:
            self._settled[index] = info
        return info


class ObservedHook(ObservedBuckets):
    """Wraps a hook of DDP that does not notify observers; `reduce` is the hook.

    All time between the call and the result counts as on the wire. The number of bytes is known for torch's casts and
    its PowerSGD; other hooks are assumed to send as many bytes as the gradients have.
    """

    def __init__(self, hook: DDPHook, model: DistributedDataParallel, observers: Observers) -> None:
        super().__init__(model, observers)
        self._hook = hook
        self._casts = getattr(hook, "__name__", "") in _CASTING_HOOKS

    def reduce(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Calls the hook for one bucket, and returns a future of its result."""
        flat = bucket.buffer()
        sync = self._observers.ready(self._info(bucket, flat))
        sync.note(START)
        sync.note(SEND)
        values = sparse_values(flat)
        numel_before = _numel_after_compression(state)
        future = self._hook(state, bucket)
        numel = _numel_after_compression(state) - numel_before or values.numel()
        num_bytes = numel * (2 if self._casts else values.element_size())

        def finish(done: torch.futures.Future[Any]) -> torch.Tensor:
            value = done.value()
            sync.note(ARRIVE)
            sync.note(END, num_bytes)
            averaged: torch.Tensor = value[0] if isinstance(value, list) else value
            return averaged

        return future.then(finish)


class ObservedAllReduce(ObservedBuckets):
    """Averages as DDP does without a hook, bit for bit; `reduce` is the hook.

    DDP multiplies gradients by the reciprocal of the number of ranks when it copies them into the bucket, but divides
    sparse gradients, and gradients that are views of the bucket, kept from earlier batches. The results differ if the
    reciprocal is rounded. `look_for_kept_gradients` must therefore be called before every backward.
    """

    def __init__(self, model: DistributedDataParallel, observers: Observers) -> None:
        super().__init__(model, observers)
        self._group: dist.ProcessGroup = model.process_group
        self._world_size = dist.get_world_size(self._group)
        is_power_of_two = self._world_size & (self._world_size - 1) == 0
        self._kept_gradients_matter = model.gradient_as_bucket_view and not is_power_of_two
        self._parameters = [p for p in model.module.parameters() if p.requires_grad]
        self._kept: dict[int, int] = {}

    def look_for_kept_gradients(self) -> None:
        """Records the addresses of the gradients that exist before a backward."""
        if self._kept_gradients_matter:
            self._kept = {id(p): p.grad.data_ptr() for p in self._parameters if p.grad is not None}

    def reduce(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Starts to average one bucket; returns a future of its buffer, which then holds the average."""
        flat = bucket.buffer()
        info = self._info(bucket, flat)
        sync = self._observers.ready(info)
        sync.note(START)
        sync.note(SEND)
        if flat.is_sparse:
            flat.div_(self._world_size)
        elif self._kept:
            self._divide_where_kept(bucket)
        elif self._world_size > 1:
            flat.mul_(1 / self._world_size)

        def finish(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            (averaged,) = done.value()
            sync.note(ARRIVE)
            sync.note(END, info.gradient_bytes)
            return averaged

        # DDP calls this method of the group too; dist.all_reduce is slower.
        return self._group.allreduce([flat]).get_future().then(finish)

    def _divide_where_kept(self, bucket: dist.GradBucket) -> None:
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if self._kept.get(id(parameter)) == gradient.data_ptr():
                gradient.div_(self._world_size)
            else:
                gradient.mul_(1 / self._world_size)


def _numel_after_compression(state: object) -> int:
    return getattr(state, "total_numel_after_compression", 0)  # torch's PowerSGDState has this counter


class TorchHook(NamedTuple):
    """The three ``ddp_comm_*`` arguments of ``DDPStrategy``."""

    hook: Callable[..., Any]
    state: object | None = None
    wrapper: Callable[..., Any] | None = None

    def forget_buckets(self) -> None:
        """Lets torch's PowerSGD start again with another wrapper, whose buckets differ from the last one's.

        Its state has residuals and factors by the index of a bucket, and no names of parameters by which they could be
        moved. DDP rebuilds its buckets in the first backwards, so these are left uncompressed.
        """
        if not hasattr(self.state, "start_powerSGD_iter"):
            return
        state: Any = self.state
        memories = [getattr(state, name) for name in _POWERSGD_MEMORIES]
        if any(memories):
            warn(
                "ddp_comm_hook: DDP has wrapped the model again, so torch's PowerSGD loses its residuals and factors,"
                f" and sends the gradients of the next {_SETTLING_BACKWARDS} backwards uncompressed."
                " comm_hook='powersgd' keeps its residuals."
            )
        for memory in memories:
            memory.clear()
        state.iter = min(state.iter, state.start_powerSGD_iter - _SETTLING_BACKWARDS)

    def attach(self, model: DistributedDataParallel, observers: Observers) -> None:
        """Registers the hook with a new wrapper. If torch refuses it on CPU, this warns, and DDP all-reduces."""
        hook = self.hook if self.wrapper is None else self.wrapper(self.hook)
        if observers:
            hook = ObservedHook(hook, model, observers).reduce
        try:
            model.register_comm_hook(state=self.state, hook=hook)
        except TypeError as error:
            if model.device_type == "cuda":
                raise
            warn(f"ddp_comm_hook has no effect on {model.device_type}: torch refuses it ({error}).")
            return
        if model.device_type != "cuda" and getattr(self.hook, "__module__", "").endswith("powerSGD_hook"):
            warn(
                "torch's powerSGD_hook can abort or hang over gloo if there is more than one bucket. Use"
                " comm_hook='powersgd' of this package instead, which does not."
            )
