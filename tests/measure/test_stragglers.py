"""The rank that the others wait for is named, and no other: over simulated clusters, and in cases made by hand."""

import numpy as np
import pytest
from numpy.typing import NDArray
from simulated_steps import Cluster, simulate

from lightning_commopt.measure.statistics import MIN_STEPS, find_straggler
from support.cross_section import sampled

NUM_WINDOWS = 200


def false_alarms(cluster: Cluster, num_steps: int, seed: int = 0) -> int:
    quiet = simulate(cluster, NUM_WINDOWS, num_steps, np.random.default_rng(seed))
    return sum(find_straggler(**quiet.window(index, num_steps)) is not None for index in range(NUM_WINDOWS))


def named_right_and_wrong(cluster: Cluster, num_steps: int, seed: int = 0) -> tuple[int, int]:
    """Sleeps a fifth of a quiet step in every step of one rank."""
    rng = np.random.default_rng(seed)
    step_s = float(np.median(simulate(cluster, 20, 20, rng).step_s))
    slow = rng.integers(cluster.world_size, size=NUM_WINDOWS)
    windows = simulate(cluster, NUM_WINDOWS, num_steps, rng, slow=slow, sleep=0.2 * step_s)
    found = [find_straggler(**windows.window(index, num_steps)) for index in range(NUM_WINDOWS)]
    named = [(straggler.rank, rank) for straggler, rank in zip(found, slow, strict=True) if straggler is not None]
    num_right = sum(rank == slow_rank for rank, slow_rank in named)
    return num_right, len(named) - num_right


@pytest.mark.parametrize("transfer", [0.05, 0.5, 2.0])
@pytest.mark.parametrize("world_size", sampled([2, 4, 8], by_default=[4]))
@pytest.mark.parametrize(("num_steps", "num_buckets", "jitter"), [(10, 5, 0.03), (20, 20, 0.05), (50, 1, 0.08)])
def test_the_slow_rank_is_named(
    num_steps: int, num_buckets: int, jitter: float, world_size: int, transfer: float
) -> None:
    cluster = Cluster(world_size=world_size, num_buckets=num_buckets, transfer=transfer, jitter=jitter, asymmetry=0.03)
    num_right, num_wrong = named_right_and_wrong(cluster, num_steps)
    assert num_right >= 0.99 * NUM_WINDOWS
    assert num_wrong == 0
    assert false_alarms(cluster, num_steps) == 0


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_what_heavy_noise_costs(world_size: int) -> None:
    """If it fails, the figures in the docstring are not true any more."""
    cluster = Cluster(world_size=world_size, jitter=0.1, asymmetry=0.03)
    num_right, num_wrong = named_right_and_wrong(cluster, 10)
    assert num_right >= 0.83 * NUM_WINDOWS
    assert num_wrong == 0
    assert false_alarms(cluster, 10) <= 0.05 * NUM_WINDOWS


@pytest.mark.parametrize("world_size", [2, 8])
@pytest.mark.parametrize("num_buckets", [1, 20])
def test_spikes_are_no_straggler(world_size: int, num_buckets: int) -> None:
    """One step in eight of every rank takes up to four times as long."""
    cluster = Cluster(world_size=world_size, num_buckets=num_buckets, transfer=0.1, jitter=0.03, spikes=0.125)
    assert false_alarms(cluster, 50) == 0


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("num_buckets", [1, 20])
def test_a_small_asymmetry_is_no_straggler(world_size: int, num_buckets: int) -> None:
    """With many buckets it keeps the others on the wire for far longer than it costs."""
    cluster = Cluster(
        world_size=world_size, num_buckets=num_buckets, transfer=0.05, jitter=0.01, spikes=0, asymmetry=0.06
    )
    assert false_alarms(cluster, 50) == 0


def test_a_delay_that_the_link_hides_is_no_straggler() -> None:
    """A rank is slow in backward, but the link has had its first buckets and is behind: nobody waits for it."""
    cluster = Cluster(world_size=4, num_buckets=20, transfer=2.0, jitter=0.01, spikes=0)
    rng = np.random.default_rng(0)
    slow = rng.integers(4, size=20)
    quiet = simulate(cluster, 20, 50, rng)
    delayed = simulate(cluster, 20, 50, rng, slow=slow, sleep=0.4, in_backward=True)
    assert np.median(delayed.step_s) < 1.02 * np.median(quiet.step_s)
    assert all(find_straggler(**delayed.window(index, 50)) is None for index in range(20))


@pytest.mark.parametrize(
    ("num_buckets", "transfer", "in_backward"),
    [(1, 0.05, False), (1, 2.0, False), (20, 0.05, False), (20, 2.0, False), (1, 2.0, True), (20, 0.05, True)],
)
def test_the_slowdown_is_what_the_rank_computes_longer(num_buckets: int, transfer: float, in_backward: bool) -> None:
    cluster = Cluster(world_size=4, num_buckets=num_buckets, transfer=transfer, jitter=0.02)
    rng = np.random.default_rng(0)
    windows = simulate(cluster, 20, 50, rng, slow=np.full(20, 2), sleep=0.4, in_backward=in_backward)
    for index in range(20):
        straggler = find_straggler(**windows.window(index, 50))
        assert straggler is not None
        assert straggler.rank == 2
        assert straggler.slowdown == pytest.approx(0.4, abs=0.03)


def by_hand(waits: list[list[float]]) -> dict[str, NDArray[np.float64]]:
    """Makes steps of one second of computation, with waits of each rank (outer) in each step."""
    wire_s = np.array(waits) + 0.1
    return {"wire_s": wire_s, "step_s": wire_s + 1, "exposed_s": wire_s}


def test_the_one_with_the_least_wire_time_is_named() -> None:
    found = find_straggler(**by_hand([[0.3] * 10, [0.0] * 10, [0.3] * 10]))
    assert found is not None
    assert found.rank == 1
    assert found.slowdown == pytest.approx(0.3)


def test_three_steps_of_four_are_needed() -> None:
    late, on_time = [0.3, 0.0], [0.0, 0.0]
    for num_late, is_named in ((15, True), (14, False)):
        columns = [late] * num_late + [on_time] * (20 - num_late)
        found = find_straggler(**by_hand([list(rank) for rank in zip(*columns, strict=True)]))
        assert (found is not None) == is_named
        if found is not None:
            assert found.rank == 1


def test_two_ranks_that_take_turns() -> None:
    assert find_straggler(**by_hand([[0.3, 0.0] * 10, [0.0, 0.3] * 10])) is None


def test_one_of_two_slow_ranks_is_named() -> None:
    found = find_straggler(**by_hand([[0.3] * 20, [0.3] * 20, [0.0, 0.01] * 10, [0.01, 0.0] * 10]))
    assert found is not None
    assert found.rank in (2, 3)
    assert found.slowdown == pytest.approx(0.3, abs=0.01)


@pytest.mark.parametrize("waits", [[[0.3] * 20], [[0.3] * (MIN_STEPS - 1), [0.0] * (MIN_STEPS - 1)], [[], []]])
def test_one_rank_or_few_steps(waits: list[list[float]]) -> None:
    assert find_straggler(**by_hand(waits)) is None


def test_no_communication() -> None:
    nothing = np.zeros((4, 20))
    assert find_straggler(wire_s=nothing, step_s=nothing + 1, exposed_s=nothing) is None
    assert find_straggler(wire_s=nothing, step_s=nothing, exposed_s=nothing) is None
