"""The calls of FSDP2's comm objects in some batches, and what they show.

Shapes: ``B`` batches; ``C`` collectives of FSDP2's own in a batch, each of which blocks its thread on CPU.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from lightning_commopt.cost.fsdp2.links import ShardLinks
from lightning_commopt.cost.fsdp2.workload import Call, Unit

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
        Call(same[0].operation, same[0].unit, slowdown * median(call.after_s for call in same))
        for same in zip(*batches, strict=True)
        if same[0].phase == "backward"
    )


def blocking(batch: Batch) -> list[TimedCall]:
    """Returns the collectives of FSDP2's own that nothing else disturbs: in forward, or if all in backward are."""
    is_alone = all(call.is_own for call in batch if call.operation == "reduce_scatter")
    return [call for call in batch if call.is_own and (call.phase == "forward" or is_alone)]


def stretches_of(
    batches: Sequence[Batch],
    least_s: Sequence[Sequence[float]],
    units: Sequence[Unit],
    links: ShardLinks,
    num_ranks: int,
) -> dict[str, float]:
    """Returns how many times as long as in the probe collectives take in training, for `ShardLinks.in_training`.

    Args:
        batches: from `usual_batches`, on CPU.
        least_s: ``(B, C)`` the times of `blocking` collectives on the rank where they are shortest, which waits for no
            other rank.
        units: the units of the model.
        links: as they were probed.
        num_ranks: number of ranks.
    """
    measured_s: defaultdict[str, float] = defaultdict(float)
    expected_s: defaultdict[str, float] = defaultdict(float)
    for call, times_s in zip(blocking(batches[0]), zip(*least_s, strict=True), strict=True):
        unit = units[call.unit]
        payload = unit.parameters if call.operation == "all_gather" else unit.gradients
        for key in (call.operation, ""):
            measured_s[key] += median(times_s)
            expected_s[key] += links.own(call.operation).time_s(payload.num_bytes, num_ranks)
    return {key: measured_s[key] / expected_s[key] for key in measured_s if expected_s[key] > 0}
