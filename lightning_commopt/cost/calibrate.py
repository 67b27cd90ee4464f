"""Fits the link so that the model reproduces the run that it was made of."""

from __future__ import annotations

import dataclasses

from lightning_commopt.cost.link import Link
from lightning_commopt.cost.predict import Costs, fixed_s, outcome_of
from lightning_commopt.cost.workload import Workload
from lightning_commopt.plan import CommPlan

_MAX_FACTOR = 4.0
_NUM_HALVINGS = 16
_EXPOSED_SHARE = 0.02


def calibrated(workload: Workload, link: Link, costs: Costs, plan: CommPlan, measured_step_s: float) -> Link:
    """Returns the link with another rate, such that the step of ``plan`` takes as long as it did.

    The rate changes by a factor of 4 at most, and only where the step waits for gradient sync; else the link does not
    show in it. All arguments are of one run, ``link`` from its buckets.
    """
    sync_s = measured_step_s - fixed_s(workload, workload.num_ranks)

    def with_factor(factor: float) -> Link:
        return dataclasses.replace(link, s_per_byte=factor * link.s_per_byte)

    def is_slower(factor: float) -> bool:
        return outcome_of(plan, workload, with_factor(factor), costs, workload.num_ranks).end_s > sync_s

    usual = outcome_of(plan, workload, link, costs, workload.num_ranks)
    if usual.end_s - usual.backward_s < _EXPOSED_SHARE * measured_step_s:
        return link
    low, high = 1 / _MAX_FACTOR, _MAX_FACTOR
    if is_slower(low) or not is_slower(high):
        return link
    for _ in range(_NUM_HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if is_slower(middle) else (middle, high)
    return with_factor(high)
