"""Searches of ``plan="auto"`` without training: their decisions on given step times, as ``run.json`` holds them."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_commopt.cost.predict import Candidate, Prediction
from lightning_commopt.measure.record import Collective
from lightning_commopt.plan import CommPlan
from lightning_commopt.report.build import build_report
from lightning_commopt.report.model import Report
from lightning_commopt.tune.calibration import Shortlist
from lightning_commopt.tune.director import CALIBRATE, Director
from lightning_commopt.tune.search import Report as VisitReport
from lightning_commopt.tune.verdict import History, summary
from support.sample_runs import SampleRun, write_run

BASE_S = 0.2
"""A step with the user's plan, without noise."""

INT8, SMALL = CommPlan.from_dict({"comm_hook": "int8"}), CommPlan(bucket_cap_mb=5)


def sample_tuning(shares: Mapping[CommPlan, float], *, num_steps: int = 2000, noise: float = 0.01) -> dict[str, Any]:
    """Searches in a fit whose first step takes ten times as long.

    Args:
        shares: candidates, and their steps over those of the user's plan; a twentieth more is predicted.
        num_steps: of the fit.
        noise: standard deviation of a step's time, as a share of it.
    """
    rng = random.Random(1)
    plans, times = [CommPlan(), *shares], [BASE_S, *(BASE_S * share for share in shares.values())]
    predicted = [
        Candidate(plan, Prediction(step_s=1.05 * step_s, low_s=step_s, high_s=1.1 * step_s, exposed_s=0.0))
        for plan, step_s in zip(plans, times, strict=True)
    ]
    director, history, step = Director(num_steps), History(), 0
    while 0 < director.visit.num_steps <= num_steps - step:
        arm = max(0, director.visit.arm)
        seconds = [times[arm] * math.exp(rng.gauss(0, noise)) for _ in range(director.visit.num_steps)]
        seconds[0] *= 10 if step == 0 else 1
        step += len(seconds)
        if director.visit.arm == CALIBRATE:
            director.shortlist = Shortlist(predicted[0], tuple(predicted[1:]), {})
        history.add(plans[arm].name, seconds, is_timed=director.is_timed)
        director.advance(VisitReport(tuple(seconds), 0.05 * BASE_S))
    known = plans if director.shortlist is not None else plans[:1]
    return json.loads(json.dumps(summary(director, known, history.stretches)))


def tuned_report(folder: Path) -> Report:
    """Returns the report of one run that chose int8 among two candidates, with collectives in its steps."""
    run = SampleRun(
        overrides=("strategy.plan=auto",),
        collectives=(
            Collective("broadcast", "data", "lightning", 8, 0.0, 0.0005),
            Collective("all_reduce", "backward", "", 40_000_000, 0.03, 0.2),
        ),
        changed={"tuning": sample_tuning({INT8: 0.4, SMALL: 1.4})},
    )
    write_run(folder / "tuned" / "0", run)
    return build_report([folder / "tuned"])
