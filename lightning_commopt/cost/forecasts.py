"""The settings that a verdict recommends, from predictions."""

from __future__ import annotations

import dataclasses

from lightning_commopt.compressors import Compressor
from lightning_commopt.compressors.catalog import ready_compressors, recommended
from lightning_commopt.compressors.registry import compressor_name
from lightning_commopt.cost.basis import Basis
from lightning_commopt.cost.candidates import Candidate, candidates
from lightning_commopt.measure.forecast import Forecast
from lightning_commopt.plan import CommPlan

_NUM_BATCHES = 4


def forecasts(basis: Basis) -> list[Forecast]:
    """Returns the best plan with each recommended compressor and plain caps, exact ones first, and accumulation."""
    compressors = recommended_compressors()
    ranked = candidates(basis.plan, basis.workload, basis.link, basis.costs, compressors, with_lists=False)
    best: dict[Compressor | None, Candidate] = {}
    for candidate in ranked:
        if candidate.plan != basis.plan:
            best.setdefault(candidate.plan.comm_hook, candidate)
    scale = basis.step_s / basis.predict(basis.plan).step_s  # differs from 1 where no link explains the steps
    found = [_forecast(candidate, basis.plan, scale) for candidate in best.values()]
    return [*sorted(found, key=lambda one: one.error_bound), _accumulating(basis, scale / _NUM_BATCHES)]


def recommended_compressors() -> list[Compressor | None]:
    """Returns the average of DDP, and the compressors that are recommended at all."""
    ready = ready_compressors()
    return [None, *(ready[name] for name in recommended())]


def _forecast(candidate: Candidate, present: CommPlan, scale: float) -> Forecast:
    plan, found = candidate
    settings = []
    if plan.comm_hook != present.comm_hook:
        settings.append(f'comm_hook="{"none" if plan.comm_hook is None else compressor_name(plan.comm_hook)}"')
    if plan.bucket_cap_mb != present.bucket_cap_mb:
        settings.append(f"bucket_cap_mb={plan.bucket_cap_mb}")
    claims = None if plan.comm_hook is None else plan.comm_hook.claims
    return Forecast(
        setting=", ".join(settings),
        is_lossy=claims is not None and claims.is_lossy,
        error_bound=0.0 if claims is None else claims.error_bound or 0.0,
        step_s=scale * found.step_s,
        low_s=scale * found.low_s,
        high_s=scale * found.high_s,
    )


def _accumulating(basis: Basis, scale: float) -> Forecast:
    num_batches = _NUM_BATCHES * basis.workload.num_batches
    more = dataclasses.replace(basis, workload=basis.workload.accumulating(num_batches)).predict(basis.plan)
    return Forecast(
        setting=f"Trainer(accumulate_grad_batches={num_batches})",
        is_lossy=False,
        error_bound=1.0,
        step_s=scale * more.step_s,
        low_s=scale * more.low_s,
        high_s=scale * more.high_s,
        note=f"a step then takes {_NUM_BATCHES} times the samples, which changes training",
    )
