"""Fits with plan="auto" whose step times and candidates are given, so that its decisions depend on no clock."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from lightning_commopt.cost.basis import Basis
from lightning_commopt.cost.predict import Candidate, Prediction
from lightning_commopt.tune import training as training_module
from lightning_commopt.tune import tuner as tuner_module
from lightning_commopt.tune.calibration import Shortlist
from lightning_commopt.tune.director import Director
from lightning_commopt.tune.options import TuneOptions
from lightning_commopt.tune.step_timer import StepTimer
from lightning_commopt.tune.training import TunedTraining
from lightning_commopt.tune.tuner import Tuner
from support.quick_costs import quick_costs

BASE_S = 100.0
"""A step with the user's plan: so long that changing a plan takes no time beside it."""


@contextmanager
def scripted(
    candidates: Mapping[Any, float],
    *,
    num_steps: float = 1e5,
    folder: str | None = None,
    change: tuple[int, Mapping[Any, float]] | None = None,
) -> Generator[list[Any], None, None]:
    """Within it a fit finds those of the given plans promising that it may choose.

    Their steps take the given shares of the user's on the last rank; to the others, slower candidates seem faster.

    Args:
        candidates: plans, and their times over that of the user's plan.
        num_steps: that fits believe to have.
        folder: where choices are kept; None for a new one.
        change: a step from which on there are other candidates, and their times over that of the user's plan until
            then. Plans without a time take three times as long.

    Yields:
        The plan of every step that was timed.
    """
    steps: list[Any] = []
    predict = tuner_module.shortlist
    init, direct, measure = Tuner.__init__, Director.__init__, StepTimer.take
    trainings: list[TunedTraining] = []

    def present() -> Mapping[Any, float]:
        return candidates if change is None or len(steps) < change[0] else change[1]

    def begin(tuner: Tuner, group: Any, training: TunedTraining, *args: Any, **options: Any) -> None:
        trainings.append(training)
        init(tuner, group, training, *args, **options)

    def shortlist(basis: Basis, options: TuneOptions, kept: Any, forbidden: Any) -> Shortlist:
        real = predict(basis, options, kept, forbidden)
        assert real.base.prediction.step_s > 0
        first = [] if kept is None else [kept]
        plans = [plan for plan in present() if options.fits(plan, basis.plan) and plan not in (basis.plan, kept)]
        base, *others = (
            Candidate(plan, Prediction(step_s=share, low_s=share, high_s=share, exposed_s=0.0))
            for plan in (basis.plan, *first, *(plan for plan in plans if plan.comm_hook not in forbidden))
            for share in [present().get(plan, 1.0)]
        )
        return Shortlist(base, tuple(others), {"int8": 0.31})

    def take(timer: StepTimer) -> list[float]:
        strategy, num_steps = trainings[-1].strategy, len(measure(timer))
        share = present().get(strategy.plan, 1.0 if present() is candidates else 3.0)
        if strategy.plan in present() and strategy.global_rank < strategy.world_size - 1:
            share = min([share, *present().values()]) ** 2 / share
        steps.extend([strategy.plan] * num_steps)
        return [share * BASE_S] * num_steps

    with (
        TemporaryDirectory() as new,
        patch.object(training_module, "_folder", lambda: Path(folder or new)),
        patch.object(Tuner, "__init__", begin),
        patch.object(Director, "__init__", lambda director, _, **options: direct(director, num_steps, **options)),
        patch.object(tuner_module, "shortlist", shortlist),
        patch.object(StepTimer, "take", take),
        quick_costs(),
    ):
        yield steps
