"""How often settings are said to differ from the baseline, where they do and where they do not."""

import random
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest

from lightning_commopt.report.build import build_report
from lightning_commopt.report.simultaneous import differences_that_hold
from support.sample_runs import save_rates


class _Run(NamedTuple):
    """What is compared of a `Run`."""

    repetition_key: object
    throughput: float


class _Setting(NamedTuple):
    """What is compared of a `Setting`."""

    name: str
    runs: list[_Run]


def _sweep(
    source: random.Random, num_repetitions: int, speedups: Mapping[str, float], *, is_paired: bool = True
) -> list[Any]:
    """Returns settings whose runs vary by 1 %, "noisy" by 30 %, on a machine that drifts by 3 % between repetitions."""
    drifts = [source.gauss(1, 0.03 if is_paired else 0) for _ in range(num_repetitions)]
    settings = []
    for name, speedup in speedups.items():
        noise = [source.gauss(1, 0.3 if name == "noisy" else 0.01) for _ in drifts]
        rates = [speedup * drift * factor for drift, factor in zip(drifts, noise, strict=True)]
        settings.append(_Setting(name, [_Run(at if is_paired else (name, at), rate) for at, rate in enumerate(rates)]))
    return settings


def _shares(num_sweeps: int, *arguments: Any, **options: Any) -> tuple[float, float]:
    """Returns in how many sweeps a difference of some setting "same ..." holds, and in how many that of "better"."""
    source = random.Random(0)
    holding = []
    for _ in range(num_sweeps):
        settings = _sweep(source, *arguments, **options)
        holding.append(differences_that_hold(settings, settings[0]))
    num_wrong = sum(any(name.startswith("same") for name in names) for names in holding)
    return num_wrong / num_sweeps, sum("better" in names for names in holding) / num_sweeps


SAME = {f"same {number}": 1.0 for number in range(11)}


@pytest.mark.parametrize(
    ("num_repetitions", "is_paired"),
    [(3, True), *[pytest.param(*case, marks=pytest.mark.exhaustive) for case in ((8, True), (3, False), (8, False))]],
)
def test_of_many_equal_settings_one_is_seldom_called_faster(num_repetitions, is_paired):
    """If it fails, a third of the sweeps of eleven settings praises one that brings nothing."""
    wrong, _ = _shares(30, num_repetitions, {"none": 1.0, **SAME}, is_paired=is_paired)
    assert wrong <= 0.08


@pytest.mark.parametrize("is_paired", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_a_tenth_is_seen_among_many_in_three_repetitions(is_paired):
    """Noise of three repetitions alone would show it in half of all sweeps."""
    assert _shares(20, 3, {"none": 1.0, "better": 1.1, **SAME}, is_paired=is_paired)[1] >= 0.95


def test_one_noisy_setting_hides_no_other():
    assert _shares(20, 5, {"none": 1.0, "better": 1.1, "noisy": 1.0, "same": 1.0})[1] >= 0.95


def test_a_single_comparison_is_not_corrected():
    (baseline, other) = _sweep(random.Random(0), 8, {"none": 1.0, "same": 1.0})
    assert differences_that_hold([baseline, other], baseline) == {"same"}


def test_settings_without_noise_differ_where_they_do():
    rates = {"none": 1.0, "same": 1.0, "better": 1.1}
    settings: list[Any] = [_Setting(name, [_Run(at, rate) for at in range(3)]) for name, rate in rates.items()]
    assert differences_that_hold(settings, settings[0]) == {"better"}


def test_runs_that_share_a_repetition_with_some_settings_only_count():
    """ "better" shares no repetition with the baseline, and "single" has one run."""
    rates: dict[str, dict[int, float]] = {
        "none": {0: 1.0, 1: 1.01, 2: 0.99},
        "better": {3: 1.3, 4: 1.31, 5: 1.29},
        "same": {3: 1.0, 4: 1.01, 5: 0.99, 0: 1.01},
        "single": {0: 2.0},
    }
    settings: list[Any] = [_Setting(name, [_Run(*run) for run in runs.items()]) for name, runs in rates.items()]
    assert differences_that_hold(settings, settings[0]) == {"better"}


def test_the_report_is_uncertain_of_what_stands_out_among_many(tmp_path):
    """Compared alone, "bf16" would be faster."""
    rates: dict[str, list[float]] = {
        "none": [100, 101, 99],
        "bf16": [100.8, 102.2, 99.9],
        "int8": [100.5, 99, 100],
        "powersgd": [98, 102, 100],
    }
    (group,) = build_report([save_rates(tmp_path / "many", rates)]).groups
    assert {setting.name: setting.difference for setting in group.settings}["bf16"] == "unknown"
    assert group.recommended is None
    few = {name: rates[name] for name in ("none", "bf16")}
    (group,) = build_report([save_rates(tmp_path / "few", few)]).groups
    assert {setting.name: setting.difference for setting in group.settings}["bf16"] == "faster"
