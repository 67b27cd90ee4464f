"""Bandwidths are nccl-tests': a wrong factor makes every comparison with a link's rate wrong."""

from collections.abc import Callable

import pytest

from lightning_commopt.measure.bandwidth import COLLECTIVES, algorithm_bandwidth, bus_bandwidth, bus_factor

FACTORS: dict[str, dict[int, float]] = {
    "all_reduce": {1: 0, 2: 1, 4: 1.5, 8: 1.75, 32: 1.9375},
    "reduce_scatter": {1: 0, 2: 0.5, 4: 0.75, 8: 0.875, 32: 0.96875},
    "all_gather": {1: 0, 2: 0.5, 4: 0.75, 8: 0.875, 32: 0.96875},
    "all_to_all": {1: 0, 2: 0.5, 4: 0.75, 8: 0.875, 32: 0.96875},
    "broadcast": {1: 1, 2: 1, 4: 1, 8: 1, 32: 1},
    "reduce": {1: 1, 2: 1, 4: 1, 8: 1, 32: 1},
    "send_recv": {1: 1, 2: 1, 4: 1, 8: 1, 32: 1},
}


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("world_size", [1, 2, 4, 8, 32])
def test_factors(collective: str, world_size: int) -> None:
    factor = FACTORS[collective][world_size]
    assert bus_factor(collective, world_size) == factor
    assert bus_bandwidth(collective, 3e9, world_size) == 3e9 * factor


def test_every_collective_is_here() -> None:
    assert set(COLLECTIVES) == set(FACTORS)


def test_a_row_of_nccl_tests() -> None:
    """all_reduce_perf on 2 ranks: 8 MiB in 453.2 us are 18.51 GB/s, on the bus as well."""
    bandwidth = algorithm_bandwidth(8 * 2**20, 453.2e-6)
    assert bandwidth == pytest.approx(18.51e9, rel=1e-3)
    assert bus_bandwidth("all_reduce", bandwidth, 2) == bandwidth


def test_parts_of_an_all_reduce_have_its_bus_bandwidth() -> None:
    """A ring all-reduce is a reduce-scatter and an all-gather, each in half of the time."""
    whole = bus_bandwidth("all_reduce", algorithm_bandwidth(1e9, 0.2), 8)
    part = bus_bandwidth("reduce_scatter", algorithm_bandwidth(1e9, 0.1), 8)
    assert whole == pytest.approx(part)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bus_factor("gather", 2), "collective must be one of 'all_reduce', .*, got 'gather'"),
        (lambda: bus_bandwidth("allreduce", 1.0, 2), "one of 'all_reduce', .*'send_recv', got 'allreduce'"),
        (lambda: bus_factor("all_reduce", 0), "world_size must be at least 1, got 0"),
        (lambda: algorithm_bandwidth(1, 0.0), "seconds must be above 0, got 0.0"),
        (lambda: algorithm_bandwidth(1, float("nan")), "seconds must be above 0, got nan"),
        (lambda: algorithm_bandwidth(-1, 1.0), "num_bytes must be at least 0, got -1"),
    ],
)
def test_errors_name_the_value(call: Callable[[], float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
