"""StepStatistics: the same as numpy over all values, within bounded memory, and alike on all ranks."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from lightning_commopt.measure.statistics import QUANTITIES, TIMES
from lightning_commopt.metrics import StepStatistics

SINGLE = [
    "exposed_share",
    "overlapped_share",
    "gradient_bytes",
    "wire_bytes",
    "compression_ratio",
    "algorithm_bandwidth",
    "bus_bandwidth",
    "steps_per_s",
    "samples_per_s",
    "straggler_rank",
    "straggler_slowdown",
]
NAMES = [*(f"{name}{suffix}" for name in TIMES for suffix in ("", "_p50", "_p95", "_max")), *SINGLE]


Values = NDArray[np.float64]


def random_steps(world_size: int, num_steps: int, seed: int = 0) -> Values:
    """Makes steps in which every quantity is another one."""
    values = np.random.default_rng(seed).random((world_size, num_steps, len(QUANTITIES)))
    return values + np.arange(1, len(QUANTITIES) + 1)


def steps_of(world_size: int, num_steps: int, **quantities: float) -> Values:
    """Makes steps that are all alike, and 0 where nothing is given."""
    one = [quantities.get(name, 0.0) for name in QUANTITIES]
    return np.tile(one, (world_size, num_steps, 1))


def computed(*updates: Values, world_size: int | None = None) -> dict[str, float]:
    statistics = StepStatistics(world_size=world_size)
    for values in updates:
        statistics.update(values)
    return statistics.steps.statistics(world_size)


def column(values: Values, name: str) -> Values:
    if name in ("wait_s", "exposed_wait_s"):
        waited = column(values, "wire_s" if name == "wait_s" else "exposed_s")
        return waited - waited.min(axis=0)
    return values[:, :, QUANTITIES.index(name)]


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_times_over_steps_and_ranks(world_size: int) -> None:
    values = random_steps(world_size, 40)
    metrics = computed(values[:, :7], values[:, 7:7], values[:, 7:])
    for name in TIMES:
        expected = column(values, name)
        assert metrics[name] == pytest.approx(expected.mean())
        assert metrics[f"{name}_p50"] == np.quantile(expected, 0.5)
        assert metrics[f"{name}_p95"] == np.quantile(expected, 0.95)
        assert metrics[f"{name}_max"] == pytest.approx(expected.max())


def test_shares_bytes_and_rates() -> None:
    values = random_steps(4, 30)
    metrics = computed(values)
    total = {name: column(values, name).sum() for name in QUANTITIES}
    assert metrics["exposed_share"] == pytest.approx(total["exposed_s"] / total["step_s"])
    assert metrics["gradient_bytes"] == pytest.approx(total["gradient_bytes"] / 120)
    assert metrics["wire_bytes"] == pytest.approx(total["wire_bytes"] / 120)
    assert metrics["compression_ratio"] == pytest.approx(total["gradient_bytes"] / total["wire_bytes"])
    least_wire_s = column(values, "wire_s").min(axis=0).sum()
    assert metrics["algorithm_bandwidth"] == pytest.approx(total["wire_bytes"] / 4 / least_wire_s)
    assert metrics["bus_bandwidth"] == pytest.approx(1.5 * metrics["algorithm_bandwidth"])
    assert metrics["steps_per_s"] == pytest.approx(120 / total["step_s"])
    assert metrics["samples_per_s"] == pytest.approx(total["num_samples"] / (total["step_s"] / 4))


@pytest.mark.parametrize(("exposed_s", "share"), [(0.0, 1.0), (0.1, 0.75), (0.4, 0.0)])
def test_overlapped_share(exposed_s: float, share: float) -> None:
    metrics = computed(steps_of(2, 10, step_s=1.0, comm_s=0.4, exposed_s=exposed_s))
    assert metrics["overlapped_share"] == pytest.approx(share)


def test_a_step_worked_out_by_hand() -> None:
    """Rank 1 is 0.2 s late: rank 0 waits for it on the wire, in each of two steps, and all of that is exposed."""
    values = steps_of(
        2, 2, step_s=1.5, comm_s=0.5, exposed_s=0.4, wire_s=0.4, wire_bytes=8e6, gradient_bytes=16e6, num_samples=3
    )
    for name in ("comm_s", "exposed_s", "wire_s"):
        values[0, :, QUANTITIES.index(name)] += 0.2
    metrics = computed(values)
    assert metrics["wait_s"] == pytest.approx(0.1)
    assert metrics["wait_s_max"] == metrics["exposed_wait_s_max"] == pytest.approx(0.2)
    assert metrics["algorithm_bandwidth"] == metrics["bus_bandwidth"] == pytest.approx(20e6)
    assert metrics["compression_ratio"] == 2
    assert metrics["samples_per_s"] == pytest.approx(4)


def test_samples_that_no_batch_shows_are_not_a_number() -> None:
    """If it fails, a fit on graphs or nested batches is said to process 0 samples a second."""
    metrics = computed(steps_of(2, 3, step_s=0.5))
    assert math.isnan(metrics["samples_per_s"])
    assert metrics["steps_per_s"] == 2


def test_the_straggler_is_in_it() -> None:
    values = steps_of(4, 20, step_s=1.5, exposed_s=0.5, wire_s=0.5)
    values[:3, :, [QUANTITIES.index("exposed_s"), QUANTITIES.index("wire_s"), QUANTITIES.index("step_s")]] += 0.25
    metrics = computed(values)
    assert metrics["straggler_rank"] == 3
    assert metrics["straggler_slowdown"] == pytest.approx(0.25)
    assert computed(steps_of(4, 20, step_s=1.5, wire_s=0.5, exposed_s=0.5))["straggler_rank"] == -1


WITHOUT_COMMUNICATION: list[list[Values]] = [
    [],
    [np.empty((2, 0, len(QUANTITIES)))],
    [steps_of(2, 3, step_s=1.0, num_samples=2)],
    [steps_of(1, 3, step_s=1.0, num_samples=2)],
]


@pytest.mark.parametrize("updates", WITHOUT_COMMUNICATION)
def test_names_are_always_the_same(updates: list[Values]) -> None:
    """If it fails, a logger that fixes its columns in the first window loses the others."""
    metrics = computed(*updates)
    assert sorted(metrics) == sorted(NAMES)
    assert list(metrics) == list(computed(random_steps(2, 20)))
    for name in ("overlapped_share", "compression_ratio", "algorithm_bandwidth", "bus_bandwidth"):
        assert math.isnan(metrics[name])
    assert (metrics["straggler_rank"], metrics["straggler_slowdown"]) == (-1, 0)
    has_steps = bool(updates) and updates[0].shape[1] > 0
    assert all(math.isnan(metrics[name]) != has_steps for name in ("step_s", "step_s_p95", "step_s_max", "steps_per_s"))
    assert not has_steps or (metrics["exposed_share"], metrics["wire_bytes"], metrics["steps_per_s"]) == (0, 0, 1)


def test_memory_is_bounded_and_means_stay_exact() -> None:
    statistics = StepStatistics(max_sampled_values=2 * 500 * (len(QUANTITIES) + 2))
    all_values = [random_steps(2, 70, seed) for seed in range(100)]
    for values in all_values:
        statistics.update(values)
        assert sum(map(len, statistics.sample)) <= 500 * 65 / 64 + 70
        assert len(statistics.steps.values) <= 500
    metrics = statistics.steps.statistics()
    values = np.concatenate(all_values, axis=1)
    assert statistics.steps.num_steps == 7000
    assert metrics["step_s"] == pytest.approx(column(values, "step_s").mean())
    assert metrics["wait_s"] == pytest.approx(column(values, "wait_s").mean())
    assert metrics["step_s_max"] == column(values, "step_s").max()
    assert metrics["step_s_p50"] == pytest.approx(np.quantile(column(values, "step_s"), 0.5), abs=0.05)
    assert metrics["step_s_p95"] == pytest.approx(np.quantile(column(values, "step_s"), 0.95), abs=0.02)


def test_what_was_handed_in_is_left_alone() -> None:
    statistics = StepStatistics(max_sampled_values=1)
    values = random_steps(2, 64)
    before = values.copy()
    statistics.update(values)
    for seed in range(20):
        statistics.update(random_steps(2, 64, seed))
    assert np.array_equal(values, before)
    assert statistics.steps.values.shape[:2] == (64, 2), "the fewest that are kept, whole, with all ranks of a step"


def test_one_of_several_ranks_does_not_tell_what_it_waited_for() -> None:
    """If it fails, a fit that was interrupted shows 0 ms of waiting, and too many samples or too little bandwidth."""
    values = random_steps(1, 20)
    alone, of_four = computed(values), computed(values, world_size=4)
    for name in ("wait_s", "wait_s_p95", "exposed_wait_s"):
        assert alone[name] == 0
        assert math.isnan(of_four[name])
    assert alone["bus_bandwidth"] == 0
    assert of_four["bus_bandwidth"] == pytest.approx(1.5 * of_four["algorithm_bandwidth"])
    assert of_four["samples_per_s"] == pytest.approx(4 * alone["samples_per_s"])
    assert of_four["steps_per_s"] == alone["steps_per_s"]
    assert of_four["exposed_share"] == alone["exposed_share"]


@pytest.mark.parametrize("shape", [(2, len(QUANTITIES)), (2, 3, len(QUANTITIES) - 1), (0, 3, len(QUANTITIES))])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"values must be \(num_ranks, num_steps, 14\) .* got \(" + str(shape[0])):
        StepStatistics().update(np.zeros(shape))


def test_another_number_of_ranks_is_refused() -> None:
    statistics = StepStatistics()
    statistics.update(random_steps(2, 3))
    with pytest.raises(ValueError, match="steps must have 2 ranks, as in earlier updates, got 3"):
        statistics.update(random_steps(3, 3))


def test_the_bound_must_not_be_negative() -> None:
    with pytest.raises(ValueError, match="max_sampled_values must be an integer of at least 0, got -1"):
        StepStatistics(max_sampled_values=-1)
