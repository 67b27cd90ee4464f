import random

import pytest

from lightning_commopt.measure.median import median_of


@pytest.mark.parametrize("num_values", [2, 3, 4, 5])
def test_the_interval_of_few_values_is_their_range(num_values: int) -> None:
    assert median_of(range(num_values)) == ((num_values - 1) / 2, 0, num_values - 1)


@pytest.mark.parametrize("num_values", [6, 7, 8, 12, 20, 51])
def test_the_interval_holds_the_median_in_95_per_cent_of_all_samples(num_values: int) -> None:
    """If it fails, intervals are narrower than they say, or wider than they need be."""
    source = random.Random(num_values)
    samples = [median_of([source.gauss(0, 1) for _ in range(num_values)]) for _ in range(4000)]
    assert sum(sample.low <= 0 <= sample.high for sample in samples) / 4000 == pytest.approx(0.95, abs=0.01)
