"""The windows of `CommTimeMonitor`: passes steps from this rank's recorder to all ranks, files and loggers."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_commopt.callbacks.all_ranks import AllRanks
from lightning_commopt.callbacks.fit_totals import FitTotals
from lightning_commopt.callbacks.phases import PhaseCallback
from lightning_commopt.callbacks.prediction import PredictionRecorder
from lightning_commopt.callbacks.publisher import MetricPublisher, StepFiles
from lightning_commopt.callbacks.run_description import describe_plan
from lightning_commopt.callbacks.sharded_prediction import ShardedPredictionRecorder
from lightning_commopt.measure.link.tracker import LinkTracker
from lightning_commopt.measure.recorder import StepRecorder
from lightning_commopt.measure.statistics import QUANTITIES, Steps, row
from lightning_commopt.plan import Plan
from lightning_commopt.strategy.base import plan_of
from lightning_commopt.text.validation import warn

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class StepPlan(NamedTuple):
    """The plan of some consecutive steps, and its description from `describe_plan`."""

    plan: Plan | None
    description: dict[str, Any]


class PublishesWindows(PhaseCallback):
    """The part of `CommTimeMonitor` that gathers windows of steps, one at a time.

    Attributes:
        metrics: every number of the last window, without the prefix.
    """

    metrics: dict[str, float]
    _every_n_steps: int
    _recorder: StepRecorder | None
    _all_ranks: AllRanks
    _publisher: MetricPublisher
    _totals: FitTotals
    _link: LinkTracker | None
    _files: StepFiles | None
    _prediction: PredictionRecorder | ShardedPredictionRecorder | None
    _windows: list[Steps]  # windows that arrived since the last batch ended
    _own_rows: list[list[float]]  # this rank's rows in the gathering that is under way
    _last_step: int  # number of the last step that was taken from the recorder
    # The plan of each step that has ended and was not taken yet: devices lag behind, and plans may change meanwhile.
    _plans: deque[StepPlan]
    _taken_plan: StepPlan | None  # the plan of the step that was taken last; None before the first one

    def _end_step(self, trainer: Trainer, step: int, num_samples: int) -> None:
        assert self._recorder is not None
        plan, latest = plan_of(trainer.strategy), self._plans[-1] if self._plans else self._taken_plan
        if latest is None or plan != latest.plan:
            latest = StepPlan(plan, describe_plan(trainer.strategy))
        self._plans.append(latest)
        self._recorder.end_step(step, num_samples)

    def _catch_up(self, trainer: Trainer) -> None:
        """Publishes the last window; before the first one, the steps so far."""
        self._send_windows(trainer)
        self._receive(trainer)
        if not self.metrics and not self._all_ranks.is_over:
            self._send(trainer, even_if_empty=True)  # another rank may have steps
            self._receive(trainer)

    def _send_windows(self, trainer: Trainer, limit_s: float = math.inf) -> None:
        """Sends each full window, provided that the previous one arrives within ``limit_s``."""
        assert self._recorder is not None
        # The counts are the same on all ranks, since callback_metrics must not differ between them.
        while self._recorder.num_pending >= self._every_n_steps + self._recorder.clock.num_lag_steps:
            if not self._receive(trainer, limit_s):
                return
            self._send(trainer)

    def _send(self, trainer: Trainer, even_if_empty: bool = False) -> None:
        """Sends the oldest steps, at most a window, to all ranks."""
        rows = self._take(self._every_n_steps)
        if (rows or even_if_empty) and not self._all_ranks.is_over:
            self._own_rows = rows
            self._all_ranks.send(torch.tensor(rows, dtype=torch.float64, device="cpu"))

    def _take(self, num_steps: int) -> list[list[float]]:
        """Takes at most ``num_steps`` of the oldest steps, saves them, and returns a row of numbers for each."""
        assert self._recorder is not None
        records = self._recorder.take(num_steps)
        if not records:
            return []
        self._last_step = records[-1].step
        plans = [self._plans.popleft() for _ in records]
        before, self._taken_plan = self._taken_plan or plans[0], plans[-1]
        if self._prediction is not None:
            self._prediction.add(records, is_changed=any(plan is not before for plan in plans))
        if self._files is not None:
            self._files.save_steps(records, self._taken_plan.description)
        self._totals.add_collectives(records)
        if self._link is None:
            return [row(record) for record in records]
        times_s = self._link.rows(records, self._taken_plan.description["comm_hook"])
        return [row(record) + own_times_s for record, own_times_s in zip(records, times_s, strict=True)]

    def _receive(self, trainer: Trainer, limit_s: float = math.inf) -> bool:
        """Publishes the window that was sent; returns false if it has not arrived from all ranks."""
        try:
            values = self._all_ranks.take(limit_s)
        except RuntimeError as error:
            self._all_ranks.give_up()
            warn(
                f"CommTimeMonitor could not gather the ranks' times ({error}), and stops gathering.", on_every_rank=True
            )
            return True
        if values is not None:
            self._own_rows = []
            if values.shape[1]:
                self._publish(trainer, *np.split(values.numpy(), [len(QUANTITIES)], axis=2))
        return self._all_ranks.is_free

    def _publish(self, trainer: Trainer, values: NDArray[np.float64], times_s: NDArray[np.float64]) -> None:
        steps = Steps.of(values)
        self._windows.append(steps)
        self.metrics = steps.sampled().statistics(self._totals.world_size)
        if self._link is not None:
            self._link.update(times_s)
            self.metrics |= self._link.metrics
        self._totals.add(values, steps)
        self._publisher.share(trainer, self.metrics)
        self._publisher.log(trainer, self.metrics, step=self._last_step)
