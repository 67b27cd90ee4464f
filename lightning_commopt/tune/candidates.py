"""Which plans a search tries: those that the model of a step predicts to be the fastest."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from lightning_commopt.compressors.catalog import ready_compressors
from lightning_commopt.cost.calibrate import calibrated
from lightning_commopt.cost.candidates import candidates
from lightning_commopt.cost.link import Link
from lightning_commopt.cost.predict import Costs, Prediction, buckets_of, predict
from lightning_commopt.cost.workload import Workload
from lightning_commopt.plan import CommPlan
from lightning_commopt.tune.options import TuneOptions

MAX_CANDIDATES = 3
_MIN_GAIN = 0.01  # that a prediction must promise; the search wants more
_MIN_RATIO = 2  # of the numbers of buckets: what a bucket costs besides its bytes is what predictions miss most


class Candidate(NamedTuple):
    """A plan to try, and its predicted step."""

    plan: CommPlan
    predicted_s: float
    low_s: float
    high_s: float


class Shortlist(NamedTuple):
    """What to try.

    Attributes:
        base: prediction of the user's plan.
        candidates: the most promising first; empty if nothing promises to be faster.
        not_allowed: by name of a compressor that was not allowed, the share of a step that it would save at most.
    """

    base: Candidate
    candidates: tuple[Candidate, ...]
    not_allowed: dict[str, float]


def shortlist(
    base: CommPlan, options: TuneOptions, workload: Workload, link: Link, costs: Costs, measured_s: float
) -> Shortlist:
    """Returns the plans that are worth trying.

    They are at most `MAX_CANDIDATES`, and every compressor that promises something is among them before a second layout
    of another, which has at least twice or at most half as many buckets as the first.

    Args:
        base: the user's plan.
        options: what may be changed.
        workload: of the user's plan.
        link: between the ranks.
        costs: of the compressors that may be chosen.
        measured_s: a step with the user's plan, to which the model is fitted.
    """
    link = calibrated(workload, link, costs, base, measured_s)
    own = predict(base, workload, link, costs)
    found = candidates(base, workload, link, costs, (base.comm_hook, *options.lossy))
    found = [one for one in found if one.plan != base and options.fits(one.plan, base)]
    promising = [one for one in found if one.prediction.step_s < (1 - _MIN_GAIN) * own.step_s]
    chosen: list[tuple[CommPlan, Prediction]] = []
    for is_second in (False, True):
        for plan, prediction in promising:
            others = [other for other, _ in chosen if other.comm_hook == plan.comm_hook]
            is_other = all(_differ(plan, other, workload) for other in others)
            if len(chosen) < MAX_CANDIDATES and bool(others) == is_second and is_other:
                chosen.append((plan, prediction))
    chosen.sort(key=lambda one: one[1].step_s)
    return Shortlist(
        _candidate(base, own),
        tuple(_candidate(*one) for one in chosen),
        _not_allowed(base, options, workload, link, min([own.step_s, *(one.prediction.step_s for one in found)])),
    )


def _candidate(plan: CommPlan, prediction: Prediction) -> Candidate:
    return Candidate(plan, prediction.step_s, prediction.low_s, prediction.high_s)


def _differ(one: CommPlan, other: CommPlan, workload: Workload) -> bool:
    few, many = sorted(len(buckets_of(plan, workload.gradients)) for plan in (one, other))
    return many >= _MIN_RATIO * few


def _not_allowed(
    base: CommPlan, options: TuneOptions, workload: Workload, link: Link, best_s: float
) -> dict[str, float]:
    """Returns what compressors would save beside the best allowed plan, if their arithmetic cost nothing."""
    if options.has_fixed_hook:
        return {}
    saved = {}
    for name, compressor in ready_compressors().items():
        if compressor.claims.is_recommended and compressor.claims.is_lossy and compressor not in options.lossy:
            step_s = predict(dataclasses.replace(base, comm_hook=compressor), workload, link, {}).step_s
            saved[name] = 1 - step_s / best_s
    return {name: share for name, share in saved.items() if share >= _MIN_GAIN}
