"""ShardLinks: how long the collectives of FSDP2 take, its own and the direct exchanges of compressed messages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
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
"""A collective that only the probe has issued takes its time in training within this ratio. A judgement; see
``docs/evidence/predict.md`` for what came of it."""

_MAX_STRETCH = 8.0
"""Collectives are not believed to take more times as long in training as alone; the rest is waiting for other ranks."""


class Line(NamedTuple):
    """The time of one kind of collectives: a constant and a rate."""

    hop_s: float  # time of a message without content between two ranks
    s_per_byte: float  # time of a byte that crosses the link, in one direction
    cpu_s_per_message: float  # processor time of a rank's other threads for a collective, on CPU
    cpu_s_per_byte: float  # and for a byte that crosses the link
    is_ring: bool  # whether its hops come one after another
    low_ratio: float = 1 / UNSEEN_RATIO  # with `high_ratio` the interval of its time in training
    high_ratio: float = UNSEEN_RATIO

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
        """Returns the same where every collective takes ``ratio`` times as long."""
        return self._replace(hop_s=ratio * self.hop_s, s_per_byte=ratio * self.s_per_byte)

    def in_training(self, stretch: float | None, usual: float) -> Line:
        """Returns the same as it is in training.

        Args:
            stretch: measured over probed time of those that the run has issued; None if it has issued none.
            usual: the same of whatever the run has issued.
        """
        if stretch is not None:
            line = self.times(min(max(stretch, 1 / _MAX_STRETCH), _MAX_STRETCH))
            return line._replace(low_ratio=1 / SEEN_RATIO, high_ratio=SEEN_RATIO)
        usual = min(max(usual, 1 / _MAX_STRETCH), _MAX_STRETCH)
        # What has stretched others may leave this one alone.
        ratios = (1 / UNSEEN_RATIO, UNSEEN_RATIO, 1 / usual)
        return self.times(usual)._replace(low_ratio=min(ratios), high_ratio=max(ratios))


def _wakes(num_ranks: int, is_ring: bool) -> float:
    return num_wakes("all_reduce" if is_ring else "all_to_all", num_ranks)


@dataclass(frozen=True, kw_only=True)
class ShardLinks:
    """The lines of all kinds of collectives that a plan may issue."""

    gather: Line  # FSDP2's own all-gather
    reduce: Line  # FSDP2's own reduce-scatter
    exchange: Line  # a message to each other rank, as compressed gradients and parameters travel
    source: str = ""  # what was measured, in words

    def at_rate(self, bits_per_s: float) -> ShardLinks:
        """Returns the same with another rate of each rank's link, as far as the processor keeps up with it.

        FSDP2's own collectives take as many times as long as an exchange of the same bytes as they do now.

        Raises:
            ValueError: the rate is not above 0.
        """
        check_positive("bits_per_s", bits_per_s)
        s_per_byte = max(8 / bits_per_s / PAYLOAD_SHARE, self.exchange.cpu_s_per_byte)

        def at(line: Line) -> Line:
            now_s = max(self.exchange.s_per_byte, 1e-15)
            return line._replace(s_per_byte=max(s_per_byte * line.s_per_byte / now_s, line.cpu_s_per_byte))

        return ShardLinks(
            gather=at(self.gather),
            reduce=at(self.reduce),
            exchange=self.exchange._replace(s_per_byte=s_per_byte),
            source=f"a rate of {bits_per_s / 1e9:g} Gbit/s",
        )

    def in_training(self, stretches: Mapping[str, float]) -> ShardLinks:
        """Returns the same as it is in training; see `Line.in_training`.

        Args:
            stretches: for "all_gather" and "reduce_scatter" as far as the run has issued FSDP2's own, for "exchange",
                and "" for all of them.
        """
        usual = stretches.get("", 1.0)
        return dataclasses.replace(
            self,
            gather=self.gather.in_training(stretches.get("all_gather"), usual),
            reduce=self.reduce.in_training(stretches.get("reduce_scatter"), usual),
            exchange=self.exchange.in_training(stretches.get("exchange"), usual),
        )

    def own(self, operation: str) -> Line:
        """Returns the line of FSDP2's own "all_gather" or "reduce_scatter"."""
        return self.gather if operation == "all_gather" else self.reduce

    def variants(self) -> list[ShardLinks]:
        """Returns what the links may be as well: one kind of collectives at one end of its interval."""
        names = ("gather", "reduce", "exchange")
        return [
            dataclasses.replace(self, **{name: line.times(ratio)})
            for name, line in ((name, getattr(self, name)) for name in names)
            for ratio in (line.low_ratio, line.high_ratio)
        ]


def probe_shard_links(group: dist.ProcessGroup, device: torch.device, max_bytes: int) -> ShardLinks:
    """Probes all kinds of collectives, while nothing else is under way. All ranks of ``group`` must call it.

    Args:
        group: the ranks that have shards.
        device: the device of the gradients.
        max_bytes: the largest message, usually that of the largest unit; the same on all ranks.
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
        gather=lines[0][0],
        reduce=lines[1][0],
        exchange=lines[2][0],
        source=f"collectives of up to {largest:.3g} MB at the end of the fit",
    )
