"""Tuning: what a strategy does in its fits under ``commopt tune``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning_commopt.plan import CommPlan
from lightning_commopt.sync.strategies import TunedBuckets, trainer_of
from lightning_commopt.tune.auto_plan import FitPlan
from lightning_commopt.tune.options import TuneOptions

_UNDECIDED = ("measuring", "too short", "searching")
"""Statuses of a fit that ended before anything was decided."""


class Tuning(FitPlan):
    """Looks for a plan whatever that costs, and writes it to a file; ``asked`` is what `inject.run_tuned` asks for.

    Of several fits the last that has decided something counts. If none has, the plan is written to a file of the
    command's own: it would replace a plan that an earlier command has found, even if this one is interrupted.
    """

    _tells_verdict = False  # the command prints it
    _max_regret = 1e6  # the search may cost any multiple of the fit's time, as these fits run in order to be tuned

    def __init__(self, strategy: TunedBuckets, asked: Mapping[str, Any]) -> None:
        options = TuneOptions.of("auto", asked["lossy"], strategy.plan.to_dict())
        super().__init__(strategy, options)
        self._asked = asked

    def begin_batch(self, batch: Any, batch_idx: int) -> None:
        """Ends the fit when the plan is found."""
        super().begin_batch(batch, batch_idx)
        if self._asked["ends_fit"] and self.has_decided:
            trainer_of(self._strategy).should_stop = True

    def end_fit(self, keep: Callable[[CommPlan], None] | None = None) -> None:
        super().end_fit(keep)
        description = self.describe()
        if not description:
            return
        verdict, undecided = Path(self._asked["verdict"]), Path(self._asked["undecided"])
        has_decided = description["num_search_steps"] > 0 or description["status"] not in _UNDECIDED
        if has_decided or not verdict.exists():
            self._strategy.plan.save(self._asked["output"] if has_decided else undecided)
            if has_decided:
                undecided.unlink(missing_ok=True)
            verdict.write_text(description["verdict"], encoding="utf-8")
