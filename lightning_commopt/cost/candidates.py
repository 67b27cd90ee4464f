"""The plans that are worth trying for a workload, the fastest first; and the settings that a verdict recommends."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from lightning_commopt.compressors import Compressor
from lightning_commopt.compressors.registry import compressor_name
from lightning_commopt.cost.basis import Basis, recommended_compressors
from lightning_commopt.cost.buckets import MIB, buckets_of
from lightning_commopt.cost.diloco import diloco_candidates
from lightning_commopt.cost.predict import Candidate, Costs, jobs_of
from lightning_commopt.cost.shared_core import wake_s
from lightning_commopt.cost.workload import Gradient, Workload
from lightning_commopt.measure.forecasts import Forecast
from lightning_commopt.measure.link.link import Link
from lightning_commopt.plan import CommPlan, DiLoCoPlan
from lightning_commopt.plan.ddp import ddp_options

_NUM_BATCHES = 4
"""Batches in a step for which accumulation is forecast: enough to show what it saves, and a number that users try."""

_CAPS_MB = (1, 2, 5, 10, 25, 50, 100, 200, 400)
"""Bucket sizes in MiB that users try: each is about twice the previous one, as finer steps change little; 25 is DDP's
default."""

_MAX_GROUPS = (96, 16, 6)
"""Maximum numbers of groups of neighbouring gradients, with each of which a layout is calculated. With 96 the layout is
exact for many models; the time to find it grows with the square. With 16 and 6 there are fewer buckets than in the
layout that ends first, which take less of a core that backward needs."""


def candidates(
    basis: Basis,
    compressors: Iterable[Compressor | None],
    *,
    num_ranks: int | None = None,
    with_lists: bool = True,
) -> list[Candidate[CommPlan]]:
    """Returns the plan of ``basis`` and plans with other buckets and compressors, by predicted time.

    For each compressor (None is DDP's own average) there are DDP's own layout with the usual caps and, if
    ``with_lists``, the best layouts as lists of caps, see `best_layout`. Lists need a torch that takes them, and
    gradients of one dtype. Of several plans with the same buckets the first one is kept. Compressors whose cost was not
    measured are left out. ``num_ranks=None`` stands for the number of the workload's own run.
    """
    base, workload = basis.plan, basis.workload
    with_lists = with_lists and not base.find_unused_parameters and "bucket_cap_mb_list" in ddp_options()
    with_lists = with_lists and len({gradient.itemsize for gradient in workload.gradients}) == 1
    plans = [base]
    for compressor in compressors:
        if compressor is not None and compressor not in basis.costs:
            continue
        same_hook = dataclasses.replace(base, comm_hook=compressor)
        plans += [same_hook, *(dataclasses.replace(same_hook, bucket_cap_mb=cap) for cap in _CAPS_MB)]
        for max_groups in _MAX_GROUPS if with_lists else ():
            sizes = best_layout(
                workload, basis.link, basis.costs, compressor, num_ranks=num_ranks, max_groups=max_groups
            )
            plans.append(dataclasses.replace(same_hook, bucket_cap_mb=caps_for(sizes, workload.gradients)))
    unique: dict[tuple[Compressor | None, tuple[int, ...]], CommPlan] = {}
    for plan in plans:
        sizes = tuple(map(len, buckets_of(plan, workload.gradients)))
        unique.setdefault((plan.comm_hook, sizes), plan)
    predicted = [Candidate(plan, basis.predict(plan, num_ranks=num_ranks)) for plan in unique.values()]
    return sorted(predicted, key=lambda candidate: candidate.prediction.step_s)


def best_of_each(basis: Basis, compressors: Iterable[Compressor | None], **options: Any) -> list[Candidate[CommPlan]]:
    """Returns the best candidate with each compressor, the fastest first; ``options`` go to `candidates`."""
    best: dict[Compressor | None, Candidate[CommPlan]] = {}
    for candidate in candidates(basis, compressors, **options):
        if candidate.plan != basis.plan:
            best.setdefault(candidate.plan.comm_hook, candidate)
    return list(best.values())


def best_layout(
    workload: Workload,
    link: Link,
    costs: Costs,
    compressor: Compressor | None = None,
    *,
    num_ranks: int | None = None,
    max_groups: int = 96,
) -> tuple[int, ...]:
    """Returns how many gradients each bucket has in the layout whose gradient sync ends first.

    Buckets are sent in order, one at a time: a bucket begins when its last gradient is ready and the one before has
    ended. Then the earliest end of the first ``j`` gradients is all that matters to those that follow, so dynamic
    programming is exact, except that it ignores what gradient sync takes from a core that it shares with backward. Of
    layouts that end at the same time the one with the fewest buckets is taken.

    If there are more gradients than ``max_groups``, neighbours are first joined into groups of about the same size. The
    layout is then exact for these groups.

    Source: Shi et al., "MG-WFBP", IEEE INFOCOM 2019; Zhang et al., "DeAR", IEEE ICDCS 2023.
    """
    num_ranks = workload.num_ranks if num_ranks is None else num_ranks
    plan = CommPlan(comm_hook=compressor)
    groups = _groups(workload.gradients, max_groups)
    starts = [0, *accumulate(groups)]
    best: list[tuple[float, int, int]] = [(0.0, 0, 0)]  # end of the last bucket, number of buckets, start of the last
    for stop in range(1, len(starts)):
        options = []
        for start in range(stop):
            bucket = workload.gradients[starts[start] : starts[stop]]
            jobs = jobs_of(plan, [bucket], link, costs, num_ranks, workload.device)
            begin_s = max(best[start][0], bucket[-1].ready_s)
            beside_backward = workload.shares_core and begin_s < workload.backward_s
            least_s = wake_s(workload.num_others, beside_backward=beside_backward)
            phases = [phase for job in jobs for phase in job.phases]
            end_s = begin_s + sum(max(phase.duration_s, least_s * phase.on_link) for phase in phases)
            options.append((end_s, best[start][1] + 1, start))
        best.append(min(options))
    sizes, stop = [], len(groups)
    while stop:
        start = best[stop][2]
        sizes.append(starts[stop] - starts[start])
        stop = start
    return tuple(reversed(sizes))


def _groups(gradients: Sequence[Gradient], max_groups: int) -> list[int]:
    """Returns how many neighbours form each group."""
    least_bytes = sum(gradient.num_bytes for gradient in gradients) / max_groups if len(gradients) > max_groups else 0
    groups, size, num_bytes = [], 0, 0
    for gradient in gradients:
        size, num_bytes = size + 1, num_bytes + gradient.num_bytes
        if num_bytes >= least_bytes:
            groups.append(size)
            size = num_bytes = 0
    return [*groups, size] if size else groups


def caps_for(sizes: Sequence[int], gradients: Sequence[Gradient]) -> tuple[float, ...]:
    """Returns the ``bucket_cap_mb`` list for buckets with these numbers of gradients, all of one dtype.

    >>> two = [Gradient(name, (256, 1024), 4, 0.1) for name in "ab"]
    >>> caps_for((1, 1), two), caps_for((2,), two)
    ((1.0, 1.0), (2.0,))
    """
    caps, start = [], 0
    for size in sizes:
        caps.append(sum(gradient.num_bytes for gradient in gradients[start : start + size]) / MIB)
        start += size
    return tuple(caps)


def forecasts(basis: Basis, *, accumulates_by_hand: bool = False) -> list[Forecast]:
    """Returns the best plan with each recommended compressor and plain caps, exact ones first, and accumulation.

    Args:
        basis: of the run.
        accumulates_by_hand: name no option of the Trainer for accumulation, as manual optimization excludes it.
    """
    best = best_of_each(basis, recommended_compressors(), with_lists=False)
    predicted = [_forecast(candidate, basis) for candidate in best]
    return [
        *sorted(predicted, key=lambda forecast: forecast.error_bound),
        *_diloco_forecasts(basis),
        _accumulation_forecast(basis, accumulates_by_hand),
    ]


def _forecast(candidate: Candidate[CommPlan], basis: Basis) -> Forecast:
    plan, present = candidate.plan, basis.plan
    has_other_hook = plan.comm_hook != present.comm_hook
    settings = []
    if has_other_hook:
        settings.append(f'comm_hook="{"none" if plan.comm_hook is None else compressor_name(plan.comm_hook)}"')
    if plan.bucket_cap_mb != present.bucket_cap_mb:
        settings.append(f"bucket_cap_mb={plan.bucket_cap_mb}")
    claims = plan.comm_hook.claims if has_other_hook and plan.comm_hook is not None else None
    return Forecast(
        setting=", ".join(settings),
        is_lossy=claims is not None and claims.is_lossy,
        error_bound=0.0 if claims is None else claims.error_bound or 0.0,
        step_s=candidate.prediction.step_s,
        low_s=candidate.prediction.low_s,
        high_s=candidate.prediction.high_s,
        present_s=basis.step_s,
    )


def _diloco_forecasts(basis: Basis) -> list[Forecast]:
    """Returns DiLoCo with its default ``sync_every``; empty for one rank."""
    return [
        Forecast(
            setting=f"CommOptDiLoCo(sync_every={plan.sync_every})",
            is_lossy=True,
            error_bound=1.0,  # this is no error of a gradient: only the loss shows what fewer exchanges cost
            step_s=prediction.step_s,
            low_s=prediction.low_s,
            high_s=prediction.high_s,
            present_s=basis.step_s,
        )
        for plan, prediction in diloco_candidates(basis)
        if plan == DiLoCoPlan()
    ]


def _accumulation_forecast(basis: Basis, by_hand: bool) -> Forecast:
    num_batches = _NUM_BATCHES * basis.workload.num_batches
    more = dataclasses.replace(basis, workload=basis.workload.accumulating(num_batches)).predict(basis.plan)
    return Forecast(
        setting=(
            f"{_NUM_BATCHES} times as many backwards per optimizer step, all but the last in no_sync()"
            if by_hand
            else f"Trainer(accumulate_grad_batches={num_batches})"
        ),
        is_lossy=False,
        error_bound=1.0,
        step_s=more.step_s / _NUM_BATCHES,
        low_s=more.low_s / _NUM_BATCHES,
        high_s=more.high_s / _NUM_BATCHES,
        note=f"the optimizer then steps once for {_NUM_BATCHES} times the samples, which changes training",
        present_s=basis.step_s,
        is_bounded=False,  # the optimizer's time is saved, too
    )
