"""The link that made the marks of ranks is found, however they wait for each other; nothing else is claimed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from lightning_commopt.measure.link.from_steps import (
    NUM_MESSAGES,
    Message,
    SentStep,
    fit_link,
    sent_step,
    sent_steps,
)
from lightning_commopt.measure.link.tracker import LinkTracker
from lightning_commopt.measure.record import StepRecord
from support.simulated_link import LATENCY_S, S_PER_BYTE, records_of_ranks

SIZES = (25_000_000, 1_000_000, 3_000_000)


def _tracker(world_size: int = 2) -> LinkTracker:
    """Returns a tracker that lets buckets take turns, as they do on the simulated link."""
    return LinkTracker(world_size, has_trees=True)


def _refresh(tracker: LinkTracker, records: Sequence[Sequence[StepRecord]], comm_hook: str = "none") -> None:
    """Does what the ranks do at the end of a window; the tracker is the first rank's."""
    others = [_tracker(len(records)).rows(of_rank, comm_hook) for of_rank in records[1:]]
    tracker.update(np.array([tracker.rows(records[0], comm_hook), *others]))


@pytest.mark.parametrize(("num_ranks", "bus_factor"), [(2, 1), (3, 4 / 3)])
def test_latency_and_bandwidth_are_found_while_ranks_wait_for_each_other(num_ranks: int, bus_factor: float) -> None:
    """If it fails, the link's time includes what ranks, or buckets, wait for each other."""
    tracker = _tracker(num_ranks)
    _refresh(tracker, records_of_ranks(20, SIZES, num_ranks))
    assert tracker.metrics == {
        "link_latency_s": pytest.approx(LATENCY_S),
        "link_bandwidth": pytest.approx(bus_factor / S_PER_BYTE),
    }
    assert tracker.why_unknown == ""
    assert tracker.fit is not None
    link = tracker.fit.link
    assert link.time_s("all_reduce", 10**7, num_ranks) == pytest.approx(LATENCY_S + 10**7 * S_PER_BYTE)
    assert (link.low_ratio, link.high_ratio, link.seen_bytes) == pytest.approx((1, 1, sum(SIZES)))
    of_records = fit_link(sent_steps(records_of_ranks(20, SIZES, num_ranks), num_ranks), num_ranks, has_trees=True)
    assert of_records == tracker.fit


def test_the_last_200_steps_count() -> None:
    """If it fails, the link is not followed, or the times grow with the run."""
    tracker = _tracker()
    for latency_s in (5 * LATENCY_S, LATENCY_S):
        records = records_of_ranks(200, SIZES, latency_s=latency_s)
        for start in range(0, 200, 50):
            _refresh(tracker, [of_rank[start : start + 50] for of_rank in records])
        assert tracker.metrics["link_latency_s"] == pytest.approx(latency_s)


def test_of_many_buckets_a_few_of_all_sizes_count() -> None:
    """If it fails, the ranks' message grows with the model, or misses the sizes that tell latency from bandwidth."""
    sizes = [25_000_000 + 1000 * index for index in range(100)]
    sizes[0], sizes[77] = 40_000_000, 1_000_000
    records = records_of_ranks(5, sizes)
    chosen = {message.wire_bytes for message in sent_step(records[0][0], 2).buckets}
    assert len(chosen) == NUM_MESSAGES
    assert (min(chosen), max(chosen)) == (1_000_000, 40_000_000)
    tracker = _tracker()
    _refresh(tracker, records)
    assert tracker.metrics["link_latency_s"] == pytest.approx(LATENCY_S)
    assert tracker.fit is not None
    assert tracker.fit.sizes_bytes == tuple(sorted(chosen))
    assert tracker.fit.link.seen_bytes == sum(sizes)


def test_compression_is_no_part_of_the_link() -> None:
    """If it fails, the rate of a compressed run is that of its compressor."""
    records = records_of_ranks(20, SIZES, gap_s=1.0)
    compressed = [
        [
            replace(
                step,
                buckets=tuple(
                    replace(bucket, gradient_bytes=4 * bucket.wire_bytes, end_s=bucket.end_s + 0.1)
                    for bucket in step.buckets
                ),
            )
            for step in of_rank
        ]
        for of_rank in records
    ]
    assert sent_steps(compressed, 2) == sent_steps(records, 2)


def test_what_cannot_be_told_is_not_said() -> None:
    """If it fails, waiting for a slow rank looks like a slow link, or two equal buckets tell a latency."""
    records = records_of_ranks(5, SIZES)
    alone = _tracker()
    _refresh(alone, records[:1])
    few = _tracker()
    _refresh(few, [of_rank[:2] for of_rank in records])
    one = _tracker(world_size=1)
    _refresh(one, records_of_ranks(5, ())[:1])
    for tracker in (alone, few, one):
        assert tracker.fit is None
        assert all(map(math.isnan, tracker.metrics.values()))
        assert tracker.why_unknown == ""
    for sizes, shown in (((1_000_000, 1_900_000), "1.00 MB to 1.90 MB"), ((1_000_000,), "the same size")):
        close = _tracker()
        _refresh(close, records_of_ranks(5, sizes))
        assert close.fit is not None
        assert all(map(math.isnan, close.metrics.values()))
        assert f"because the buckets have {shown}: the largest must be twice" in close.why_unknown


def test_with_a_known_latency_messages_take_their_time() -> None:
    """If it fails, a run with a probe of its link is predicted with a rate that its messages did not have."""
    steps = [SentStep(Message(4, 5_000_000, 0.6), 0.0, (Message(2, 1_000_000, 0.2), Message(2, 4_000_000, 0.4)))] * 5
    fit = fit_link(steps, 2, hop_s=1e-3)
    assert fit is not None
    assert fit.link.hop_s == 1e-3
    assert 1 / fit.link.s_per_byte == pytest.approx(5_000_000 / (0.6 - 4e-3))
    fit = fit_link(steps, 2, hop_s=1.0)
    assert fit is not None
    assert (4 * fit.link.hop_s, 5_000_000 * fit.link.s_per_byte) == pytest.approx((0.3, 0.3)), "half of it at most"


def test_the_spread_is_that_of_steps() -> None:
    """If it fails, intervals of predictions grow with how differently single buckets are disturbed."""

    def step(factor: float) -> SentStep:
        small, large = Message(2, 1_000_000, 0.2 * factor), Message(2, 4_000_000, 0.3 * factor)
        return SentStep(Message(4, 5_000_000, 0.5 * factor), 0.0, (small, large))

    fit = fit_link([step(factor) for factor in (0.8, 1.0, 1.3) for _ in range(10)], 2, hop_s=0.0)
    assert fit is not None
    assert (fit.link.low_ratio, fit.link.high_ratio) == pytest.approx((0.8, 1.3))


def test_buckets_that_share_the_link_count_as_one() -> None:
    """If it fails, a bucket that others slow down is taken for a slow link, as with the two threads of gloo."""
    # Both are on the wire from the start: each has half of the link until the smaller one has arrived.
    small, large = (Message(2, size, 2 * 10_000_000 * S_PER_BYTE) for size in (10_000_000, 30_000_000))
    whole = Message(4, 40_000_000, 40_000_000 * S_PER_BYTE)
    shared = [SentStep(whole, small.time_s, (small, large))] * 5
    fit = fit_link(shared, 2)
    assert fit is not None
    assert not fit.takes_turns
    assert 1 / fit.link.s_per_byte == pytest.approx(1 / S_PER_BYTE, rel=0.01)
    assert math.isnan(fit.latency_s)
    assert math.isnan(fit.bandwidth)
    tracker = LinkTracker(2)
    tracker.fit = fit
    assert "share the link" in tracker.why_unknown


def test_a_small_message_that_takes_as_long_as_a_large_one_is_noise() -> None:
    """If it fails, one late bucket makes a link of any rate."""
    buckets = (Message(2, 1_000_000, 0.5), Message(2, 4_000_000, 0.55))
    fit = fit_link([SentStep(Message(4, 5_000_000, 1.05), 0.0, buckets)] * 5, 2)
    assert fit is not None
    assert math.isnan(fit.latency_s)
    assert fit.link.time_s("all_reduce", 5_000_000, 2) == pytest.approx(1.05, rel=0.01)


def test_another_comm_hook_begins_anew() -> None:
    """If it fails, a plan that changes in a fit gets the times of the one before."""
    tracker, records = _tracker(), records_of_ranks(20, SIZES)
    _refresh(tracker, records)
    _refresh(tracker, records_of_ranks(20, SIZES, latency_s=0.5), "int8")  # some of these steps may be without it
    assert tracker.fit is None
    _refresh(tracker, records, "int8")
    assert tracker.metrics["link_latency_s"] == pytest.approx(LATENCY_S)


def test_buckets_with_one_number_do_not_count() -> None:
    """If it fails, a static graph's first backward pairs buckets of different sizes on two ranks."""
    (record, *_), _ = records_of_ranks(1, SIZES)
    same = tuple(replace(bucket, index=0) for bucket in record.buckets)
    assert sent_step(replace(record, buckets=same), 2).buckets == ()
