"""The basis of predictions behind a fit: its calls, its steps, the probe of its links and the costs of compressors."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from statistics import median, stdev

from lightning_commopt.cost.fsdp2.arithmetic import ShardCost, ShardCosts
from lightning_commopt.cost.fsdp2.basis import ShardedBasis
from lightning_commopt.cost.fsdp2.calls import Batch, backward_of, blocking, forward_of, load_of, ratio_of
from lightning_commopt.cost.fsdp2.links import Load, ShardLinks
from lightning_commopt.cost.fsdp2.predict import num_reducing, on_streams
from lightning_commopt.cost.fsdp2.workload import Exposure, ShardedWorkload, Unit
from lightning_commopt.cost.shared_core import competing_threads
from lightning_commopt.measure.median import block_medians
from lightning_commopt.measure.operations import exposed_s
from lightning_commopt.measure.record import StepRecord, covered_s
from lightning_commopt.plan.sharded import ShardedPlan


def basis_of_fit(
    plan: ShardedPlan,
    units: Sequence[Unit],
    batches: Sequence[Batch],
    steps: Sequence[StepRecord],
    links: ShardLinks,
    costs: ShardCosts,
    gather_cost: ShardCost,
    *,
    num_ranks: int,
    least_s: Sequence[Sequence[float]] = (),
    device: str = "cpu",
    shares_core: bool = False,
    slowdown: float = 1.0,
) -> ShardedBasis:
    """Returns what a fit shows for predictions.

    Args:
        plan: the plan of the fit.
        units: the units of the model.
        batches: calls of some batches on this rank, from `usual_batches`.
        steps: steps of this rank.
        links: as they were probed.
        costs: arithmetic of compressors, measured outside of training.
        gather_cost: the same of ``param_hook="int8"``.
        num_ranks: number of ranks.
        least_s: see `load_of`; not needed on CUDA, where the steps show it.
        device: "cpu" or "cuda".
        shares_core: compression shares its core with backward.
        slowdown: factor by which other processes stretch arithmetic.

    Raises:
        ValueError: there are too few steps or batches, or the arithmetic of the plan's compressor was not measured.
    """
    if not steps or not batches:
        raise ValueError("too few steps for a prediction: train for more steps")
    times_s = [record.totals.step_s for record in steps]
    blocks_s = block_medians(times_s)
    num_batches = max(1, round(median(sum(phase.name == "backward" for phase in record.phases) for record in steps)))
    work = ShardedWorkload(
        units=tuple(units),
        forward=forward_of(batches),
        backward=backward_of(batches, slowdown),
        step_s=median(times_s),
        once_s=median(record.totals.optimizer_s + record.totals.other_s for record in steps),
        num_batches=num_batches,
        spread_s=stdev(blocks_s) if len(blocks_s) > 1 else 0.0,
        waited_s=_waited_s(steps) if device == "cpu" else None,
        straggler_s=num_batches * _wait_s(batches, least_s) if device == "cpu" else 0.0,
        num_ranks=num_ranks,
        shares_core=shares_core,
        num_others=competing_threads(slowdown),
        device=device,
    )
    basis = ShardedBasis(
        plan=plan,
        workload=work,
        links=links,
        costs={hook: cost.slower(slowdown) for hook, cost in costs.items()},
        gather_cost=gather_cost.slower(slowdown),
    )
    if device != "cpu":
        return _with_waits(basis, steps)
    load = load_of(batches, least_s, units, links.expected, basis.gather_cost, num_ranks)
    return dataclasses.replace(basis, links=links.in_training(load))


def _wait_s(batches: Sequence[Batch], least_s: Sequence[Sequence[float]]) -> float:
    """Returns how long this rank waits in a batch for others, from the times of its collectives and the least ones."""
    waits_s = [
        sum(call.seconds for call in blocking(batch)) - sum(times_s)
        for batch, times_s in zip(batches, least_s, strict=False)
    ]
    return max(0.0, median(waits_s)) if waits_s else 0.0


def _waited_s(steps: Sequence[StepRecord]) -> float | None:
    """Returns how long a step waits for collectives; None if no step has recorded it."""
    waits_s = [covered_s(record.waits) for record in steps]
    return median(waits_s) if any(waits_s) else None


def _with_waits(basis: ShardedBasis, steps: Sequence[StepRecord]) -> ShardedBasis:
    """Returns the basis with the times of collectives, and of the waits for them, that steps on CUDA show."""
    plan, work = basis.plan, basis.workload
    backwards = {"all_gather": work.num_batches, "reduce_scatter": num_reducing(plan, work.num_batches)}
    known = {operation: _exposure_of(operation, steps, backwards[operation]) for operation in backwards}
    is_own = {"all_gather": plan.param_hook is None, "reduce_scatter": plan.comm_hook is None}
    own_s = dict(zip(backwards, on_streams(plan, work, basis.world), strict=True))
    pairs = {
        operation: (known[operation].seconds, own_s[operation])
        for operation in backwards
        if is_own[operation] and own_s[operation] > 0
    }
    load = Load({operation: ratio_of([pair]) for operation, pair in pairs.items()}, ratio_of([*pairs.values()]))
    basis = dataclasses.replace(basis, links=basis.links.in_training(load))
    gather_s, reduce_s = on_streams(plan, work, basis.world)
    work = dataclasses.replace(
        work,
        gathers=known["all_gather"]._replace(seconds=gather_s),
        reduces=known["reduce_scatter"]._replace(seconds=reduce_s),
    )
    return dataclasses.replace(basis, workload=work)


def _exposure_of(operation: str, steps: Sequence[StepRecord], num_backwards: int) -> Exposure:
    """Returns the time of one operation for each backward that issues it, and of the wait for it, from the steps."""
    seconds, exposed = [], []
    for record in steps:
        spans = zip(record.collectives, exposed_s(record), strict=True)
        timed = [
            (collective.end_s - collective.start_s, waited_s or 0.0)
            for collective, waited_s in spans
            if collective.operation == operation and collective.start_s is not None and collective.end_s is not None
        ]
        seconds.append(sum(duration_s for duration_s, _ in timed))
        exposed.append(sum(waited_s for _, waited_s in timed))
    return Exposure(median(seconds) / num_backwards, median(exposed) / num_backwards)
