"""Link: latency, rate and spread, learned from steps or a probe, and the time of any collective that follows."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from lightning_commopt.text.validation import check_positive

PAYLOAD_SHARE = 1448 / 1514
"""Share of payload in the bytes on an Ethernet link, for TCP with timestamps in full frames of 1500 bytes."""

TYPICAL_HOP_S = 1e-4
"""Time of an empty message, for links whose steps do not show it. It is a judgement: a usual time for TCP between hosts
of a rack."""

_BUSY_CPU_S_PER_BYTE = 8e-10
"""Processor time of a byte of an all-reduce over gloo on a link that never lets it wait, about the least that a link of
10 Gbit/s shows: 0.65 to 0.83 ns per byte on a 2-core Xeon."""

_MAX_EXTRAPOLATION = 2.0
"""Multiple of the observed bytes up to which a link is used without further uncertainty. It is a judgement: half of the
time of the observed bytes may be latency, and then twice the bytes take 1.5 times as long instead of twice."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """The link between ranks, described by one message between two of them."""

    hop_s: float  # time of a message without content
    s_per_byte: float  # time of a byte of payload, in one direction
    cpu_s_per_byte: float = 0.0  # processor time that a rank spends on a byte of an all-reduce's payload
    cpu_s_per_message: float = 0.0  # further processor time of a collective of two ranks; times `num_wakes` for more
    low_ratio: float = 0.9  # 2.5th percentile of measured over expected times of all messages of a step
    high_ratio: float = 1.1  # 97.5th percentile
    seen_bytes: float | None = None  # payload of a step from which the rate was learned; None if it was probed
    has_trees: bool = False  # whether collectives may use trees, as NCCL's do, rather than rings only
    source: str = ""  # a description of what it was measured on

    def at_rate(self, bits_per_s: float) -> Link:
        """Returns the link with another rate, as far as the processor can keep up with it: at least the present rate.

        On a slow link, few bytes arrive each time that a thread wakes up for them. A faster link lets more of them
        arrive meanwhile, so a byte costs less processor time, but no less than `_BUSY_CPU_S_PER_BYTE`. It is expected
        to cost the geometric mean of a constant time and of one that is proportional to the time of a byte on the wire.

        Raises:
            ValueError: the rate is not above 0.
        """
        check_positive("bits_per_s", bits_per_s)
        wire_s = 8 / bits_per_s / PAYLOAD_SHARE
        busy_s = max(_BUSY_CPU_S_PER_BYTE, self.cpu_s_per_byte * math.sqrt(wire_s / max(self.s_per_byte, 1e-15)))
        cpu_s_per_byte = min(self.cpu_s_per_byte, busy_s)
        s_per_byte = max(wire_s, min(cpu_s_per_byte, self.s_per_byte))
        source = f"a rate of {bits_per_s / 1e9:g} Gbit/s"
        return dataclasses.replace(
            self, s_per_byte=s_per_byte, cpu_s_per_byte=cpu_s_per_byte, seen_bytes=None, source=source
        )

    def for_bytes(self, num_bytes: float) -> Link:
        """Returns the link for steps that send ``num_bytes``.

        Far more bytes than were observed may take proportionally more time, or, if the observed time was latency,
        hardly more. They are expected to take the geometric mean of the two, plus a constant, so that more bytes never
        take less time. The interval is from half the time of the observed bytes to the proportional time.
        """
        factor = num_bytes / self.seen_bytes if self.seen_bytes else 1.0
        if factor <= _MAX_EXTRAPOLATION:
            return self
        taken = math.sqrt(factor) + _MAX_EXTRAPOLATION - math.sqrt(_MAX_EXTRAPOLATION)
        return dataclasses.replace(
            self,
            s_per_byte=self.s_per_byte * taken / factor,
            cpu_s_per_byte=self.cpu_s_per_byte * _MAX_EXTRAPOLATION / factor,
            low_ratio=min(self.low_ratio, 1 / taken / 2),
            high_ratio=max(self.high_ratio, factor / taken),
        )

    def times(self, ratio: float) -> Link:
        """Returns a link on which every message takes ``ratio`` times as long."""
        return dataclasses.replace(self, hop_s=ratio * self.hop_s, s_per_byte=ratio * self.s_per_byte)

    def cpu_s(self, operation: str, num_bytes: float, num_ranks: int) -> float:
        """Returns the processor time of a rank in a collective over gloo; for the arguments see `time_s`."""
        halves = 1.0 if operation == "all_reduce" else 0.5
        return num_wakes(operation, num_ranks) * self.cpu_s_per_message + halves * num_bytes * self.cpu_s_per_byte

    def time_s(self, operation: str, num_bytes: float, num_ranks: int) -> float:
        """Returns how long a collective takes on an idle link.

        A ring for an all-reduce; the direct exchange of our `Channel` for its halves. NCCL takes a tree where that is
        faster, which needs twice the bytes of a large ring's link. ``num_bytes`` are of the whole message.
        """
        if num_ranks < 2:
            return 0.0
        share = (num_ranks - 1) / num_ranks
        if operation != "all_reduce":
            return self.hop_s + share * num_bytes * self.s_per_byte
        ring_s = 2 * (num_ranks - 1) * self.hop_s + 2 * share * num_bytes * self.s_per_byte
        if not self.has_trees:
            return ring_s
        return min(ring_s, 2 * math.ceil(math.log2(num_ranks)) * self.hop_s + 2 * num_bytes * self.s_per_byte)


def num_wakes(operation: str, num_ranks: int) -> float:
    """Returns how often a collective over gloo wakes the threads of a rank, over that with two ranks.

    A ring's hops come one after another; the messages of a direct exchange come together, and several are taken at
    once. Chosen on steps of four and eight ranks, see ``docs/evidence/predict.md``; nothing is known beyond.
    """
    doublings = math.log2(max(2, num_ranks))
    return 2 * doublings - 1 if operation == "all_reduce" else doublings
