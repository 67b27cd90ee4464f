"""LinkTracker finds the latency and the bandwidth that made the marks of ranks, however they wait for each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from lightning_commopt.measure.link.from_steps import NUM_MESSAGES, LinkTracker, bucket_times, spread_sizes
from lightning_commopt.measure.record import StepRecord
from support.simulated_link import LATENCY_S, S_PER_BYTE, records_of_ranks

SIZES = (25_000_000, 1_000_000, 3_000_000)


def _tracker(world_size: int = 2) -> LinkTracker:
    return LinkTracker(Path("runs/first"), {"world_size": world_size, "backend": "gloo"})


def _refresh(tracker: LinkTracker, records: Sequence[Sequence[StepRecord]], comm_hook: str = "none") -> None:
    """Does what the ranks do at the end of a window; the tracker is the first rank's."""
    others = [_tracker().rows(of_rank, comm_hook) for of_rank in records[1:]]
    tracker.update(np.array([tracker.rows(records[0], comm_hook), *others]))


@pytest.mark.parametrize(("num_ranks", "bus_factor"), [(2, 1), (3, 4 / 3)])
def test_latency_and_bandwidth_are_found_while_ranks_wait_for_each_other(num_ranks: int, bus_factor: float) -> None:
    """If it fails, the model counts what ranks, or buckets, wait for each other."""
    tracker = _tracker(num_ranks)
    _refresh(tracker, records_of_ranks(20, SIZES, num_ranks))
    assert tracker.metrics == {
        "link_latency_s": pytest.approx(LATENCY_S),
        "link_bandwidth": pytest.approx(bus_factor / S_PER_BYTE),
    }
    assert tracker.why_unknown == ""
    assert tracker.model is not None
    assert tracker.model.where == {
        "run": "first", "world_size": num_ranks, "backend": "gloo", "comm_hook": "none", "last_step": 19,
    }  # fmt: skip
    prediction = tracker.model.predict("all_reduce", 10_000_000, load="compute")
    assert prediction.time_s == pytest.approx(LATENCY_S + 10_000_000 * S_PER_BYTE)


def test_the_last_200_steps_count() -> None:
    """If it fails, the model does not follow the link, or grows with the run."""
    tracker = _tracker()
    for latency_s in (5 * LATENCY_S, LATENCY_S):
        records = records_of_ranks(200, SIZES, latency_s=latency_s)
        for start in range(0, 200, 50):
            _refresh(tracker, [of_rank[start : start + 50] for of_rank in records])
        assert tracker.metrics["link_latency_s"] == pytest.approx(latency_s)
        assert tracker.model is not None


def test_of_many_buckets_a_few_of_all_sizes_count() -> None:
    """If it fails, the ranks' message grows with the model, or misses the sizes that tell latency from bandwidth."""
    sizes = [25_000_000 + 1000 * index for index in range(100)]
    sizes[0], sizes[77] = 40_000_000, 1_000_000
    records = records_of_ranks(5, sizes)
    chosen = [message.size_bytes for message in spread_sizes(bucket_times(records[0][0]), NUM_MESSAGES)]
    assert len(set(chosen)) == NUM_MESSAGES
    assert (min(chosen), max(chosen)) == (1_000_000, 40_000_000)
    tracker = _tracker()
    _refresh(tracker, records)
    assert tracker.metrics["link_latency_s"] == pytest.approx(LATENCY_S)
    assert tracker.model is not None
    assert [spread.size_bytes for spread in tracker.model.curves[0].spreads] == sorted(chosen)


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
        assert tracker.model is None
        assert all(map(math.isnan, tracker.metrics.values()))
        assert tracker.why_unknown == ""
    for sizes, shown in (((1_000_000, 1_900_000), "1.00 MB to 1.90 MB"), ((1_000_000,), "the same size")):
        close = _tracker()
        _refresh(close, records_of_ranks(5, sizes))
        assert close.model is not None
        assert all(map(math.isnan, close.metrics.values()))
        assert f"as the buckets have {shown}: the largest must be twice" in close.why_unknown


def test_another_comm_hook_begins_anew() -> None:
    """If it fails, a plan that changes in a fit gets the times of the one before."""
    tracker, records = _tracker(), records_of_ranks(20, SIZES)
    _refresh(tracker, records)
    _refresh(tracker, records_of_ranks(20, SIZES, latency_s=0.5), "int8")  # some of these steps may be without it
    assert tracker.model is None
    _refresh(tracker, records, "int8")
    assert tracker.metrics["link_latency_s"] == pytest.approx(LATENCY_S)
    assert tracker.model is not None
    assert tracker.model.where["comm_hook"] == "int8"
    assert tracker.model.predict("int8", 1_000_000).time_s == pytest.approx(LATENCY_S + 1_000_000 * S_PER_BYTE)


def test_buckets_with_one_number_do_not_count() -> None:
    """If it fails, a static graph's first backward pairs buckets of different sizes on two ranks."""
    (record, *_), _ = records_of_ranks(1, SIZES)
    same = [type(bucket)(**{**vars(bucket), "index": 0}) for bucket in record.buckets]
    assert bucket_times(StepRecord(step=0, num_samples=1, phases=record.phases, buckets=tuple(same))) == []
