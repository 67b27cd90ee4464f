"""One definition of the exposed share: if these fail, two places of one report show two numbers."""

import math

import pytest

from lightning_commopt.measure.statistics import exposed_share, step_parts

RUNS = [
    {"step_s": 0.100, "comm_s": 0.060, "exposed_s": 0.020},
    {"step_s": 0.180, "comm_s": 0.070, "exposed_s": 0.027},
    {"step_s": 0.110, "comm_s": 0.055, "exposed_s": 0.033},
]


def test_of_several_runs_it_is_the_median_of_their_shares() -> None:
    """The ratio of the medians would be 0.245."""
    assert exposed_share(RUNS) == pytest.approx(0.2)


@pytest.mark.parametrize("num_runs", [1, 2, 3])
def test_the_parts_add_up_to_the_median_step(num_runs: int) -> None:
    runs = RUNS[:num_runs]
    parts = step_parts(runs)
    step_s = sum(parts)
    assert step_s == pytest.approx([0.1, 0.14, 0.11][num_runs - 1])
    assert parts[2] / step_s == pytest.approx(exposed_share(runs))
    assert min(parts) >= 0


@pytest.mark.parametrize(
    "runs", [[], [{"step_s": 0.0, "comm_s": 0.0, "exposed_s": 0.0}], [dict.fromkeys(RUNS[0], math.nan)]]
)
def test_without_steps_it_is_unknown(runs: list[dict[str, float]]) -> None:
    assert math.isnan(exposed_share(runs))
    assert all(map(math.isnan, step_parts(runs)))
