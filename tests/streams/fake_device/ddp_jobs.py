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
from lightning_commopt.sync.gradient_sync import GradientSync

_WIDTH = 48
_NUM_LAYERS = 4
_BUCKET_MB = 0.015  # a layer and a half: DDP lays its buckets out anew after the first step
_STEPS = 2


class _UserError(Exception):
    pass


class Fit:
    """A model that is trained in DDP, wrapped as Lightning wraps it: on a stream of its own."""

    def __init__(self, compressor: Compressor | None) -> None:
        torch.manual_seed(0)
        device = torch.device("cuda", dist.get_rank())
        layers = [layer for _ in range(_NUM_LAYERS) for layer in (nn.Linear(_WIDTH, _WIDTH), nn.Tanh())]
        self.module = nn.Sequential(*layers).to(device)
        self._batches = torch.randn(8, 16, _WIDTH).add(dist.get_rank()).to(device)
        self._num_steps = 0
        self.sync = GradientSync(CommPlan(comm_hook=compressor))
        self.wrap(self.module)

    def wrap(self, module: nn.Module, bucket_mb: float = _BUCKET_MB) -> None:
        with torch.cuda.stream(_wrapping_stream()):
            self.model = DistributedDataParallel(module, [dist.get_rank()], bucket_cap_mb=bucket_mb)
        self.sync.attach(self.model, timeout=None, ranks_per_node=1)
        self._optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)

    def train(self, num_steps: int = _STEPS) -> None:
        """Makes some steps, in which nothing waits for the device."""
        for _ in range(num_steps):
            loss = self.model(self._batches[self._num_steps % len(self._batches)]).square().mean()
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
            self.sync.end_backward(ends_static_graph=False)
            self._num_steps += 1

    def change_plan(self, compressor: Compressor) -> None:
        self.sync.change_plan(CommPlan(comm_hook=compressor), self.wrap)

    def resume(self, compressor: Compressor | None = None, bucket_mb: float = _BUCKET_MB) -> None:
        """Goes on from a checkpoint like another process, perhaps with another compressor or in other buckets."""
        torch.cuda.synchronize()
        self.sync.keep_state()
        state = self.sync.state()
        assert state is not None
        self.sync.detach()
        if compressor is not None:
            self.sync.plan = CommPlan(comm_hook=compressor)
        self.wrap(self.module, bucket_mb)
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
        return Outcome(digest(self.module.parameters()), digest(residuals[name] for name in sorted(residuals)))


def train(fit: Fit) -> None:
    fit.train(4)


def change_plan(fit: Fit) -> None:
    """Goes on with another compressor, whose first gradients get what this one has not sent."""
    fit.train(3)
    fit.change_plan(AllReduce())
    fit.train()


def resume(fit: Fit) -> None:
    fit.train(3)
    fit.resume()
    fit.train(3)


def resume_elsewhere(fit: Fit) -> None:
    """DDP never has the buckets of the checkpoint."""
    fit.train(3)
    fit.resume(bucket_mb=_BUCKET_MB / 2)
    fit.train(4)


def resume_with_another_compressor(fit: Fit) -> None:
    """Only what has not been sent goes on."""
    fit.train(3)
    fit.resume(AllReduce(), bucket_mb=_BUCKET_MB / 2)
    fit.train(3)


def break_off(fit: Fit) -> None:
    """Ends a fit while buckets are under way."""
    fit.train(3)
    fit.break_off()


def go_on_after_a_failure(fit: Fit) -> None:
    break_off(fit)
    fit.change_plan(AllReduce())
    fit.train()


PROGRAMS: dict[str, Callable[[Fit], None]] = {
    each.__name__: each
    for each in (
        *(train, change_plan, resume, resume_elsewhere, resume_with_another_compressor),
        *(break_off, go_on_after_a_failure),
    )
}


def run_ddp(compressor: Compressor | None, program: str) -> dict[str, Outcome]:
    """Runs a program in all schedules."""
    torch.cuda.set_device(dist.get_rank())
    warnings.simplefilter("ignore")  # of settings that are made for a test

    def run() -> Outcome:
        fit = Fit(compressor)
        PROGRAMS[program](fit)
        return fit.end()

    return in_all_schedules(run)


@cache
def _wrapping_stream() -> Any:
    return torch.cuda.Stream()
