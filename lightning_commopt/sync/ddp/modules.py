"""The gradient syncs of modules in the user's own training loop (Fabric), and their checkpoints."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.compat.torch import call_after_all_reduces
from lightning_commopt.measure.observer import Observers
from lightning_commopt.sync.checkpoint import gather_state, read_state, states_of_modules
from lightning_commopt.sync.ddp.gradient_sync import GradientSync
from lightning_commopt.sync.ddp.hook import GradientSyncError
from lightning_commopt.sync.ddp.observed import before_backward
from lightning_commopt.sync.state import AnyState
from lightning_commopt.sync.strategies import BucketedStrategy


class SyncedModule:
    """The gradient sync of a module, with hooks on the outputs of its forward that detect synchronized backwards.

    The hooks call the methods `forward`, `begin` and `end` through this object, so that these can be wrapped.

    Attributes:
        sync: the gradient sync.
        is_running: whether a backward has begun and neither ended nor been followed by another forward.
        is_awaited: whether outputs of a forward still wait for their backward.
    """

    def __init__(self, sync: GradientSync, syncs: ModuleSyncs) -> None:
        self.sync = sync
        self._syncs = syncs
        self._wrapping = 0
        self.is_running = self.is_awaited = False

    def follow(self, model: DistributedDataParallel) -> None:
        """Follows a wrapper that was just made, instead of the previous one."""
        self._wrapping += 1
        self.is_running = self.is_awaited = False
        model.register_forward_hook(_ForwardHook(self._after_forward), with_kwargs=True)

    def forward(self, inputs: object) -> None:
        """Called after every forward, with its inputs."""

    def begin(self) -> None:
        """Called when a backward reaches an output, before any gradient is computed."""
        before_backward(self.sync.model)

    def end(self) -> None:
        """Called when a backward has ended without an exception.

        The gradients have then been averaged, except in the first backward of a static graph.
        """
        self._syncs.end_backward(self)

    def _after_forward(self, model: DistributedDataParallel, args: object, kwargs: object, outputs: object) -> None:
        self.forward((args, kwargs))
        if not torch.is_grad_enabled():
            return
        if not model.require_backward_grad_sync:
            self.sync.note_accumulation()
            return
        self.is_running = False
        wrapping = self._wrapping

        def begin_backward(gradient: Tensor) -> None:
            if wrapping != self._wrapping:
                raise GradientSyncError(
                    "a plan was applied between forward and backward, so this backward's gradients would not be"
                    " averaged: call apply_plan before forward or after backward"
                )
            if not self.is_running:
                self.is_running = True
                self.begin()
                call_after_all_reduces(self._finish)

        def register(output: Tensor) -> Tensor:
            if output.requires_grad:
                self.is_awaited = True
                output.register_hook(begin_backward)
            return output

        apply_to_collection(outputs, Tensor, register)

    def _finish(self) -> None:
        self.is_running = self.is_awaited = False
        self.end()


class ModuleSyncs:
    """The `GradientSync` of each module that was set up and is still alive. They share their observers.

    The ``strategy`` is Fabric's; it has the ranks, and the plan for modules that are not set up yet.

    Attributes:
        observers: notified of every bucket of every module.
    """

    def __init__(self, strategy: BucketedStrategy) -> None:
        self._strategy = strategy
        self.observers = Observers()
        self._entries: dict[int, SyncedModule] = {}  # entries by the id of their module
        self._early_states: dict[int, AnyState] = {}  # restored states, by the id of a module that is not set up yet
        self._earlier_bytes = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Makes a copy empty: copying one of Fabric's modules copies this, too, and the copy is not set up."""
        return ModuleSyncs, (self._strategy,)

    @property
    def wire_bytes(self) -> int:
        """Payload bytes of gradients that this rank has passed to collectives so far, for all modules."""
        return self._earlier_bytes + sum(entry.sync.wire_bytes for entry in tuple(self._entries.values()))

    def of(self, module: object) -> GradientSync | None:
        """Returns the sync of a module, which may be its wrapper; None if it was not set up."""
        entry = self._find(module)
        return None if entry is None else entry.sync

    def attached(self) -> list[GradientSync]:
        """Returns the syncs of wrappers that are alive, in the order in which they were set up."""
        return [entry.sync for entry in self._entries.values() if entry.sync.model is not None]

    def add(self, module: Module, attach: Callable[[DistributedDataParallel, GradientSync], None]) -> None:
        """Creates the sync of a module. All ranks must call it.

        ``attach`` must attach the sync to DDP's wrapper, if ``module`` is one.
        """
        sync = GradientSync(self._strategy.plan, observers=self.observers)
        entry = SyncedModule(sync, self)
        if isinstance(module, DistributedDataParallel):
            attach(module, sync)
            entry.follow(module)
            sync.note_set_up()
        self._entries[id(module)] = entry
        weakref.finalize(module, self._drop, id(module), entry).atexit = False
        unwrapped = _unwrapped(module)
        saved = self._early_states.pop(id(unwrapped), None)
        if saved is not None:
            sync.restore(saved)
            sync.resume(unwrapped)

    def end_backward(self, entry: SyncedModule) -> None:
        """Counts a backward of a module whose gradients have been averaged."""
        entry.sync.end_backward(ends_static_graph=False)

    def follow(self, model: DistributedDataParallel) -> None:
        """Follows the backwards of a module that was wrapped again."""
        entry = self._find(model)
        assert entry is not None
        entry.follow(model)

    def gather(self, modules: Mapping[str, Any]) -> dict[str, Any]:
        """Gathers the modules' states for a checkpoint, by name; see `gather_state`."""
        gathered = {}
        for name, module in modules.items():
            entry = self._find(module)
            if entry is not None:
                gathered[name] = gather_state(entry.sync.state(), self._strategy, can_save=not entry.is_running)
        return {name: saved for name, saved in gathered.items() if saved is not None}

    def restore(self, saved: Any, modules: Mapping[str, Any]) -> None:
        """Resumes from what `gather` has returned, at once or when a module is set up. All ranks must call it.

        ``modules`` has the objects that are loaded, by their names in the checkpoint.
        """
        loaded = {name: module for name, module in modules.items() if isinstance(module, Module)}
        states = states_of_modules(saved, loaded)
        for name, module in loaded.items():
            sync = self.of(module)
            if sync is None and name not in states:
                continue
            compressor = (self._strategy if sync is None else sync).plan.comm_hook
            state = read_state(states.get(name), self._strategy, compressor)
            if sync is not None:
                sync.restore(state)
                sync.resume(_unwrapped(module))
            else:
                self._early_states[id(module)] = state
                weakref.finalize(module, self._early_states.pop, id(module), None).atexit = False

    def _find(self, module: object) -> SyncedModule | None:
        if id(module) in self._entries:
            return self._entries[id(module)]
        for entry in reversed(tuple(self._entries.values())):
            model = entry.sync.model
            if model is not None and model.module is module:
                return entry
        return None

    def _drop(self, key: int, entry: SyncedModule) -> None:
        if self._entries.get(key) is entry:
            del self._entries[key]
        entry.sync.detach()
        self._earlier_bytes += entry.sync.wire_bytes


class _ForwardHook:
    """Calls a function after a forward, outside of what ``torch.compile`` compiles. A copied module's calls nothing."""

    def __init__(self, function: Callable[..., None] | None = None) -> None:
        self._function = None if function is None else torch.compiler.disable(function)

    def __call__(self, *args: Any) -> None:
        if self._function is not None:
            self._function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _ForwardHook, ()


def _unwrapped(module: Module) -> Module:
    return module.module if isinstance(module, DistributedDataParallel) else module
