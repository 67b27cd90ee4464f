"""CompressorCost: the arithmetic of a compressor on this device, measured on scratch buckets without other ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch

from lightning_commopt.compressors import Compressor, Layout, Rounds, compressor_from_config, compressor_to_config
from lightning_commopt.compressors.channel import AloneChannel
from lightning_commopt.compressors.hierarchical import Hierarchical
from lightning_commopt.compressors.sharded_hierarchical import ShardedHierarchical
from lightning_commopt.cost.gradient_times import work_clock
from lightning_commopt.cost.workload import Gradient
from lightning_commopt.measure.clock import Clock
from lightning_commopt.measure.plain import from_plain
from lightning_commopt.text.validation import warn_once

LARGE_BYTES = 2**24
"""Bytes of the larger of two kinds of scratch buckets: one of the pieces into which `in_pieces` cuts a bucket."""

ISSUE_S = 0.4e-3
"""Processor time of issuing a collective from a thread on CPU, which is Python with cold caches. Chosen on jobs of the
network lab, see ``docs/evidence/predict.md``."""

NUM_BUCKETS = 3
"""Scratch buckets of each size. Three large ones are 48 MiB, more than the caches of most processors, so none of them
is still in a cache when its turn comes."""

_Hook = TypeVar("_Hook")
_Cost = TypeVar("_Cost")

_LATE_STEP = 2**30
"""Number of the step in which compressors are measured, so late that one with a late start compresses, too."""


class Stage(NamedTuple):
    """Arithmetic, and the collective after it."""

    fixed_s: float  # the arithmetic that every bucket needs, and issuing the collective
    s_per_byte: float  # the arithmetic for a byte of gradients
    operation: str = ""  # the method of `Channel` that is called; empty after the last arithmetic
    share: float = 0.0  # bytes of the message over all that the bucket sends, in terms of an all-reduce


@dataclass(frozen=True, kw_only=True)
class CompressorCost:
    """What one bucket costs with a compressor."""

    compressor: Compressor | None  # the one that was measured
    stages: tuple[Stage, ...]  # what it does, in order

    def compute_s(self, gradient_bytes: float) -> float:
        """Returns the arithmetic of a bucket, all stages."""
        return sum(stage.fixed_s + stage.s_per_byte * gradient_bytes for stage in self.stages)

    def slower(self, factor: float) -> CompressorCost:
        """Returns the same on a processor that takes ``factor`` times as long."""
        stages = [
            stage._replace(fixed_s=factor * stage.fixed_s, s_per_byte=factor * stage.s_per_byte)
            for stage in self.stages
        ]
        return dataclasses.replace(self, stages=tuple(stages))

    def to_plain(self) -> dict[str, Any]:
        """Returns it in JSON types."""
        hook = None if self.compressor is None else compressor_to_config(self.compressor)
        return {"comm_hook": hook, "stages": [list(stage) for stage in self.stages]}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> CompressorCost:
        """Returns what `to_plain` gave."""
        return cls(
            compressor=compressor_from_config(plain["comm_hook"]),
            stages=tuple(from_plain(Stage, stage) for stage in plain["stages"]),
        )


def measure_costs(
    compressors: Iterable[Compressor | None], gradients: Sequence[Gradient], device: torch.device, num_ranks: int
) -> dict[Compressor | None, CompressorCost]:
    """Measures compressors one after another, in tens of milliseconds each and without communication.

    On CPU with one thread, processor time is measured, which other programs do not disturb. The larger scratch buckets
    have the shapes of the model's gradients as far as they fit. None stands for DDP's own average.

    Returns:
        The cost of each compressor that one rank can run alone, see `each_alone`.
    """
    clock = work_clock(device)
    layouts = (_layout([(256, 256)]), _layout(_shapes(gradients)))
    return each_alone(compressors, lambda compressor: _measure(compressor, layouts, clock, device, num_ranks))


def each_alone(compressors: Iterable[_Hook], measure: Callable[[_Hook], _Cost]) -> dict[_Hook, _Cost]:
    """Returns the result of ``measure`` for each compressor that one rank can run alone.

    Hierarchical compressors are left out. So is a user's own compressor that fails, with a warning.
    """
    costs = {}
    for compressor in compressors:
        if isinstance(compressor, Hierarchical | ShardedHierarchical):
            continue
        try:
            costs[compressor] = measure(compressor)
        except Exception as error:  # a user's own compressor must not end a fit that does not even use it
            warn_once(
                f"{compressor!r} failed on scratch gradients ({type(error).__name__}: {error}), so its arithmetic was"
                " not measured, and no plan with it is predicted."
            )
    return costs


def own_average() -> CompressorCost:
    """Returns the cost of DDP's own average: one all-reduce, whose arithmetic is usually a part of backward."""
    return CompressorCost(compressor=None, stages=(Stage(0.0, 0.0, "all_reduce", 1.0), Stage(0.0, 0.0)))


def _shapes(gradients: Sequence[Gradient]) -> list[tuple[int, ...]]:
    """Returns shapes of gradients that fill the larger bucket, in the order in which they have their places in buckets.

    A matrix behind a few biases begins anywhere in a cache line, which costs time.
    """
    shapes, free_numel = [], LARGE_BYTES // 4
    for gradient in gradients:
        numel = gradient.num_bytes // gradient.itemsize
        if 0 < numel <= free_numel:
            shapes.append(gradient.shape)
            free_numel -= numel
    return shapes if free_numel <= LARGE_BYTES // 8 else [*shapes, (free_numel // 1024, 1024)]


def _layout(shapes: Sequence[tuple[int, ...]]) -> Layout:
    return Layout.of([torch.empty(shape, device="meta") for shape in shapes], torch.float32)


def _measure(
    compressor: Compressor | None, layouts: Sequence[Layout], clock: Clock, device: torch.device, num_ranks: int
) -> CompressorCost:
    if compressor is None:
        return own_average()
    compressor.wire_bytes(layouts[0], num_ranks)  # if this fails, then here, and not in a later prediction
    buckets = [_ScratchBucket(compressor, layout, device, num_ranks) for _ in range(NUM_BUCKETS) for layout in layouts]
    with torch.no_grad():
        for _ in range(2):  # the first time does not count, as memory is allocated, and kernels are compiled
            times = time_rounds([bucket.rounds() for bucket in buckets], clock)
    small, large = (
        [median(stage) for stage in zip(*bucket_times, strict=True)] for bucket_times in (times[::2], times[1::2])
    )
    issued = buckets[1].channel.issued
    small_bytes, large_bytes = (layout.numel * layout.dtype.itemsize for layout in layouts)
    sent = sum(num_bytes if operation == "all_reduce" else num_bytes / 2 for operation, num_bytes in issued)
    stages = []
    for index, seconds in enumerate(large):
        operation, num_bytes = (*issued, ("", 0))[index]
        fixed_s, s_per_byte = 0.0, seconds / large_bytes
        if len(small) == len(large):  # else the small bucket is not compressed
            fixed_s, s_per_byte = line_through((small_bytes, large_bytes), (small[index], seconds))
        fixed_s += ISSUE_S if operation and device.type == "cpu" else 0.0
        stages.append(Stage(fixed_s, s_per_byte, operation, num_bytes / sent))
    return CompressorCost(compressor=compressor, stages=tuple(stages))


def line_through(x: tuple[float, float], y: tuple[float, float]) -> tuple[float, float]:
    """Returns the line through two points, neither of its numbers below 0.

    >>> line_through((1.0, 2.0), (1.0, 1.5)), line_through((1.0, 2.0), (4.0, 1.0)), line_through((1.0, 2.0), (1.0, 4.0))
    ((0.5, 0.5), (0.0, 0.5), (0.0, 2.0))
    """
    slope = (y[1] - y[0]) / (x[1] - x[0])
    start = y[0] - slope * x[0]
    return (start, slope) if start >= 0 and slope >= 0 else (0.0, y[1] / x[1])


class _ScratchBucket:
    """A bucket that no rank waits for."""

    def __init__(self, compressor: Compressor, layout: Layout, device: torch.device, num_ranks: int) -> None:
        self._compressor, self._layout = compressor, layout
        generator = torch.Generator(device).manual_seed(0)  # training's own generator must not advance
        self._flat = torch.randn(layout.numel, dtype=layout.dtype, device=device, generator=generator)
        self._state = compressor.init(layout, device, _LATE_STEP)
        self.channel = AloneChannel(num_ranks)

    def rounds(self) -> Rounds:
        """Returns the rounds of another step."""
        self.channel.issued.clear()
        return self._compressor.rounds(self._flat, self._layout, self._state, self.channel)


def time_rounds(buckets: Sequence[Rounds], clock: Clock) -> list[list[float]]:
    """Drives the rounds of some buckets to their end.

    They take turns, one round each, so that the caches hold other buckets' memory when a bucket's turn comes, as they
    hold that of backward in training.

    Returns:
        For each bucket the seconds before each collective and after the last one.
    """
    marks: list[list[tuple[Any, Any]]] = [[] for _ in buckets]
    arrived: dict[int, Any] = dict.fromkeys(range(len(buckets)))
    while arrived:
        for number, tensor in list(arrived.items()):
            pending, start = None, clock.mark()
            with suppress(StopIteration):
                pending = buckets[number].send(tensor)
            marks[number].append((start, clock.mark()))
            if pending is None:
                del arrived[number]
            else:
                arrived[number] = pending.wait()
    for spans in marks:
        clock.wait_for(spans[-1][1])
    return [[clock.seconds(end) - clock.seconds(start) for start, end in spans] for spans in marks]
