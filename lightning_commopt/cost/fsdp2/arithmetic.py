"""The arithmetic of compressed shards on this device, measured on scratch units without other ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from statistics import median
from typing import NamedTuple

import torch

from lightning_commopt.compressors import Rounds, ShardedCompressor
from lightning_commopt.compressors.catalog import ready_shards, recommended
from lightning_commopt.compressors.channel import AloneChannel
from lightning_commopt.compressors.kernels import blockwise
from lightning_commopt.cost.compressor_cost import (
    ISSUE_S,
    LARGE_BYTES,
    NUM_BUCKETS,
    each_alone,
    line_through,
    time_rounds,
)
from lightning_commopt.cost.fsdp2.workload import AS_INT8
from lightning_commopt.cost.gradient_times import work_clock

_SMALL_NUMEL = 2**16
"""Elements of the smaller kind of scratch units: 256 KiB of float32, as for the buckets of DDP."""


class ShardCost(NamedTuple):
    """What one unit costs: before its message is sent, and when those of the other ranks have arrived."""

    before_s: float
    before_s_per_byte: float  # seconds for a byte of the uncompressed matrices
    after_s: float
    after_s_per_byte: float

    def times_s(self, matrix_bytes: float) -> tuple[float, float]:
        """Returns the arithmetic before and after the message of a unit."""
        return (
            self.before_s + self.before_s_per_byte * matrix_bytes,
            self.after_s + self.after_s_per_byte * matrix_bytes,
        )

    def slower(self, factor: float) -> ShardCost:
        """Returns the same on a processor that takes ``factor`` times as long."""
        return ShardCost(*(factor * seconds for seconds in self))


ShardCosts = dict[ShardedCompressor, ShardCost]


def predicted_shards() -> list[ShardedCompressor | None]:
    """Returns no compressor, those that are recommended, the most exact first, and each with error feedback."""
    hooks: list[ShardedCompressor | None] = [None]
    ready = ready_shards()
    for compressor in (ready[name] for name in recommended() if name in ready):
        hooks.append(compressor)
        if hasattr(compressor, "error_feedback"):
            hooks.append(dataclasses.replace(compressor, error_feedback=True))  # type: ignore[type-var]
    return hooks


def measure_shard_costs(
    compressors: Iterable[ShardedCompressor], largest_bytes: int, device: torch.device, num_ranks: int
) -> ShardCosts:
    """Measures compressors one after another, as `measure_costs` does, for units of ``largest_bytes`` at most."""

    def measure(compressor: ShardedCompressor) -> ShardCost:
        return _measure(lambda numel: _reduce(compressor, numel, num_ranks, device), largest_bytes, device)

    return each_alone(compressors, measure)


def measure_gather_cost(largest_bytes: int, device: torch.device, num_ranks: int) -> ShardCost:
    """Measures ``param_hook="int8"``, for a byte of the parameters of all shards."""
    return _measure(lambda numel: _gather(numel, num_ranks, device), largest_bytes, device)


Scratch = Callable[[], Rounds]
"""Returns the rounds of another step of a scratch unit."""


def _measure(make: Callable[[int], Scratch], largest_bytes: int, device: torch.device) -> ShardCost:
    clock = work_clock(device)
    numels = (_SMALL_NUMEL, max(4 * _SMALL_NUMEL, min(LARGE_BYTES, largest_bytes) // 4))
    units = [make(numel) for _ in range(NUM_BUCKETS) for numel in numels]
    with torch.no_grad():
        for _ in range(2):  # the first time does not count, as memory is allocated, and kernels are compiled
            times = time_rounds([rounds() for rounds in units], clock)
    # The medians over units of the arithmetic before the only collective, and after it.
    small, large = ([median(stage) for stage in zip(*same, strict=True)] for same in (times[::2], times[1::2]))
    before, after = (line_through((4.0 * numels[0], 4.0 * numels[1]), pair) for pair in zip(small, large, strict=True))
    issue_s = ISSUE_S if device.type == "cpu" else 0.0
    return ShardCost(before[0] + issue_s, before[1], *after)


def _reduce(compressor: ShardedCompressor, numel: int, num_ranks: int, device: torch.device) -> Scratch:
    columns = _noise(numel - numel % num_ranks, device).view(num_ranks, -1)
    mean = torch.empty_like(columns[0])
    state = compressor.init(columns.shape[1], num_ranks, device)
    channel = AloneChannel(num_ranks)
    return lambda: compressor.rounds([columns], [mean], state, channel)


def _gather(numel: int, num_ranks: int, device: torch.device) -> Scratch:
    shard, block_format = _noise(numel // num_ranks, device), AS_INT8.block_format
    channel = AloneChannel(num_ranks)
    decoded = torch.empty(num_ranks * block_format.shard_numel(shard.numel(), 1), device=device)
    message = torch.empty(1, block_format.shard_bytes(shard.numel(), 1), dtype=torch.uint8, device=device)

    def rounds() -> Rounds:
        blockwise.encode(shard, None, message, block_format)
        gathered = yield channel.all_gather(message.view(-1))
        blockwise.decode(gathered, decoded, block_format)
        decoded.clone()  # This stands for the copy of the rows to where FSDP2 wants them.

    return rounds


def _noise(numel: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(0)  # training's own must not notice
    return torch.randn(numel, device=device, generator=generator)
