"""Predicts the time of a step with DiLoCo from a run of DDP."""

from __future__ import annotations

import math

from lightning_commopt.compressors.catalog import ready_compressors
from lightning_commopt.cost.basis import Basis
from lightning_commopt.cost.predict import Candidate, Prediction, jobs_of
from lightning_commopt.plan import CommPlan, DiLoCoPlan

SYNC_EVERY = (10, 30, 100)
"""Steps between two exchanges for which DiLoCo is predicted: those for which papers have losses; 30 is the default."""

_DIFFERENCE_ITEMSIZE = 4  # differences travel from float32, also those of parameters in 16 bits

CHECK_LOSS = "DiLoCo trains different weights on each rank: compare the loss at equal samples before you rely on it"

_EXCHANGE_ASSUMPTION = (
    "an exchange takes as long as the same bytes between DDP's ranks; on CUDA copies to the host and its arithmetic"
    " come on top"
)


def predict_diloco(plan: DiLoCoPlan, basis: Basis, *, num_ranks: int | None = None) -> Prediction:
    """Predicts the mean step, since exchanges follow only some steps; ``num_ranks=None`` stands for those of the run.

    It is a step without communication, and its share of the exchanges as far as they last longer than ``overlap``
    steps. Only ``sync_every``, ``fragments``, ``overlap`` and ``comm_hook`` of the plan count.
    """
    num_ranks = basis.workload.num_ranks if num_ranks is None else num_ranks
    local = basis.predict(CommPlan(), num_ranks=1)
    ratios = (1.0, basis.link.low_ratio, basis.link.high_ratio)
    exchanges_s = [basis.scale * _exchange_s(plan, basis, num_ranks, ratio) for ratio in ratios]
    steps_s = (local.step_s, local.low_s, local.high_s)
    waits_s = [
        max(0.0, exchange_s / plan.fragments - plan.overlap * step_s) * plan.fragments / plan.sync_every
        for exchange_s, step_s in zip(exchanges_s, (steps_s[0], steps_s[2], steps_s[1]), strict=True)
    ]
    expected_s, low_s, high_s = (step_s + wait_s for step_s, wait_s in zip(steps_s, waits_s, strict=True))
    return Prediction(
        step_s=expected_s, low_s=low_s, high_s=high_s, exposed_s=waits_s[0], reasons=(_EXCHANGE_ASSUMPTION, CHECK_LOSS)
    )


def _exchange_s(plan: DiLoCoPlan, basis: Basis, num_ranks: int, link_ratio: float) -> float:
    """Returns the time in which all fragments are exchanged once, with the arithmetic of the compressor."""
    if num_ranks == 1:
        return 0.0
    gradients = basis.workload.gradients
    differences = [own._replace(itemsize=max(own.itemsize, _DIFFERENCE_ITEMSIZE)) for own in gradients]
    num_bytes = sum(difference.num_bytes for difference in differences)
    link = basis.link.for_bytes(num_bytes).times(link_ratio)
    hook = CommPlan(comm_hook=plan.comm_hook)
    jobs = jobs_of(hook, [differences], link, basis.costs, num_ranks, basis.workload.device)
    return sum(phase.duration_s for job in jobs for phase in job.phases)


def diloco_candidates(basis: Basis, *, num_ranks: int | None = None) -> list[Candidate[DiLoCoPlan]]:
    """Returns DiLoCo with some ``sync_every``; with the default one also int4, and the overlap that hides exchanges."""
    if (basis.workload.num_ranks if num_ranks is None else num_ranks) == 1:
        return []
    plans = [DiLoCoPlan(sync_every=sync_every) for sync_every in SYNC_EVERY]
    int4 = ready_compressors()["int4"]
    if int4 in basis.costs:
        plans.append(DiLoCoPlan(comm_hook=int4))
    local_s = basis.predict(CommPlan(), num_ranks=1).step_s
    waited_s = predict_diloco(DiLoCoPlan(), basis, num_ranks=num_ranks).exposed_s * DiLoCoPlan().sync_every
    overlap = math.ceil(waited_s / local_s)
    if 0 < overlap < DiLoCoPlan().sync_every:
        plans.append(DiLoCoPlan(overlap=overlap))
    return [Candidate(plan, predict_diloco(plan, basis, num_ranks=num_ranks)) for plan in plans]
