"""Rounds: which fragment is exchanged after which step, and which weights a model shows to a validation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import Module

from lightning_commopt.compat.torch import foreach_copy_
from lightning_commopt.diloco_plan import DiLoCoPlan
from lightning_commopt.measure.observer import (
    APPLIED,
    ARRIVE,
    DUE,
    END,
    SEND,
    START,
    BucketInfo,
    BucketSync,
    Observers,
)
from lightning_commopt.sync.diloco.exchange import Arrived, Exchange, GlobalWeights, LocalWeights, Report
from lightning_commopt.sync.diloco.fragments import Fragment, split_model
from lightning_commopt.sync.diloco.outer import OuterSGD
from lightning_commopt.sync.executors import BucketFuture, WorkerThread
from lightning_commopt.sync.gather import map_tensors
from lightning_commopt.text.formatting import list_some

_MEAN = OuterSGD(lr=1.0, momentum=0.0, nesterov=False)


class DiLoCoError(RuntimeError):
    """An exchange failed; the message names the fragment and its parameters."""


@dataclass(eq=False)
class UnderWay:
    """An exchange that has begun.

    Attributes:
        index: number of the fragment.
        due: number of steps after which its result is applied.
        arrived: its result, once the exchange has ended.
    """

    index: int
    due: int
    arrived: Arrived | None = None
    future: BucketFuture | None = None  # None for one that was resumed
    sync: BucketSync | None = None  # its observers; None for one that was resumed

    def wait(self, fragment: Fragment) -> Arrived:
        """Waits for the result; raises a DiLoCoError if the exchange failed."""
        if self.future is not None:
            try:
                self.future.future.wait()
            except Exception as error:
                raise DiLoCoError(
                    f"the exchange of fragment {self.index} failed ({type(error).__name__}: {error}); its parameters:"
                    f" {list_some([*fragment.parameters], 8)}"
                ) from error
        assert self.arrived is not None
        return self.arrived


class Rounds:
    """The exchanges of one model in the course of a fit.

    Args:
        plan: how often parameters are exchanged, and how.
        module: the model, whose weights are equal on all ranks.
        exchange: carries an exchange out.
        observers: notified of exchanges.

    Attributes:
        fragments: the global weights.
        num_steps: number of optimizer steps so far.
        num_samples: number of samples that this rank has trained on.
    """

    def __init__(
        self, plan: DiLoCoPlan, module: Module, exchange: Exchange, observers: Observers | None = None
    ) -> None:
        self.plan, self.exchange = plan, exchange
        self.observers = Observers() if observers is None else observers
        self.outer = OuterSGD(lr=plan.outer_lr, momentum=plan.outer_momentum, nesterov=plan.nesterov)
        parts = split_model(module, plan.fragments, plan.fragment_by)
        self.fragments = [GlobalWeights.of(fragment, self.outer) for fragment in parts]
        self.num_steps = 0
        self.num_samples = 0.0
        self._samples_before = [0.0] * plan.fragments
        self._steps_before = [0] * plan.fragments
        self._under_way: deque[UnderWay] = deque()
        self._thread = WorkerThread()
        self._own: list[list[Tensor]] | None = None  # this worker's weights while the model has others

    def step(self, report: Callable[[], float] = float) -> list[Arrived]:
        """Counts an optimizer step and begins the exchanges that follow it. All ranks must call it.

        Args:
            report: returns the scale of this rank's gradient scaler; called if an exchange begins.

        Returns:
            What was applied to the model.
        """
        self.num_steps += 1
        applied = self._apply_due()
        for index, offset in enumerate(self.plan.offsets):
            if self.num_steps % self.plan.sync_every == offset:
                self._begin(index, report())
        return [*applied, *self._apply_due()]

    def _begin(self, index: int, loss_scale: float) -> None:
        of, local = self.fragments[index], LocalWeights.of(self.fragments[index].fragment)
        report = Report(self.num_samples - self._samples_before[index], loss_scale)
        step = self._exchanges_before()
        future = self._thread.future(local.flat)
        sync = self.observers.exchange(BucketInfo(index, local.flat.nbytes, tuple(of.fragment.parameters), True))
        under_way = UnderWay(index, self.num_steps + self.plan.overlap, future=future, sync=sync)

        def run() -> None:
            bytes_before = self.exchange.bytes_sent
            sync.note(START)
            sync.note(SEND)
            with torch.no_grad():
                under_way.arrived = self.exchange.run(of, local, report, step, self.outer)
            sync.note(ARRIVE)
            sync.note(END, self.exchange.bytes_sent - bytes_before)

        self._samples_before[index], self._steps_before[index] = self.num_samples, self.num_steps
        self._under_way.append(under_way)
        self._thread.submit(run, [future])

    def _apply_due(self) -> list[Arrived]:
        applied = []
        while self._under_way and self._under_way[0].due <= self.num_steps:
            applied.append(self._apply(self._under_way.popleft()))
        return applied

    def _apply(self, under_way: UnderWay) -> Arrived:
        of, sync = self.fragments[under_way.index], under_way.sync
        if sync is not None:
            sync.note(DUE)
        arrived = under_way.wait(of.fragment)
        of.weights, of.floats, of.integers = arrived.weights, arrived.floats, arrived.integers
        _mix(of, self.plan.own_share)
        if sync is not None:
            sync.note(APPLIED)
        return arrived

    def wait(self) -> None:
        """Waits for the exchanges that are under way, without applying them."""
        for under_way in self._under_way:
            under_way.wait(self.fragments[under_way.index].fragment)

    @property
    def shows_own(self) -> bool:
        """Whether the model has this worker's weights."""
        return self._own is None

    def show_global(self, weights: list[GlobalWeights] | None = None) -> None:
        """Puts global weights into the model until `show_own`; None for those of the last exchanges."""
        if self._own is None:
            self._own = [[x.detach().clone() for x in of.fragment.tensors()] for of in self.fragments]
        for of in self.fragments if weights is None else weights:
            foreach_copy_(of.fragment.tensors(), of.tensors())

    def show_own(self) -> None:
        """Puts this worker's own weights back, if the model has others."""
        own, self._own = self._own, None
        for of, tensors in zip(self.fragments, own or (), strict=False):
            foreach_copy_(of.fragment.tensors(), tensors)

    def finish(self) -> None:
        """Ends a fit: exchanges what was trained since the last exchanges, and shows the result.

        All ranks must call it. What it computes is for the model only: training that goes on after `show_own` goes on
        as if it had not been called.
        """
        self.show_own()
        self.wait()  # an exchange of the thread would mix its messages with those below
        final = [self._final(index) for index in range(len(self.fragments))]
        self.show_global(final)

    def _final(self, index: int) -> GlobalWeights:
        """Returns a fragment's weights at the end of a fit: after an incomplete round the mean of the workers'."""
        of = self.fragments[index]
        under_way = next((other for other in self._under_way if other.index == index), None)
        latest = replace(of, momentum=None, state=map_tensors(Tensor.clone, of.state))
        if under_way is not None:
            arrived = under_way.wait(of.fragment)
            latest.weights, latest.floats, latest.integers = arrived.weights, arrived.floats, arrived.integers
        if self._steps_before[index] == self.num_steps:
            return latest
        local = LocalWeights.of(of.fragment)
        local.wait()
        if under_way is not None:
            torch.lerp(latest.weights, local.flat, self.plan.own_share, out=local.flat)
        report = Report(self.num_samples - self._samples_before[index])
        arrived = self.exchange.run(latest, local, report, self._exchanges_before(), _MEAN)
        latest.weights, latest.floats, latest.integers = arrived.weights, arrived.floats, arrived.integers
        return latest

    def _exchanges_before(self) -> int:
        return self.num_steps // self.plan.sync_every

    def close(self) -> bool:
        """Ends the thread; returns whether all exchanges have succeeded."""
        return self._thread.close()


@torch.no_grad()
def _mix(of: GlobalWeights, own_share: float) -> None:
    """Replaces a worker's buffers, and all but a share of its parameters, by global values."""
    parameters, values = of.fragment.real_parameters(), of.fragment.views(of.weights)
    if own_share:
        values = [
            torch.lerp(new.to(own.device, non_blocking=True), own.to(new.dtype), own_share)
            for own, new in zip(parameters, values, strict=True)
        ]
    for tensor, value in zip(of.fragment.tensors(), [*values, *of.floats, *of.integers], strict=True):
        tensor.copy_(value, non_blocking=True)
