"""The plans that are worth trying for a workload, the fastest first."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

from lightning_commopt.compressors import Compressor
from lightning_commopt.cost.best_layout import best_layout
from lightning_commopt.cost.buckets import buckets_of, caps_for
from lightning_commopt.cost.link import Link
from lightning_commopt.cost.predict import Costs, Prediction, predict
from lightning_commopt.cost.workload import Workload
from lightning_commopt.plan import CommPlan, ddp_options

_CAPS_MB = (5, 10, 25, 50, 100, 200, 400)
_MAX_GROUPS = (96, 16, 6)  # fewer buckets than the layout that ends first take less of a core that backward needs


class Candidate(NamedTuple):
    """A plan, and what it would take."""

    plan: CommPlan
    prediction: Prediction


def candidates(
    base: CommPlan,
    workload: Workload,
    link: Link,
    costs: Costs,
    compressors: Iterable[Compressor | None],
    *,
    num_ranks: int | None = None,
    with_lists: bool = True,
) -> list[Candidate]:
    """Returns plans with other buckets and compressors than ``base``, and ``base`` itself, by predicted time.

    For each compressor the best layout as a list of caps, also of few neighbours taken together, where this torch takes
    one and all gradients have one dtype; and DDP's own layout with the usual caps. Of plans with the same buckets the
    first counts. Compressors whose cost was not measured are left out.

    Args:
        base: whose other options all candidates have.
        workload: what is computed.
        link: between the ranks.
        costs: of the compressors.
        compressors: to choose from; None is DDP's own average.
        num_ranks: that train; None for as many as the workload was measured with.
        with_lists: also lists of caps.
    """
    with_lists = with_lists and not base.find_unused_parameters and "bucket_cap_mb_list" in ddp_options()
    with_lists = with_lists and len({gradient.itemsize for gradient in workload.gradients}) == 1
    plans = [base]
    for compressor in compressors:
        if compressor is not None and compressor not in costs:
            continue
        same_hook = dataclasses.replace(base, comm_hook=compressor)
        plans += [same_hook, *(dataclasses.replace(same_hook, bucket_cap_mb=cap) for cap in _CAPS_MB)]
        for max_groups in _MAX_GROUPS if with_lists else ():
            sizes = best_layout(workload, link, costs, compressor, num_ranks=num_ranks, max_groups=max_groups)
            plans.append(dataclasses.replace(same_hook, bucket_cap_mb=caps_for(sizes, workload.gradients)))
    unique: dict[tuple[Compressor | None, tuple[int, ...]], CommPlan] = {}
    for plan in plans:
        sizes = tuple(map(len, buckets_of(plan, workload.gradients)))
        unique.setdefault((plan.comm_hook, sizes), plan)
    found = [Candidate(plan, predict(plan, workload, link, costs, num_ranks=num_ranks)) for plan in unique.values()]
    return sorted(found, key=lambda candidate: candidate.prediction.step_s)
