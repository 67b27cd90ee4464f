"""The workload and the link behind the steps of a run."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from statistics import fmean, median, stdev
from typing import NamedTuple

from lightning_commopt.cost.compressor_cost import CompressorCost
from lightning_commopt.cost.link_probe import ProbedSize, link_of_probe
from lightning_commopt.cost.shared_core import message_cpu_s, num_wakes, undisturbed_share
from lightning_commopt.cost.workload import TYPICAL_HOP_S, Gradient, Link, Shape, Workload
from lightning_commopt.measure.link.fit import Point, Segment, fit_segments
from lightning_commopt.measure.link.from_steps import MIN_TIMES
from lightning_commopt.measure.record import BucketSpan, StepRecord, covered_s

_BLOCK = 10
"""The median of so many messages counts, as a prediction is of the median of many steps, not of one of them. They are
few enough for several such medians in a run."""


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

    Without ``gradients``, from `GradientTimes`, those of `even_gradients` count.

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
    if is_per_gradient:  # other processes may have slowed down the timed backwards, and left the others alone
        factor = min(1.0, median(part.backward_s for part in every) / backward_s)
        gradients = [gradient._replace(ready_s=factor * gradient.ready_s) for gradient in gradients]
        backward_s *= factor
    # Gradient sync that shares its core makes backward longer, and buffers that are broadcast make forward longer.
    # Both would look like differences between ranks, so the smaller of two estimates counts.
    scale = (forward_s + backward_s) / max(forward_s, 1e-9)
    seen = [[[part.forward_s + part.backward_s for part in of_rank] for of_rank in parts]]
    seen += [[[scale * part.forward_s for part in of_rank] for of_rank in parts]] if shares_core else []
    return Workload(
        gradients=tuple(gradients),
        forward_s=forward_s,
        backward_s=backward_s,
        rest_s=median(part.rest_s for part in every),
        data_s=median(part.data_s for part in every),
        num_batches=_num_batches(next(record for record in ranks[0] if record.buckets)),
        spread_s=min(
            median(stdev(times_s) if len(times_s) > 1 else 0.0 for times_s in computing) for computing in seen
        ),
        num_ranks=num_ranks,
        straggler_s=min(map(_straggler_s, seen)),
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
) -> Link:
    """Returns the link behind the buckets of the same steps of all ranks, whatever the comm hook.

    The time of a bucket's collectives is that of the rank on which it is least: the last one to join does not wait.

    Args:
        ranks: the steps of each rank.
        num_ranks: ranks in the run.
        comm_cpu_s: processor time of threads other than backward's, in a step.
        cost: arithmetic of the compressor of these steps: the part of ``comm_cpu_s`` that is not the link's.
        has_trees: see `Link`.
        probe: what the idle link takes. It gives the link of a compressed run, and the latency of every run.

    Raises:
        ValueError: fewer than three buckets of one size were on the wire.
    """
    compressor = None if cost is None else cost.compressor
    has_own_hook = compressor is not None
    num_rounds, times_of = _wire_times(ranks, _messages if has_trees or has_own_hook else _step_as_one_message)
    if not times_of:
        raise ValueError(f"no bucket of its steps was on the wire {MIN_TIMES} times on all ranks")
    idle = link_of_probe(probe, num_ranks, has_trees=has_trees) if probe else None
    if idle is not None and compressor is not None and compressor.claims.is_lossy:
        return idle
    points = [Point(size, median(values)) for size, values in sorted(times_of.items())]
    num_hops = num_rounds * (1 if has_own_hook and num_rounds > 1 else 2 * (num_ranks - 1))
    line = _line(points, num_hops)
    ratios = sorted(value / line.time_s(size) for size, values in times_of.items() for value in _block_medians(values))
    tail = int(0.025 * len(ratios))
    wakes = num_wakes("all_to_all" if has_own_hook and num_rounds > 1 else "all_reduce", num_ranks)
    cpu_s = _link_cpu_s(ranks[0][-1].buckets, wakes, comm_cpu_s, cost if has_own_hook else None)
    num_times = sum(map(len, times_of.values()))
    sizes = " to ".join(f"{size / 1e6:.3g}" for size in sorted({points[0].size_bytes, points[-1].size_bytes}))
    return Link(
        hop_s=line.latency_s / num_hops if idle is None else idle.hop_s,
        s_per_byte=line.s_per_byte * num_ranks / (2 * (num_ranks - 1)),
        cpu_s_per_byte=cpu_s[0],
        cpu_s_per_message=cpu_s[1],
        low_ratio=min(1.0, ratios[tail]),
        high_ratio=max(1.0, ratios[-1 - tail]),
        seen_bytes=median(record.totals.wire_bytes for record in ranks[0] if record.buckets),
        has_trees=has_trees,
        source=f"{num_times} times of {sizes} MB on the wire in the run",
    )


def _block_medians(values: Sequence[float]) -> list[float]:
    """Returns medians of `_BLOCK` values each."""
    return [median(values[start : start + _BLOCK]) for start in range(0, len(values), _BLOCK)]


def _wire_times(
    ranks: Sequence[Sequence[StepRecord]], of_messages: Callable[[StepRecord], list[_Message]]
) -> tuple[int, dict[int, list[float]]]:
    """Returns the number of collectives of a message, and by its bytes the least time on any rank in each step."""
    times: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for records in zip(*ranks, strict=False):
        for same in zip(*map(of_messages, records), strict=False):
            if len({(message.num_rounds, message.wire_bytes) for message in same}) == 1:
                times[same[0].num_rounds, same[0].wire_bytes].append(min(message.time_s for message in same))
    known = {key: values for key, values in times.items() if len(values) >= MIN_TIMES and min(values) > 0}
    num_rounds = max((rounds for rounds, _ in known), default=1)
    return num_rounds, {size: values for (rounds, size), values in known.items() if rounds == num_rounds}


def _link_cpu_s(
    buckets: Sequence[BucketSpan], wakes: float, comm_cpu_s: float, cost: CompressorCost | None
) -> tuple[float, float]:
    """Returns the processor time of a byte on the wire, and that of a collective of two ranks besides.

    A collective of these ranks takes ``wakes`` times that.
    """
    computed_s = 0.0 if cost is None else sum(cost.compute_s(bucket.gradient_bytes) for bucket in buckets)
    left_s = max(0.0, comm_cpu_s - computed_s)
    num_messages = wakes * max(1, sum(len(bucket.wire) for bucket in buckets))
    message_s = message_cpu_s(left_s, num_messages)
    left_s -= num_messages * message_s
    return left_s / max(1, sum(bucket.wire_bytes for bucket in buckets)), message_s


def _line(points: Sequence[Point], num_hops: int) -> Segment:
    """Returns time against size; with the usual latency where the sizes, or noise, do not separate it from the rate."""
    last = fit_segments(points)[-1]
    all_s, all_bytes = sum(point.time_s for point in points), sum(point.size_bytes for point in points)
    if len(points) > 1 and last.s_per_byte > all_s / all_bytes / 2:
        return last
    latency_s = min(num_hops * TYPICAL_HOP_S, all_s / len(points) / 2)
    return last._replace(latency_s=latency_s, s_per_byte=(all_s - len(points) * latency_s) / all_bytes)


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


class _Message(NamedTuple):
    num_rounds: int
    wire_bytes: int
    time_s: float


def _parts(record: StepRecord) -> _Parts:
    began_s = _began_s(record)
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


def _messages(record: StepRecord) -> list[_Message]:
    """Returns what the buckets of a step had on the wire, by backward and bucket."""
    messages, free_s = {}, -math.inf
    for bucket in sorted(record.buckets, key=attrgetter("end_s")):
        time_s = sum(end_s - max(start_s, min(free_s, end_s)) for start_s, end_s in bucket.wire)
        messages[bucket.backward, bucket.index] = _Message(len(bucket.wire), bucket.wire_bytes, time_s)
        free_s = max(free_s, *(end_s for _, end_s in bucket.wire)) if bucket.wire else free_s
    return [messages[key] for key in sorted(messages)]


def _step_as_one_message(record: StepRecord) -> list[_Message]:
    """Returns the buckets of a step as one message: two share the link at a time, so none shows how fast it is."""
    if not record.buckets:
        return []
    sent_s = covered_s([interval for bucket in record.buckets for interval in bucket.wire])
    return [_Message(len(record.buckets), sum(bucket.wire_bytes for bucket in record.buckets), sent_s)]


def even_gradients(steps: Sequence[StepRecord], shapes: Mapping[str, Shape] | None = None) -> list[Gradient]:
    """Returns gradients where only buckets are known: each ready evenly since the bucket before.

    Args:
        steps: the steps of one rank; the last one has the layout of buckets.
        shapes: by name of a parameter. One that is missing counts as a float32 vector, of an equal share of what the
            others leave of its bucket.
    """
    layout, shapes = steps[-1].layout, shapes or {}
    ready_s: defaultdict[int, list[float]] = defaultdict(list)
    for record in steps:
        if record.buckets:
            last, began_s = record.buckets[-1].backward, _began_s(record)
            for bucket in record.buckets:
                if bucket.backward == last:
                    ready_s[bucket.index].append(bucket.ready_s - began_s)
    gradients, before_s = [], 0.0
    for index in sorted(layout.keys() & ready_s.keys()):
        names, at_s = layout[index].names, median(ready_s[index])
        known = {name: shapes[name] for name in names if name in shapes}
        left = layout[index].gradient_bytes - sum(shape.num_bytes for shape in known.values())
        vector = Shape((max(0, left) // 4 // max(1, len(names) - len(known)),), 4)
        for place, name in enumerate(names, 1):
            shape = known.get(name, vector)
            gradients.append(Gradient(name, *shape, before_s + (at_s - before_s) * place / len(names)))
        before_s = at_s
    return gradients


def _began_s(record: StepRecord) -> float:
    """Returns when the last backward of a step with buckets began."""
    last_s = record.buckets[-1].ready_s
    starts_s = (start_s for name, start_s, _ in record.phases if name == "backward" and start_s <= last_s)
    return max(starts_s, default=record.start_s)


def _straggler_s(computing: Sequence[Sequence[float]]) -> float:
    """Returns how much longer than the mean rank the last one takes, from the seconds of each rank's steps."""
    extra_s: float = median(max(times_s) - fmean(times_s) for times_s in zip(*computing, strict=False))
    return extra_s
