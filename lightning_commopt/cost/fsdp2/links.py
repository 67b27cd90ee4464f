"""ShardLinks: how long the collectives of FSDP2 take, its own and the direct exchanges of compressed messages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from lightning_commopt.compressors.channel import Channel
from lightning_commopt.cost.link_probe import Collective, ProbedSize, probe_link
from lightning_commopt.measure.link.link import PAYLOAD_SHARE, num_wakes
from lightning_commopt.text.validation import check_positive

SEEN_RATIO = 1.05
"""A collective that the run has issued takes its time in training within this ratio: the median of many steps."""

UNSEEN_RATIO = 1.25
"""A collective that only the probe has issued takes its time in training within this ratio, beside what `Load` leaves
open. A judgement; see ``docs/evidence/predict.md`` for what came of it."""

MAX_STRETCH = 8.0
"""Maximum ratio of a collective's time in training to its time alone; what exceeds it is waiting for other ranks."""

GLOO_RATIOS = (1.35, 2.15, 1.1)
"""Time of a byte in gloo's all-gather, reduce-scatter and our exchange in training, over its time on a link that is
their limit. Measured at 100 Mbit/s, see ``docs/evidence/predict.md``. NCCL is assumed to take the time of the link."""


class Load(NamedTuple):
    """By how much longer collectives take in training than alone, as far as the run has issued them.

    Other threads on their cores may delay each message by a time, or in proportion to its duration.
    """

    ratios: dict[str, float]  # measured over probed time, by "all_gather", "reduce_scatter" and "exchange"
    ratio: float = 1.0  # the same of all of them
    mean_s: float = 0.0  # mean probed time of a collective
    delay_s: float = 0.0  # how much longer than in the probe all take at least; below 0 if all take less time


class Line(NamedTuple):
    """The time of one kind of collectives: a constant and a rate."""

    hop_s: float  # time of a message without content between two ranks
    s_per_byte: float  # time of a byte that crosses the link, in one direction
    cpu_s_per_message: float  # processor time of a rank's other threads for a collective, on CPU
    cpu_s_per_byte: float  # and for a byte that crosses the link
    is_ring: bool  # whether its hops come one after another

    @classmethod
    def of_probe(cls, sizes: Sequence[ProbedSize], num_ranks: int, *, is_ring: bool) -> Line:
        """Returns the line behind a probe: its latency from the smallest size, its rate from the largest."""
        small, large = sizes[0], sizes[-1]
        num_bytes = max(1, large.num_bytes - small.num_bytes) * (num_ranks - 1) / num_ranks
        latency_s = min(size.time_s for size in sizes)
        message_s = min(size.cpu_s for size in sizes)
        return cls(
            hop_s=latency_s / (num_ranks - 1 if is_ring else 1),
            s_per_byte=max(0.0, large.time_s - latency_s) / num_bytes,
            cpu_s_per_message=message_s / _wakes(num_ranks, is_ring),
            cpu_s_per_byte=max(0.0, large.cpu_s - message_s) / num_bytes,
            is_ring=is_ring,
        )

    def time_s(self, num_bytes: float, num_ranks: int) -> float:
        """Returns the time of a collective whose whole message has ``num_bytes``."""
        if num_ranks < 2 or not num_bytes:
            return 0.0
        num_hops = num_ranks - 1 if self.is_ring else 1
        return num_hops * self.hop_s + (num_ranks - 1) / num_ranks * num_bytes * self.s_per_byte

    def cpu_s(self, num_bytes: float, num_ranks: int) -> float:
        """Returns the processor time of a rank's other threads in it."""
        sent = (num_ranks - 1) / num_ranks * num_bytes
        return _wakes(num_ranks, self.is_ring) * self.cpu_s_per_message + sent * self.cpu_s_per_byte

    def times(self, ratio: float) -> Line:
        """Returns a line on which every collective takes ``ratio`` times as long."""
        return self._replace(hop_s=ratio * self.hop_s, s_per_byte=ratio * self.s_per_byte)

    def delayed(self, seconds: float) -> Line:
        """Returns a line on which every collective between two ranks takes ``seconds`` longer."""
        return self._replace(hop_s=max(0.0, self.hop_s + seconds))


def _wakes(num_ranks: int, is_ring: bool) -> float:
    return num_wakes("all_reduce" if is_ring else "all_to_all", num_ranks)


def _stretch(ratio: float) -> float:
    return min(max(ratio, 1 / MAX_STRETCH), MAX_STRETCH)


class Lines(NamedTuple):
    """The lines of all kinds of collectives that a plan may issue."""

    all_gather: Line  # FSDP2's own
    reduce_scatter: Line  # FSDP2's own
    exchange: Line  # a message to each other rank, as compressed gradients and parameters travel

    def own(self, operation: str) -> Line:
        """Returns the line of FSDP2's own "all_gather" or "reduce_scatter"."""
        return self.all_gather if operation == "all_gather" else self.reduce_scatter

    def at_rate(self, bits_per_s: float, *, over_gloo: bool) -> Lines:
        """Returns the same with another rate of each rank's link, as far as the processor keeps up with it.

        The processor keeps up with at least the present rate.

        Raises:
            ValueError: the rate is not above 0.
        """
        check_positive("bits_per_s", bits_per_s)
        wire_s = 8 / bits_per_s / PAYLOAD_SHARE

        def at(line: Line, ratio: float) -> Line:
            return line._replace(s_per_byte=max(ratio * wire_s, min(line.cpu_s_per_byte, line.s_per_byte)))

        return Lines(
            *(at(line, ratio) for line, ratio in zip(self, GLOO_RATIOS if over_gloo else (1, 1, 1), strict=True))
        )

    def in_training(self, load: Load, *, proportional: float = 0.5, unseen_ratio: float = 1.0) -> Lines:
        """Returns the same as it is in training.

        Args:
            load: what the run has shown.
            proportional: share of ``load.delay_s`` that is in proportion to the duration of a collective that the run
                has not issued, as is all that exceeds ``load.delay_s``; the rest is the same for each.
            unseen_ratio: a further factor of these.
        """
        delay_s = (1 - proportional) * load.delay_s
        ratio = _stretch(load.ratio - (delay_s / load.mean_s if load.mean_s else 0.0))

        def trained(kind: str, line: Line) -> Line:
            if kind in load.ratios:
                return line.times(_stretch(load.ratios[kind]))
            return line.times(unseen_ratio * ratio).delayed(delay_s)

        return Lines(*(trained(kind, line) for kind, line in zip(self._fields, self, strict=True)))


@dataclass(frozen=True, kw_only=True)
class ShardLinks:
    """The links of a run in training, and what they may be as well."""

    expected: Lines
    others: tuple[Lines, ...] = ()  # each with an error that is independent of the others'
    source: str = ""  # what was measured, as a part of a sentence

    def in_training(self, load: Load) -> ShardLinks:
        """Returns the same as it is in training, if it is as it was probed."""
        probed, expected = self.expected, self.expected.in_training(load)
        others = [probed.in_training(load, proportional=share) for share in (0.0, 1.0)]
        others += [probed.in_training(load, unseen_ratio=ratio) for ratio in (1 / UNSEEN_RATIO, UNSEEN_RATIO)]
        for kind in load.ratios:
            line = getattr(expected, kind)
            others += [expected._replace(**{kind: line.times(ratio)}) for ratio in (1 / SEEN_RATIO, SEEN_RATIO)]
        return ShardLinks(expected=expected, others=tuple(others), source=self.source)


def probe_shard_links(group: dist.ProcessGroup, device: torch.device, max_bytes: int) -> ShardLinks:
    """Probes all kinds of collectives, while nothing else is under way. All ranks of ``group`` must call it.

    ``max_bytes`` is the largest message, usually that of the largest unit; it is the same on all ranks.
    """
    num_ranks, channel = dist.get_world_size(group), Channel(group)

    def rows(message: torch.Tensor) -> torch.Tensor:
        if message.numel() < num_ranks:
            message = message.new_zeros(num_ranks)
        return message[: message.numel() // num_ranks * num_ranks].view(num_ranks, -1)

    def gather(message: torch.Tensor) -> None:
        dist.all_gather_into_tensor(rows(message).view(-1), rows(message)[0].clone(), group=group)

    def reduce(message: torch.Tensor) -> None:
        dist.reduce_scatter_tensor(torch.empty_like(rows(message)[0]), rows(message).view(-1), group=group)

    def exchange(message: torch.Tensor) -> None:
        channel.all_to_all(rows(message)).wait()

    def line(collective: Collective, *, is_ring: bool) -> tuple[Line, int]:
        sizes = probe_link(group, device, max_bytes, collective)
        return Line.of_probe(sizes, num_ranks, is_ring=is_ring), sizes[-1].num_bytes

    lines = [
        line(collective, is_ring=is_ring) for collective, is_ring in ((gather, True), (reduce, True), (exchange, False))
    ]
    largest = math.ceil(max(num_bytes for _, num_bytes in lines) / 1e4) / 1e2
    return ShardLinks(
        expected=Lines(*(line for line, _ in lines)),
        source=f"collectives of up to {largest:.3g} MB at the end of the fit",
    )
