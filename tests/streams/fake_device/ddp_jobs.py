"""What ranks with DDP do on the fake device."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fake_device.device import Outcome, digest, in_all_schedules
from lightning_commopt.compressors import AllReduce, Compressor
from lightning_commopt.plan import CommPlan
from lightning_commopt.sync.ddp.gradient_sync import GradientSync

_WIDTH = 48
_NUM_LAYERS = 4
_BUCKET_MB, _OTHER_BUCKET_MB = 0.008, 0.015  # a layer, or two
_STEPS = 2


class _UserError(Exception):
    pass


class Fit:
    """A model that is trained in DDP, wrapped as Lightning wraps it: on a stream of its own.

    At first DDP has all gradients in one bucket; it lays them out anew after the first step. ``rewrapped`` are options
    of DDP for when the model is wrapped again.
    """

    def __init__(self, compressor: Compressor | None, **rewrapped: Any) -> None:
        torch.manual_seed(0)
        device = torch.device("cuda", dist.get_rank())
        layers = [layer for _ in range(_NUM_LAYERS) for layer in (nn.Linear(_WIDTH, _WIDTH), nn.Tanh())]
        self.module = nn.Sequential(*layers).to(device)
        self._seen = torch.zeros(_WIDTH, device=device)  # others on each rank
        self.module.register_buffer("seen", self._seen)
        self._batches = torch.randn(8, 16, _WIDTH).add(dist.get_rank()).to(device)
        self._num_steps = 0
        self._options: dict[str, Any] = {"bucket_cap_mb": _BUCKET_MB}
        self.sync = GradientSync(CommPlan(comm_hook=compressor))
        self.wrap(self.module)
        self._options |= rewrapped

    def wrap(self, module: nn.Module) -> None:
        with torch.cuda.stream(_wrapping_stream()):
            self.model = DistributedDataParallel(module, [dist.get_rank()], **self._options)
        self.sync.attach(self.model, timeout=None, ranks_per_node=1)
        self._optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)

    def train(self, num_steps: int = _STEPS) -> None:
        """Makes some steps, in which nothing waits for the device."""
        for _ in range(num_steps):
            batch = self._batches[self._num_steps % len(self._batches)]
            loss = self.model(batch).square().mean()
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
            self._seen.add_(batch.mean(0))
            self.sync.end_backward(ends_static_graph=False)
            self._num_steps += 1

    def change_plan(self, compressor: Compressor) -> None:
        self.sync.change_plan(CommPlan(comm_hook=compressor), self.wrap)

    def resume(self, compressor: Compressor | None = None) -> None:
        """Goes on from a checkpoint like another process, perhaps with another compressor."""
        torch.cuda.synchronize()
        self.sync.keep_state()
        state = self.sync.state()
        assert state is not None
        self.sync.detach()
        if compressor is not None:
            self.sync.plan = CommPlan(comm_hook=compressor)
        self.wrap(self.module)
        self.sync.restore(state)
        self.sync.resume(self.module)

    def break_off(self) -> None:
        """Makes a backward that fails in code of the user, when most buckets are under way."""

        def fail(gradient: Tensor) -> None:
            raise _UserError

        first, *_ = self.module.parameters()
        handle = first.register_hook(fail)
        loss = self.model(self._batches[self._num_steps % len(self._batches)]).square().mean()
        with contextlib.suppress(_UserError):
            loss.backward()
        handle.remove()

    def end(self) -> Outcome:
        residuals = self.sync.detach()
        values = digest(self.module.parameters()), digest(residuals[name] for name in sorted(residuals))
        torch.cuda.synchronize()  # buffers are to keep what nothing may write to them any more
        return Outcome(*values, digest(self.module.buffers()))


def train(compressor: Compressor | None) -> Fit:
    fit = Fit(compressor)
    fit.train(4)
    return fit


def change_plan(compressor: Compressor | None, **rewrapped: Any) -> Fit:
    """Goes on with another compressor, whose first gradients get what this one has not sent."""
    fit = Fit(compressor, **rewrapped)
    fit.train(3)
    fit.change_plan(AllReduce())
    fit.train()
    return fit


def change_plan_at_the_end(compressor: Compressor | None) -> Fit:
    """Wraps the model once more, without a forward after it, in which DDP would make all buffers equal."""
    fit = Fit(compressor)
    fit.train(3)
    fit.change_plan(AllReduce())
    return fit


def change_plan_and_buckets(compressor: Compressor | None) -> Fit:
    """What has not been sent goes on in several buckets at once, and in other ones."""
    return change_plan(compressor, find_unused_parameters=True, bucket_cap_mb=_OTHER_BUCKET_MB)


def resume(compressor: Compressor | None, other: Compressor | None = None, **rewrapped: Any) -> Fit:
    fit = Fit(compressor, **rewrapped)
    fit.train(3)
    fit.resume(other)
    fit.train(4)
    return fit


def resume_elsewhere(compressor: Compressor | None) -> Fit:
    """DDP never has the buckets of the checkpoint."""
    return resume(compressor, find_unused_parameters=True, bucket_cap_mb=_OTHER_BUCKET_MB)


def resume_with_another_compressor(compressor: Compressor | None) -> Fit:
    """Only what has not been sent goes on."""
    return resume(compressor, AllReduce(), find_unused_parameters=True, bucket_cap_mb=_OTHER_BUCKET_MB)


def break_off(compressor: Compressor | None) -> Fit:
    """Ends a fit while buckets are under way."""
    fit = Fit(compressor)
    fit.train(3)
    fit.break_off()
    return fit


def go_on_after_a_failure(compressor: Compressor | None) -> Fit:
    fit = break_off(compressor)
    fit.change_plan(AllReduce())
    fit.train()
    return fit


PROGRAMS: dict[str, Callable[[Compressor | None], Fit]] = {
    each.__name__: each
    for each in (
        *(train, change_plan, change_plan_at_the_end, change_plan_and_buckets),
        *(resume, resume_elsewhere, resume_with_another_compressor, break_off, go_on_after_a_failure),
    )
}


def run_ddp(compressor: Compressor | None, program: str) -> dict[str, Outcome]:
    """Runs a program in all schedules."""
    torch.cuda.set_device(dist.get_rank())
    warnings.simplefilter("ignore")  # of settings that are made for a test

    return in_all_schedules(lambda: PROGRAMS[program](compressor).end())


@cache
def _wrapping_stream() -> Any:
    return torch.cuda.Stream()
