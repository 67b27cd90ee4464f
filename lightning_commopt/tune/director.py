"""Director: what rank 0 decides, from the first step to the last. The other ranks do what it sends them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Generator, Mapping, Sequence
from typing import Literal

from lightning_commopt.tune.calibration import NUM_STEPS, Shortlist
from lightning_commopt.tune.controller import WATCH_STEPS, Controller, ControllerSettings
from lightning_commopt.tune.search import Report, Visit

CALIBRATE = -1
"""The arm of a visit with the user's plan that is observed."""

_NUM_START_STEPS, _NUM_FIRST_STEPS = 3, 2
_MIN_CHANGE_STEPS = 2.0  # what a change of the plan costs, before one was made
_MIN_CHANGES = 2  # to observe the user's plan and back

_LOSSY_HANDICAP = 0.02  # of a step, that a lossy plan must save beyond a lossless one
Status = Literal["measuring", "too short", "unpredictable", "nothing promising", "searching", "resumed"]


class Director:
    """Decides which steps run next, on rank 0; see `Controller`, which it hands over to.

    Args:
        num_steps: that the fit will still take; infinite if unknown.
        arm: the plan to begin with: 1 for one that a checkpoint holds, which is then only watched.
        has_known: plan 1 was chosen by an earlier fit, and is tried before any prediction.
        settings: see there.

    Attributes:
        status: how far it is.
        shortlist: what the model predicts; None before.
        controller: None before the search.
        visit: the steps to run next; with 0 steps nothing is left to decide.
        aside_s: seconds that calibration has taken between steps; the caller adds to it.
        base_s: a step with the user's plan, as first measured.
        lost_steps: that calibration has cost.
        searched_from: step of the fit at which `controller` began.
    """

    def __init__(
        self, num_steps: float, *, arm: int = 0, has_known: bool = False, settings: ControllerSettings | None = None
    ) -> None:
        self._num_steps = num_steps
        self._has_known = has_known
        self._settings = settings or ControllerSettings()
        self.status: Status = "measuring"
        self.shortlist: Shortlist | None = None
        self.controller: Controller | None = None
        self.aside_s = 0.0
        self.base_s = math.nan
        self.lost_steps = 0.0
        self._num_done = self._num_calibrations = self.searched_from = 0
        self._direct: Generator[Visit, Report, None] = self._resume(arm) if arm else self._start()
        self.visit = next(self._direct)

    def advance(self, report: Report) -> Visit:
        """Takes the report of `visit`, and returns the next one."""
        self._num_done += self.visit.num_steps
        self.visit = self._direct.send(report)
        return self.visit

    def forbid(self, arms: Sequence[int]) -> None:
        """Leaves plans for good, from the next visit on."""
        if self.controller is not None:
            self.controller.forbid(arms)

    @property
    def chosen(self) -> int:
        """The plan that was chosen last; the user's, 0, before."""
        return 0 if self.controller is None else max(0, self.controller.chosen)

    @property
    def is_timed(self) -> bool:
        """Whether the steps of `visit` are timed on the device's clock, which is read when they end."""
        return self.visit.num_steps < WATCH_STEPS

    def _resume(self, arm: int) -> Generator[Visit, Report, None]:
        self.status = "resumed"
        self.controller = Controller([None, None], self._num_steps, self._settings, arm=arm)
        yield from self.controller.run(searches=False)

    def _start(self) -> Generator[Visit, Report, None]:
        yield Visit(0, _NUM_START_STEPS)
        known: list[float] = []
        while not known or not self._can_calibrate():
            report = yield Visit(0, _NUM_FIRST_STEPS if not known else WATCH_STEPS)
            known += [s for s in report.seconds if not math.isnan(s)]
            if not self._can_calibrate() and not math.isinf(self._num_steps):
                self.status = "too short"
                yield from self._end()
        self.base_s = statistics.median(known)
        lost_steps = (yield from self._try_known()) if self._has_known else 0.0
        lost_steps += yield from self._calibrate()
        while self.shortlist is None or not self.shortlist.candidates:
            self.status = "unpredictable" if self.shortlist is None else "nothing promising"
            yield from Controller([None], self._num_steps, self._settings).watch()
            if not self._can_calibrate():
                yield from self._end()
            lost_steps += yield from self._calibrate()
        base_s = self.shortlist.base.predicted_s
        expected = [1.0, *(one.high_s / base_s for one in self.shortlist.candidates)]
        hooks = [one.plan.comm_hook for one in (self.shortlist.base, *self.shortlist.candidates)]
        is_lossy = [hook is not None and hook.claims.is_lossy for hook in hooks]
        handicaps = {arm: _LOSSY_HANDICAP for arm, lossy in enumerate(is_lossy) if lossy and not is_lossy[0]}
        self.controller = self._search(expected, CALIBRATE, lost_steps, handicaps)
        yield from self.controller.run()

    def _try_known(self) -> Generator[Visit, Report, float]:
        """Searches with the plan of an earlier fit alone; returns the steps lost if it is not chosen again."""
        self.controller = self._search([1.0, None], 0, 0.0)
        yield from self.controller.search()
        if self.controller.chosen:
            yield from self.controller.run(searches=False)
        lost_steps, self.controller = self.controller.lost_steps, None
        return max(0.0, lost_steps)

    def _search(
        self,
        expected: Sequence[float | None],
        arm: int,
        lost_steps: float,
        handicaps: Mapping[int, float] | None = None,
    ) -> Controller:
        self.status, self.searched_from = "searching", self._num_done
        return Controller(
            expected,
            self._num_steps - self._num_done,
            self._settings,
            arm=arm,
            lost_steps=lost_steps,
            is_start=False,
            handicaps=handicaps,
        )

    def _calibrate(self) -> Generator[Visit, Report, float]:
        """Observes the user's plan; returns the steps that it has cost."""
        self._num_calibrations += 1
        self.aside_s = 0.0
        report = yield Visit(CALIBRATE, NUM_STEPS)
        known = [s for s in report.seconds if not math.isnan(s)]
        lost_steps = max(0.0, (sum(known) + report.change_s + self.aside_s) / self.base_s - len(known))
        self.lost_steps += lost_steps
        return lost_steps

    def _end(self) -> Generator[Visit, Report, None]:
        while True:
            yield Visit(0, 0)

    def _can_calibrate(self) -> bool:
        known = self._num_done if math.isinf(self._num_steps) else self._num_steps
        num_changes = _MIN_CHANGES * (2 + self._num_calibrations)  # as many for a search, at least
        return self._settings.max_regret * known >= num_changes * _MIN_CHANGE_STEPS
