"""The workload and the link behind the steps of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median, stdev
from typing import NamedTuple

from lightning_commopt.cost.compressor_cost import CompressorCost
from lightning_commopt.cost.link_probe import ProbedSize, link_of_probe
from lightning_commopt.cost.shared_core import message_cpu_s, undisturbed_share
from lightning_commopt.cost.workload import Gradient, Shape, Workload
from lightning_commopt.measure.link.from_steps import MIN_TIMES, SentStep, fit_link, sent_steps
from lightning_commopt.measure.link.link import Link, num_wakes
from lightning_commopt.measure.record import BucketSpan, StepRecord


def workload_of_steps(
    ranks: Sequence[Sequence[StepRecord]],
    gradients: Sequence[Gradient] = (),
    *,
    num_ranks: int,
    device: str = "cpu",
    shares_core: bool = False,
    shapes: Mapping[str, Shape] | None = None,
) -> Workload:
    """Returns the workload of the same steps of each rank, or of some; see `Workload` for the other arguments.

    Without ``gradients``, from `GradientTimes`, the ready times are estimated by `even_gradients`.

    Raises:
        ValueError: no step has buckets.
    """
    parts = [[_parts(record) for record in steps if record.buckets] for steps in ranks]
    if not parts or not all(parts):
        raise ValueError("no step has buckets: the gradient sync of this run was not observed, or it had one rank")
    every = [part for of_rank in parts for part in of_rank]
    is_per_gradient = bool(gradients)
    if not is_per_gradient:
        gradients = even_gradients(ranks[0], shapes)
    forward_s = median(part.forward_s for part in every)
    backward_s = max(gradients[-1].ready_s, 1e-9) if is_per_gradient else median(part.backward_s for part in every)
    if is_per_gradient:  # other processes may have slowed down only the timed backwards
        factor = min(1.0, median(part.backward_s for part in every) / backward_s)
        gradients = [gradient._replace(ready_s=factor * gradient.ready_s) for gradient in gradients]
        backward_s *= factor
    # Gradient sync that shares its core makes backward longer, and buffers that are broadcast make forward longer.
    # Both would look like differences between ranks, so the smaller of two estimates counts.
    scale = (forward_s + backward_s) / max(forward_s, 1e-9)
    estimates = [[[part.forward_s + part.backward_s for part in of_rank] for of_rank in parts]]
    estimates += [[[scale * part.forward_s for part in of_rank] for of_rank in parts]] if shares_core else []
    return Workload(
        gradients=tuple(gradients),
        forward_s=forward_s,
        backward_s=backward_s,
        rest_s=median(part.rest_s for part in every),
        data_s=median(part.data_s for part in every),
        num_batches=_num_batches(next(record for record in ranks[0] if record.buckets)),
        spread_s=min(
            median(stdev(times_s) if len(times_s) > 1 else 0.0 for times_s in computing) for computing in estimates
        ),
        num_ranks=num_ranks,
        straggler_s=min(map(_straggler_s, estimates)),
        shares_core=shares_core,
        device=device,
        is_per_gradient=is_per_gradient,
    )


def link_of_steps(
    ranks: Sequence[Sequence[StepRecord]],
    *,
    num_ranks: int,
    comm_cpu_s: float = 0.0,
    cost: CompressorCost | None = None,
    has_trees: bool = False,
    probe: Sequence[ProbedSize] = (),
    sent: Sequence[SentStep] = (),
) -> Link:
    """Returns the link behind the same steps of some ranks, whatever the comm hook; see `fit_link`.

    Args:
        ranks: the steps of each rank.
        num_ranks: ranks in the run.
        comm_cpu_s: processor time of threads other than backward's, in a step.
        cost: arithmetic of the compressor of these steps: the part of ``comm_cpu_s`` that is not the link's.
        has_trees: see `Link`.
        probe: what the idle link takes. It gives the link of a compressed run, and the latency of every run.
        sent: messages of the steps with the least times of all ranks; if empty, the messages of ``ranks`` count, whose
            times may include waiting for other ranks.

    Raises:
        ValueError: fewer than three buckets of one size were on the wire, or none at all whatever the number of steps.
    """
    compressor = None if cost is None else cost.compressor
    idle = link_of_probe(probe, num_ranks, has_trees=has_trees) if probe else None
    hop_s = None if idle is None else idle.hop_s
    fit = fit_link(sent or sent_steps(ranks, num_ranks), num_ranks, hop_s=hop_s, has_trees=has_trees)
    if fit is None and not any(bucket.wire_bytes for steps in ranks for step in steps for bucket in step.buckets):
        raise ValueError(
            "its comm hook put nothing on the wire, as 'hierarchical' does within one node, so its steps do not show"
            " the link: train with another comm_hook"
        )
    if fit is None:
        raise ValueError(f"no bucket of its steps was on the wire {MIN_TIMES} times on all ranks: train for more steps")
    if idle is not None and compressor is not None and compressor.claims.is_lossy:
        return idle
    buckets = ranks[0][-1].buckets
    is_direct = compressor is not None and max(len(bucket.wire) for bucket in buckets) > 1
    wakes = num_wakes("all_to_all" if is_direct else "all_reduce", num_ranks)
    cpu_s_per_byte, cpu_s_per_message = _link_cpu_s(buckets, wakes, comm_cpu_s, cost if compressor else None)
    return replace(fit.link, cpu_s_per_byte=cpu_s_per_byte, cpu_s_per_message=cpu_s_per_message)


def _link_cpu_s(
    buckets: Sequence[BucketSpan], wakes: float, comm_cpu_s: float, cost: CompressorCost | None
) -> tuple[float, float]:
    """Returns the processor seconds of a byte on the wire, and the further ones of a collective of two ranks.

    A collective of these ranks takes ``wakes`` times the latter.
    """
    computed_s = 0.0 if cost is None else sum(cost.compute_s(bucket.gradient_bytes) for bucket in buckets)
    left_s = max(0.0, comm_cpu_s - computed_s)
    num_messages = wakes * max(1, sum(len(bucket.wire) for bucket in buckets))
    message_s = message_cpu_s(left_s, num_messages)
    left_s -= num_messages * message_s
    return left_s / max(1, sum(bucket.wire_bytes for bucket in buckets)), message_s


def without_interrupts(
    gradients: Sequence[Gradient], steps: Sequence[StepRecord], interrupts_s: float
) -> tuple[Gradient, ...]:
    """Returns when gradients would be ready if nothing had interrupted backward, see `undisturbed_share`."""
    hidden = median(record.totals.overlapped_share or 0.0 for record in steps)
    factor = undisturbed_share(interrupts_s, hidden, gradients[-1].ready_s) if gradients else 1.0
    return tuple(gradient._replace(ready_s=factor * gradient.ready_s) for gradient in gradients)


class _Parts(NamedTuple):
    """A step without gradient sync: its batches, the model, backward up to its last bucket, and the rest."""

    data_s: float
    forward_s: float
    backward_s: float
    rest_s: float


def _parts(record: StepRecord) -> _Parts:
    began_s = _backward_start_s(record)
    last_ready_s = max(bucket.ready_s for bucket in record.buckets)
    ended_s = max(bucket.end_s for bucket in record.buckets)
    forward_s = record.totals.forward_s
    data_s = record.totals.data_s
    rest_s = record.totals.step_s - data_s - forward_s - (max(ended_s, last_ready_s) - began_s)
    return _Parts(data_s, forward_s, last_ready_s - began_s, max(0.0, rest_s))


def _num_batches(record: StepRecord) -> int:
    """Returns how many batches were accumulated: backwards that were not synchronized, and one."""
    num_synced = len({bucket.backward for bucket in record.buckets})
    return max(1, sum(phase.name == "backward" for phase in record.phases) - num_synced + 1)


def even_gradients(steps: Sequence[StepRecord], shapes: Mapping[str, Shape] | None = None) -> list[Gradient]:
    """Returns gradients where only buckets are known: each ready evenly since the bucket before.

    Args:
        steps: the steps of one rank; the last one has the layout of buckets.
        shapes: shapes of parameters by name. A missing one counts as a float32 vector, with an equal share of the rest
            of its bucket.
    """
    layout, shapes = steps[-1].layout, shapes or {}
    ready_s: defaultdict[int, list[float]] = defaultdict(list)
    for record in steps:
        if record.buckets:
            last, began_s = record.buckets[-1].backward, _backward_start_s(record)
            for bucket in record.buckets:
                if bucket.backward == last:
                    ready_s[bucket.index].append(bucket.ready_s - began_s)
    gradients, before_s = [], 0.0
    for index in sorted(layout.keys() & ready_s.keys()):
        names, at_s = layout[index].names, median(ready_s[index])
        known = {name: shapes[name] for name in names if name in shapes}
        remaining_bytes = layout[index].gradient_bytes - sum(shape.num_bytes for shape in known.values())
        vector = Shape((max(0, remaining_bytes) // 4 // max(1, len(names) - len(known)),), 4)
        for place, name in enumerate(names, 1):
            shape = known.get(name, vector)
            gradients.append(Gradient(name, *shape, before_s + (at_s - before_s) * place / len(names)))
        before_s = at_s
    return gradients


def _backward_start_s(record: StepRecord) -> float:
    """Returns when the last backward of a step with buckets began."""
    last_s = record.buckets[-1].ready_s
    starts_s = (start_s for name, start_s, _ in record.phases if name == "backward" and start_s <= last_s)
    return max(starts_s, default=record.start_s)


def _straggler_s(computing: Sequence[Sequence[float]]) -> float:
    """Returns how much longer than the mean rank the last one takes, from the seconds of each rank's steps."""
    extra_s: float = median(max(times_s) - fmean(times_s) for times_s in zip(*computing, strict=False))
    return extra_s
