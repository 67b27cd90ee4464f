"""StepRecord: what is derived from a step's phases and buckets, and that JSON brings back what it was made of."""

import itertools
import json
import random
from dataclasses import replace

import pytest

from lightning_commopt.measure.record import PHASES, BucketSpan, Collective, Phase, StepRecord, covered_s


def bucket(
    ready: float, start: float, end: float, *wire: tuple[float, float], index: int = 0, backward: int = 0
) -> BucketSpan:
    return BucketSpan(
        index=index,
        backward=backward,
        gradient_bytes=400,
        wire_bytes=200,
        ready_s=ready,
        start_s=start,
        end_s=end,
        wire=wire,
    )


def step(*buckets: BucketSpan, phases: tuple[Phase, ...] = (Phase("backward", 0.0, 10.0),)) -> StepRecord:
    return StepRecord(step=7, num_samples=32, phases=phases, buckets=buckets)


TWO_BACKWARDS = step(
    bucket(1.5, 1.5, 2.0, (1.6, 1.9)),
    bucket(2.0, 2.0, 2.75, (2.25, 2.5), (2.5, 2.75), index=1),
    bucket(4.5, 4.5, 5.0, (4.5, 5.0), backward=1),
    bucket(5.0, 5.125, 6.0, (5.25, 6.0), index=1, backward=1),
    phases=(
        Phase("data", 0.0, 0.5),
        Phase("forward", 0.5, 1.0),
        Phase("backward", 1.0, 3.0),
        Phase("data", 3.0, 3.25),
        Phase("forward", 3.25, 4.0),
        Phase("backward", 4.0, 6.0),
        Phase("optimizer", 6.5, 7.0),
        Phase("other", 7.0, 7.5),
    ),
)


def test_several_backwards_in_one_step() -> None:
    """Each backward waits for its own last bucket; what validation takes in between is no part of the step."""
    assert TWO_BACKWARDS.totals.exposed_s == 0.75 + 1.0
    assert TWO_BACKWARDS.totals.comm_s == 1.25 + 0.5 + 1.0
    assert TWO_BACKWARDS.totals.queue_s == pytest.approx(0.125)
    assert TWO_BACKWARDS.totals.wire_s == pytest.approx(0.3 + 0.5 + 0.5 + 0.75)
    assert TWO_BACKWARDS.totals.compression_s == pytest.approx(2.625 - 2.05)
    assert TWO_BACKWARDS.totals.overlapped_share == pytest.approx(1 - 1.75 / 2.75)
    assert (TWO_BACKWARDS.start_s, TWO_BACKWARDS.end_s, TWO_BACKWARDS.totals.step_s) == (0.0, 7.5, 7.0)
    seconds = [getattr(TWO_BACKWARDS.totals, f"{name}_s") for name in PHASES]
    assert seconds == [0.75, 1.25, 4.0, 0.5, 0.5]
    assert (TWO_BACKWARDS.totals.gradient_bytes, TWO_BACKWARDS.totals.wire_bytes) == (1600, 800)


def test_exposed_ends_with_the_last_bucket_that_ends() -> None:
    """Buckets may overtake each other: what counts is the last one to be ready, and the last one to end."""
    assert step(bucket(1, 1, 9), bucket(4, 4, 6, index=1)).totals.exposed_s == 5
    assert step(bucket(4, 4, 6), bucket(1, 1, 9, index=1)).totals.exposed_s == 5


def test_a_bucket_that_waits_for_its_turn_is_communication() -> None:
    """If it fails, the exposed time is longer than the communication that it is a part of."""
    totals = step(bucket(1, 3, 4, (3, 4))).totals
    assert (totals.comm_s, totals.queue_s, totals.compression_s, totals.wire_s) == (3, 2, 0, 1)
    assert (totals.exposed_s, totals.overlapped_share) == (3, 0)


def test_no_part_is_more_than_its_whole() -> None:
    """Random buckets in several backwards: communication is the sum of its parts, and exposed time is in it."""
    rng = random.Random(0)
    for _ in range(500):
        buckets, began = [], 0.0
        for backward in range(rng.randrange(1, 4)):
            for index in range(rng.randrange(1, 6)):
                marks = sorted(began + rng.random() for _ in range(6))
                wire = (marks[2], marks[3]), (marks[3], marks[4])
                buckets.append(bucket(marks[0], marks[1], marks[5], *wire, index=index, backward=backward))
            began += 1
        totals = step(*buckets).totals
        assert totals.queue_s + totals.compression_s + totals.wire_s == pytest.approx(totals.comm_s)
        assert 0 <= totals.exposed_s <= totals.comm_s
        assert min(totals.queue_s, totals.compression_s) >= 0


def test_without_buckets() -> None:
    totals = step().totals
    assert totals.comm_s == totals.wire_s == totals.compression_s == totals.exposed_s == 0
    assert totals.overlapped_share is None
    assert totals.gradient_bytes == totals.wire_bytes == 0


COLLECTIVES = (
    Collective("broadcast", "data", "lightning", 8, 0.5, 0.75),
    Collective("reduce_scatter", "backward", "", 2400, None, None),
)


@pytest.mark.parametrize(
    "record", [TWO_BACKWARDS, step(), step(bucket(1, 2, 3)), replace(TWO_BACKWARDS, collectives=COLLECTIVES)]
)
def test_json_brings_it_back(record: StepRecord) -> None:
    back = StepRecord.from_dict(json.loads(record.to_json()))
    assert back == record
    assert back.to_json() == record.to_json()


def test_json_keeps_a_tenth_of_a_microsecond() -> None:
    late = 86_400.123_456_789
    record = step(bucket(late, late, late + 1e-6), phases=(Phase("backward", late, late + 1),))
    back = StepRecord.from_dict(json.loads(record.to_json()))
    assert back.buckets[0].ready_s == pytest.approx(late, abs=1e-7)
    assert back.buckets[0].end_s - back.buckets[0].ready_s == pytest.approx(1e-6, abs=2e-7)


@pytest.mark.parametrize(("missing", "error"), [("phases", KeyError), ("step", KeyError)])
def test_what_is_missing_is_an_error(missing: str, error: type[Exception]) -> None:
    values = json.loads(TWO_BACKWARDS.to_json())
    del values[missing]
    with pytest.raises(error, match=missing):
        StepRecord.from_dict(values)


def test_covered_time_against_brute_force() -> None:
    """Counts the unit cells that any of some random intervals covers, empty and touching ones included."""
    rng = random.Random(0)
    for _ in range(500):
        intervals = []
        for _ in range(rng.randrange(8)):
            start = rng.randrange(20)
            intervals.append((start, start + rng.randrange(6)))
        cells = {cell for start, end in intervals for cell in range(start, end)}
        assert covered_s(intervals) == len(cells)
        assert covered_s(iter(intervals)) == len(cells)


def test_compression_is_never_negative() -> None:
    """The wire is a part of communication, and rounding must not make it more."""
    rng = random.Random(0)
    for _ in range(500):
        marks = sorted(10 ** rng.uniform(-3, 0) for _ in range(4))
        wire = itertools.pairwise(marks)
        record = step(bucket(marks[0], marks[0], marks[-1], *wire))
        assert record.totals.compression_s >= 0
        assert json.loads(record.to_json())["compression_s"] == 0
        assert '"compression_s":-' not in record.to_json()
