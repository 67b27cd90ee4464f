"""The calls of FSDP2's comm objects in some batches, and what they show.

Shapes: ``B`` batches; ``C`` calls in a batch that block their thread, see `blocking`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean, median
from typing import NamedTuple

from lightning_commopt.cost.fsdp2.arithmetic import ShardCost
from lightning_commopt.cost.fsdp2.links import Lines, Load
from lightning_commopt.cost.fsdp2.workload import AS_INT8, Call, Unit

_MIN_BATCHES = 3
"""Batches from which a median is taken at least."""


class TimedCall(NamedTuple):
    """A call of a comm object on one rank."""

    phase: str  # "forward" or "backward"
    operation: str  # "all_gather" or "reduce_scatter"
    unit: int  # place of its unit in the model
    num_bytes: int  # bytes of its inputs or its outputs, whichever is larger
    is_own: bool  # whether it is FSDP2's own, whose collective has ended with the call on CPU
    seconds: float  # duration of the call
    after_s: float  # computation since the call before, or the beginning of the phase

    @property
    def place(self) -> tuple[str, str, int]:
        return self.phase, self.operation, self.unit


Batch = Sequence[TimedCall]
"""The calls of a batch, in order."""


def usual_batches(batches: Sequence[Batch]) -> list[Batch]:
    """Returns the batches that reduce gradients and that have the most frequent calls, but for the first of all.

    There are none if they are too few for medians.
    """
    places = [tuple(call.place for call in batch) for batch in batches[1:]]
    reducing = [calls for calls in places if any(operation == "reduce_scatter" for _, operation, _ in calls)]
    if not reducing:
        return []
    usual, num_batches = Counter(reducing).most_common(1)[0]
    if num_batches < _MIN_BATCHES:
        return []
    return [batch for batch, calls in zip(batches[1:], places, strict=True) if calls == usual]


def forward_of(batches: Sequence[Batch]) -> tuple[int, ...]:
    """Returns the places of the units that a forward gathers, from `usual_batches`."""
    return tuple(call.unit for call in batches[0] if call.phase == "forward" and call.operation == "all_gather")


def backward_of(batches: Sequence[Batch], slowdown: float) -> tuple[Call, ...]:
    """Returns the calls of backward with the medians of the computation before them, times ``slowdown``."""
    return tuple(
        Call(same_calls[0].operation, same_calls[0].unit, slowdown * median(call.after_s for call in same_calls))
        for same_calls in zip(*batches, strict=True)
        if same_calls[0].phase == "backward"
    )


def blocking(batch: Batch) -> list[TimedCall]:
    """Returns the calls that block their thread until the collective has ended, with nothing else on the link.

    These are the calls of forward, and those of backward unless a second thread reduces gradients at the same time.
    """
    is_alone = all(call.is_own for call in batch if call.operation == "reduce_scatter")
    return [call for call in batch if call.phase == "forward" or is_alone]


def load_of(
    batches: Sequence[Batch],
    least_s: Sequence[Sequence[float]],
    units: Sequence[Unit],
    probed: Lines,
    gather_cost: ShardCost,
    num_ranks: int,
) -> Load:
    """Returns how much longer than in the probe collectives take in training.

    Args:
        batches: from `usual_batches`, on CPU.
        least_s: ``(B, C)`` the times of `blocking` calls on the rank where they are shortest, which waits for no other
            rank.
        units: the units of the model.
        probed: the lines of an idle link.
        gather_cost: the arithmetic of compressed parameters, in training.
        num_ranks: number of ranks.
    """
    known: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)  # measured and expected time of each call
    for call, times_s in zip(blocking(batches[0]), zip(*least_s, strict=True), strict=True):
        unit = units[call.unit]
        if call.is_own:
            kind, payload = call.operation, unit.parameters if call.operation == "all_gather" else unit.gradients
            expected_s = probed.own(kind).time_s(payload.num_bytes, num_ranks)
        else:  # Only the exchange of compressed parameters is left, since compressed gradients do not block.
            kind, payload = "exchange", unit.parameters
            expected_s = probed.exchange.time_s(payload.sent_bytes(AS_INT8, num_ranks), num_ranks)
            expected_s += sum(gather_cost.times_s(payload.matrix_bytes)) if payload.matrix_numel else 0.0
        known[kind].append((median(times_s), expected_s))
    ratios = {kind: ratio_of(pairs) for kind, pairs in known.items()}
    pairs = [pair for of_kind in known.values() for pair in of_kind]
    if not pairs:
        return Load({})
    delays_s = [measured_s - expected_s for measured_s, expected_s in pairs]
    common_s = max(0.0, min(delays_s)) + min(0.0, max(delays_s))
    return Load(ratios, ratio_of(pairs), fmean(expected_s for _, expected_s in pairs), common_s)


def ratio_of(pairs: Sequence[tuple[float, float]]) -> float:
    """Returns the sum of measured over that of expected times, 1 if nothing was expected."""
    expected_s = sum(expected_s for _, expected_s in pairs)
    return sum(measured_s for measured_s, _ in pairs) / expected_s if expected_s > 0 else 1.0
