"""The link behind training steps: how long messages took, and one `Link` fitted to them.

A message is a bucket. Its time is the time in which one of its collectives was on the wire and no collective of an
earlier bucket, on the rank where that time is shortest: the last rank that joins a collective waits for no other. gloo
sends two buckets of DDP's own all-reduce at the same time. They share the link, so that neither shows how fast it is;
then all buckets of a step count as one message. Times do not include compression, and bytes are those on the wire.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import median
from typing import NamedTuple

import numpy as np

from lightning_commopt.measure.link.link import TYPICAL_HOP_S, Link
from lightning_commopt.measure.median import CONFIDENCE, block_medians
from lightning_commopt.measure.record import StepRecord
from lightning_commopt.text.formatting import grouped

NUM_LAST_STEPS = 200
"""Number of last steps to which the link is fitted: enough for medians, few enough to follow changes of the link."""

MIN_TIMES = 3
"""Minimum number of times of a message size for that size to be used."""

NUM_MESSAGES = 8
"""Maximum number of buckets of a step that are used: enough sizes to fit a line, and few enough numbers to gather with
every step."""

NUM_TIMES = 2 + NUM_MESSAGES
"""Number of entries of `SentStep.times_s` for a step."""

SIZES_RATIO = 2
"""The largest message must be this many times the smallest to separate latency from bandwidth. With a ratio of 2 the
relative error of the bandwidth is at most sqrt(1 + 2**2) / (2 - 1) = 2.2 times the error of a time; it grows without
limit as the ratio approaches 1."""

_MAX_SHARED = 0.05
"""Buckets count as sent one after another if at most this share of their time on the wire belongs to two of them. It is
a judgement: times of messages are then wrong by about this share."""


class Message(NamedTuple):
    """A bucket, or all buckets of a step, as one message; see the module."""

    num_hops: int  # number of messages between two ranks that must follow each other
    wire_bytes: int  # payload, in units of an all-reduce
    time_s: float


class SentStep(NamedTuple):
    """The messages of a step: on one rank, or with the shortest times of all ranks."""

    whole: Message  # all buckets; its time is how long any of them was on the wire
    shared_s: float  # how long two buckets were on the wire at the same time
    buckets: tuple[Message, ...]  # at most `NUM_MESSAGES`, in the same order on all ranks

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Hops and bytes of each message, the whole first."""
        return [message[:2] for message in (self.whole, *self.buckets)]

    @property
    def times_s(self) -> list[float]:
        """All its times, `NUM_TIMES` numbers, padded with NaN."""
        times_s = [self.whole.time_s, self.shared_s, *(message.time_s for message in self.buckets)]
        return times_s + [math.nan] * (NUM_TIMES - len(times_s))

    def with_times(self, times_s: Sequence[float]) -> SentStep:
        """Returns the same step with other `times_s`."""
        whole_s, shared_s, *own_s = times_s
        buckets = (message._replace(time_s=time_s) for message, time_s in zip(self.buckets, own_s, strict=False))
        return SentStep(self.whole._replace(time_s=whole_s), shared_s, tuple(buckets))


def sent_step(record: StepRecord, num_ranks: int) -> SentStep:
    """Returns the messages of a step on one rank.

    It has no single buckets if two of them share a number, as in a static graph's first backward: their order may
    differ between ranks.
    """
    messages: dict[tuple[int, int], Message] = {}
    num_all_hops, durations_s, free_s = 0, 0.0, -math.inf
    for bucket in sorted(record.buckets, key=attrgetter("end_s")):
        time_s, own_end_s = 0.0, -math.inf
        for start_s, end_s in bucket.wire:
            # Comparisons are faster than max(), and this runs for every bucket while training waits.
            begin_s = start_s if start_s > own_end_s else own_end_s
            if end_s > begin_s:
                durations_s += end_s - begin_s
                time_s += 0.0 if end_s < free_s else end_s - (begin_s if begin_s > free_s else free_s)
                own_end_s = end_s
        # One collective is a ring; several are direct exchanges, of one hop each.
        num_hops = 2 * (num_ranks - 1) if len(bucket.wire) <= 1 else len(bucket.wire)
        messages[bucket.backward, bucket.index] = Message(num_hops, bucket.wire_bytes, time_s)
        num_all_hops += num_hops
        free_s = max(free_s, own_end_s)
    totals = record.totals
    is_ordered = len(messages) == len(record.buckets)
    ordered = [messages[key] for key in sorted(messages)] if is_ordered else []
    return SentStep(
        whole=Message(num_all_hops, totals.wire_bytes, totals.wire_s),
        shared_s=durations_s - totals.wire_s,
        buckets=tuple(spread_sizes(ordered, NUM_MESSAGES)),
    )


def spread_sizes(messages: Sequence[Message], num_messages: int) -> list[Message]:
    """Returns at most ``num_messages``, from the smallest to the largest, spread evenly over the order of sizes.

    The choice depends on sizes alone, which all ranks have in the same order.

    >>> [message.wire_bytes for message in spread_sizes([Message(2, size, 0.1) for size in (5, 9, 3, 7, 1)], 3)]
    [1, 5, 9]
    """
    if len(messages) <= num_messages:
        return list(messages)
    ordered = sorted(range(len(messages)), key=lambda index: (messages[index].wire_bytes, index))
    return [messages[ordered[number * (len(ordered) - 1) // (num_messages - 1)]] for number in range(num_messages)]


def sent_steps(ranks: Sequence[Sequence[StepRecord]], num_ranks: int) -> list[SentStep]:
    """Returns the same steps of some ranks with their least times; steps that differ between ranks are left out."""
    steps = []
    for records in zip(*ranks, strict=False):
        own, *others = [sent_step(record, num_ranks) for record in records]
        if all(other.sizes == own.sizes for other in others):
            steps.append(own.with_times(np.min([step.times_s for step in (own, *others)], axis=0).tolist()))
    return steps


@dataclass(frozen=True, kw_only=True)
class LinkFit:
    """A link, and what its messages show about it."""

    link: Link
    sizes_bytes: tuple[int, ...]  # sizes of the messages, ascending
    # Time of the smallest message; NaN, as is the bandwidth, where sizes do not separate the two.
    latency_s: float
    bandwidth: float  # bus bandwidth, bytes per second
    takes_turns: bool  # whether messages are single buckets and not whole steps


def fit_link(
    steps: Sequence[SentStep], num_ranks: int, *, hop_s: float | None = None, has_trees: bool = False
) -> LinkFit | None:
    """Fits a link to messages; None if no size was measured `MIN_TIMES` times.

    The line of least squares of relative errors through the median time of each size gives latency and rate. Where
    sizes, or noise, do not separate the two, the latency is `TYPICAL_HOP_S` for each hop, half of the time at most.

    Args:
        steps: the steps, with the least times of all ranks.
        num_ranks: ranks in the run.
        hop_s: time of a hop if it is known, so that only the rate is fitted: such that all messages take their time.
        has_trees: see `Link`. If so, buckets take turns even where their times overlap, as on NCCL's streams.
    """
    shares = [step.shared_s / step.whole.time_s for step in steps if step.whole.time_s > 0]
    takes_turns = has_trees or (bool(shares) and median(shares) <= _MAX_SHARED)
    messages_of = [
        [message for message in (step.buckets if takes_turns else (step.whole,)) if message.time_s > 0]
        for step in steps
        if step.whole.wire_bytes > 0
    ]
    times_of = grouped((message[:2], message.time_s) for messages in messages_of for message in messages)
    known = {size: times_s for size, times_s in sorted(times_of.items()) if len(times_s) >= MIN_TIMES}
    if not known:
        return None
    line = _fit_line(known) if hop_s is None else _line_with(hop_s, known)
    ratios = sorted(block_medians([line.ratio(messages) for messages in messages_of if messages]))
    tail = int((1 - CONFIDENCE) / 2 * len(ratios))
    sizes_bytes = sorted({num_bytes for _, num_bytes in known})
    size_range = " to ".join(f"{size / 1e6:.3g}" for size in sorted({sizes_bytes[0], sizes_bytes[-1]}))
    link = Link(
        hop_s=line.hop_s,
        s_per_byte=line.s_per_byte * num_ranks / (2 * (num_ranks - 1)),
        low_ratio=min(1.0, ratios[tail]),
        high_ratio=max(1.0, ratios[-1 - tail]),
        seen_bytes=median(step.whole.wire_bytes for step in steps if step.whole.wire_bytes > 0),
        has_trees=has_trees,
        source=f"{sum(map(len, known.values()))} times of {size_range} MB on the wire in the run",
    )
    return LinkFit(
        link=link,
        sizes_bytes=tuple(sizes_bytes),
        latency_s=min(num_hops for num_hops, _ in known) * line.hop_s if line.is_separated else math.nan,
        bandwidth=1 / link.s_per_byte if line.is_separated else math.nan,
        takes_turns=takes_turns,
    )


class _Line(NamedTuple):
    hop_s: float
    s_per_byte: float
    is_separated: bool

    def ratio(self, messages: Sequence[Message]) -> float:
        """Returns the measured over the expected time of the messages of a step."""
        expected_s = sum(message.num_hops * self.hop_s + message.wire_bytes * self.s_per_byte for message in messages)
        return sum(message.time_s for message in messages) / expected_s


Times = Mapping[tuple[int, int], Sequence[float]]
"""The times of messages by their numbers of hops and bytes."""


def _fit_line(times_of: Times) -> _Line:
    """Returns latency and rate, see `fit_link`."""
    sizes = np.array(list(times_of), dtype=np.float64)
    bytes_per_hop = sizes[:, 1] / sizes[:, 0]
    if bytes_per_hop.max() >= SIZES_RATIO * bytes_per_hop.min():
        medians_s = np.array([median(times_s) for times_s in times_of.values()])
        weights = np.sqrt([len(times_s) for times_s in times_of.values()])
        relative = sizes * (weights / medians_s)[:, None]
        hop_s, s_per_byte = np.linalg.lstsq(relative, weights, rcond=None)[0].tolist()
        if hop_s < 0:
            hop_s, s_per_byte = 0.0, float(relative[:, 1] @ weights / (relative[:, 1] @ relative[:, 1]))
        # A smaller one would mean that latency, or noise, makes up most of the times.
        if s_per_byte > medians_s.sum() / sizes[:, 1].sum() / 2:
            return _Line(hop_s, s_per_byte, True)
    return _line_with(TYPICAL_HOP_S, times_of)


def _line_with(hop_s: float, times_of: Times) -> _Line:
    """Returns the rate at which all messages take their time, with ``hop_s`` for each hop, or half of the time."""
    counted = [(len(times_s), *size, median(times_s)) for size, times_s in times_of.items()]
    all_s = sum(num * time_s for num, _, _, time_s in counted)
    num_hops = sum(num * hops for num, hops, _, _ in counted)
    num_bytes = sum(num * size for num, _, size, _ in counted)
    hop_s = min(hop_s, all_s / num_hops / 2)
    return _Line(hop_s, (all_s - num_hops * hop_s) / num_bytes, False)
