"""The simulation against backwards that can be worked out by hand."""

import pytest

from lightning_commopt.cost.shared_core import WAKE_S
from lightning_commopt.cost.simulate import Job, Phase, simulate


def computes(seconds: float) -> Phase:
    return Phase(False, seconds, 1.0)


def sends(seconds: float, cpu_share: float = 0.0) -> Phase:
    return Phase(True, seconds, cpu_share)


def test_the_example_of_step_record() -> None:
    """Two buckets, ready at 3 and 5 s, of 3 s each: the second waits for the first, and 4 s are exposed."""
    outcome = simulate([Job(0, 3.0, (sends(3),)), Job(1, 5.0, (sends(3),))], 5.0)
    assert outcome.ends_s == pytest.approx((6.0, 9.0))
    assert (outcome.backward_s, outcome.end_s) == pytest.approx((5.0, 9.0))


def test_a_thread_does_one_bucket_after_another_and_streams_do_two() -> None:
    """If it fails, compression on CPU counts as overlapped, or on CUDA as not."""
    jobs = [Job(index, 0.0, (computes(1), sends(2), computes(1))) for index in range(2)]
    assert simulate(jobs, 0.0).ends_s == pytest.approx((4.0, 8.0))
    # Both compress at once, the second is on the wire from 3 to 5 s.
    assert simulate(jobs, 0.0, overlaps_buckets=True).ends_s == pytest.approx((4.0, 6.0))


def test_pieces_of_a_bucket_overlap() -> None:
    """Two pieces on one thread: the second is computed from 1 to 2 s, and on the wire from 3 to 5 s."""
    pieces = [Job(0, 0.0, (computes(1), sends(2), computes(1)))] * 2
    assert simulate(pieces, 0.0).ends_s == pytest.approx((6.0,))


def test_two_that_compute_on_one_core_take_twice_as_long() -> None:
    """Backward has done 1 s of its 4 s when the bucket is ready; then both take turns for 2 s."""
    outcome = simulate([Job(0, 1.0, (computes(1),))], 4.0, shares_core=True)
    assert outcome.ends_s == pytest.approx((3.0,))
    assert outcome.backward_s == pytest.approx(5.0)
    assert simulate([Job(0, 1.0, (computes(1),))], 4.0).backward_s == pytest.approx(4.0)


def test_a_link_takes_what_it_needs_of_a_core() -> None:
    """A message needs a quarter of the core for 4 s: backward does 3 s of work meanwhile, and 1 s afterwards."""
    outcome = simulate([Job(0, 0.0, (sends(4, 0.25),))], 4.0, shares_core=True)
    assert outcome.ends_s == pytest.approx((4.0,))
    assert outcome.backward_s == pytest.approx(5.0)


def test_a_link_that_needs_a_whole_core_is_slowed_down() -> None:
    """If it fails, an unlimited link costs backward nothing."""
    outcome = simulate([Job(0, 0.0, (sends(1, 1.0),))], 4.0, shares_core=True)
    assert outcome.ends_s == pytest.approx((2.0,))
    assert outcome.backward_s == pytest.approx(5.0)


def test_a_bucket_is_ready_when_backward_has_ended_at_the_latest() -> None:
    """If it fails, a prediction waits in vain for a bucket of a rank whose backward is slower than the median."""
    outcome = simulate([Job(0, 1.0, (sends(1),)), Job(1, 3.0, (sends(1),))], 2.5)
    assert outcome.ends_s == pytest.approx((2.0, 3.5))


def test_nothing_to_send_and_nothing_to_compute() -> None:
    assert simulate([], 2.0).end_s == pytest.approx(2.0)
    assert simulate([Job(0, 0.0, (sends(1),))], 0.0).end_s == pytest.approx(1.0)


def test_messages_wait_for_a_busy_core() -> None:
    """If it fails, small messages cost nothing beside other programs, and beside backward on its core."""
    small = [Job(0, 0.0, (sends(0.0),))]
    assert simulate(small, 1.0).ends_s == pytest.approx((0.0,))
    assert simulate(small, 1.0, num_others=2.0).ends_s == pytest.approx((2 * WAKE_S,))
    assert simulate(small, 1.0, num_others=2.0, shares_core=True).ends_s == pytest.approx((3 * WAKE_S,))
    assert simulate([Job(0, 0.0, (sends(0.5),))], 1.0, num_others=2.0).ends_s == pytest.approx((0.5,))


def test_messages_that_share_a_link() -> None:
    """Both begin at once, and take twice as long until the shorter one has ended."""
    both = [Job(0, 0.0, (sends(1),)), Job(1, 0.0, (sends(3),))]
    assert simulate(both, 0.0, overlaps_buckets=True, shares_link=True).ends_s == pytest.approx((2.0, 4.0))
    assert simulate(both, 0.0, overlaps_buckets=True).ends_s == pytest.approx((1.0, 4.0))


def test_a_thread_that_waits_for_its_turn_takes_no_processor_time() -> None:
    tiny = [Job(0, 0.0, (sends(1e-6, 1.0),))]
    outcome = simulate(tiny, 1.0, shares_core=True)
    assert outcome.ends_s == pytest.approx((WAKE_S,), rel=1e-2)
    assert outcome.backward_s == pytest.approx(1.0 + 1e-6)
