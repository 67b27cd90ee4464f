"""DDP's side of training steps on a `Machine`: gradients, buckets, the hook, and an optimizer that reads averages."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from lightning_commopt.compressors import Compressor
from lightning_commopt.sync.ddp import attach
from lightning_commopt.sync.ddp.checkpoint import usable_state
from lightning_commopt.sync.ddp.hook import BucketHook
from lightning_commopt.sync.executors import SideStreams
from lightning_commopt.sync.state import CommState
from support.fake_cuda import DEVICE
from support.machine import MAIN, Machine

# Matrices and vectors, in an odd number of buckets, the last two alike: they share what is made once for each layout.
# DDP rebuilds its buckets after the first step.
SHAPES = [(96, 64), (33,), (64, 128), (7,), (40, 33), (65, 48), (64, 128), (7,)]
FIRST_BUCKETS = ((0, 1, 2), (3, 4, 7), (5, 6))
BUCKETS = ((5, 4, 1, 0), (3, 2), (7, 6))
OTHER_BUCKETS = ((5, 4, 1, 0), (3,), (2, 7, 6))  # the first one's state is in use when the others are dropped
_NUM_RANKS, _RANKS_PER_NODE = 4, 2

_ACCUMULATE = "accumulate"


class _GradBucket:
    def __init__(self, index: int, parameters: Sequence[Tensor], flat: Tensor, is_last: bool) -> None:
        self.index = lambda: index
        self.parameters = lambda: parameters
        self.buffer = lambda: flat
        self.is_last = lambda: is_last


class _Ddp(nn.Module):
    """What the hook needs of DDP."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.process_group, self.device_type, self.device = "all", "cuda", DEVICE
        self.parameters_to_ignore: set[str] = set()
        self._use_python_reducer = False
        self._comm_hooks: list[Any] = []
        self.register_comm_hook = mock.Mock()


class Training:
    """One model in DDP.

    Args:
        machine: with `cuda_on` in effect.
        compressor: averages the buckets.
        accumulates_apart: gradients go into buckets on a stream of their own, on which the hook is called. torch
            2.9 does so where a model was wrapped on another stream than it is trained on, as Lightning wraps it.
        shapes: of the parameters.
        buckets: which of them are in each bucket.
        num_streams: None for as many as the hook takes.

    Attributes:
        compile_samples: what attaching the hook compiles kernels with.
    """

    compile_samples: Callable[[], None]

    def __init__(
        self,
        machine: Machine,
        compressor: Compressor,
        accumulates_apart: bool = False,
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        buckets: Sequence[Sequence[int]] = FIRST_BUCKETS,
        num_streams: int | None = None,
    ) -> None:
        self._machine = machine
        self._compressor = compressor
        self._stream = _ACCUMULATE if accumulates_apart else MAIN
        self.module = nn.Module()
        for number, shape in enumerate(shapes):
            self.module.register_parameter(f"p{number}", nn.Parameter(torch.zeros(shape, device=DEVICE)))
        self.parameters = list(self.module.parameters())
        self._num_streams = num_streams
        self.lay_out(buckets)
        self.hook = self._new_hook()

    def lay_out(self, buckets: Sequence[Sequence[int]]) -> None:
        """Makes DDP's buckets anew, of these parameters."""
        self.buckets = [[self.parameters[number] for number in bucket] for bucket in buckets]
        self._flats = [torch.zeros(sum(x.numel() for x in bucket), device=DEVICE) for bucket in self.buckets]

    def run(self, num_steps: int) -> None:
        """Makes some steps."""
        for _ in range(num_steps):
            futures = [self._bucket_ready(index) for index in range(len(self.buckets))]
            if self._stream != MAIN:  # autograd does so at the end of a backward
                self._machine.order(MAIN, self._machine.now(self._stream))
            for future in futures:
                torch.mul(future.wait(), -0.1)  # the optimizer
            del futures

    def break_off(self) -> None:
        """Begins a backward that raises before DDP waits for its buckets."""
        for index in range(len(self.buckets) - 1):
            self._bucket_ready(index)
        if self._stream != MAIN:
            self._machine.order(MAIN, self._machine.now(self._stream))

    def _bucket_ready(self, index: int) -> Any:
        """Computes the gradients of a bucket; returns the future of their average."""
        flat = self._flats[index]
        gradient = torch.ones(flat.numel(), device=DEVICE)
        self._machine.order(self._stream, self._machine.now(MAIN))
        with self._machine.on(self._stream):
            flat.copy_(gradient)
            if self._stream != MAIN:
                self._machine.record(gradient, self._stream)
            future = self.sync(index)
        del gradient
        for numel in (64, 4096, 12321):  # backward goes on, in memory that has become free
            torch.ones(numel, device=DEVICE)
        return future

    def sync(self, index: int) -> Any:
        """Hands a bucket to the hook."""
        is_last = index == len(self.buckets) - 1
        bucket: Any = _GradBucket(index, self.buckets[index], self._flats[index], is_last)
        return self.hook.reduce(None, bucket)

    def checkpoint(self) -> CommState:
        """Returns the state in host memory, and reads the residuals as `apply_plan` would."""
        state = self.hook.state()
        state.all_residuals()
        return state.on_cpu()

    def resume(self, state: CommState, compressor: Compressor | None = None) -> None:
        """Goes on from a checkpoint, in another process, perhaps with another compressor."""
        self._compressor = self._compressor if compressor is None else compressor
        self.hook = self._new_hook()
        usable = usable_state(state, self.hook.compressor, self.module)
        assert bool(usable.buckets) == (compressor is None)
        self.hook.resume(usable.buckets, usable.residuals, usable.num_syncs)

    def change_plan(self, compressor: Compressor) -> None:
        """Goes on with another compressor."""
        residuals = self.hook.close()
        self._compressor = compressor
        self.hook = self._new_hook()
        self.hook.add_residuals(residuals)

    def _new_hook(self) -> BucketHook:
        """Attaches to DDP as on CUDA; kernels are compiled if `compile_samples` is called."""

        def keep(run: Callable[[], None], *args: Any) -> None:
            self.compile_samples = run

        replaced: dict[str, Any] = {
            "dist": types.SimpleNamespace(get_world_size=lambda group: _NUM_RANKS),
            "shared_node_groups": lambda *args: ("node", "peers"),
            "compile_kernels": keep,
        }
        if self._num_streams is not None:
            replaced["SideStreams"] = lambda device, num_streams: SideStreams(device, self._num_streams)
        with mock.patch.multiple(attach, **replaced):
            model: Any = _Ddp(self.module)
            return attach.attach_bucket_hook(model, self._compressor, None, ranks_per_node=_RANKS_PER_NODE)
