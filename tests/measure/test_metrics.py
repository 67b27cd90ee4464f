"""Metrics of steps: what torchmetrics promises of any metric, and the numbers of `Steps`."""

import copy
import pickle
from random import Random

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sample_steps import step_record
from torchmetrics import MetricCollection

from lightning_commopt.measure.statistics import QUANTITIES, Steps, row
from lightning_commopt.metrics import ExposedShare, StepMetric, StepStatistics
from support.ranks import run_ranks

Values = NDArray[np.float64]
NAMES = list(Steps.of(np.empty((1, 0, len(QUANTITIES)))).statistics())


def steps_of(num_ranks: int, num_steps: int, seed: int = 0) -> Values:
    values = np.random.default_rng(seed).random((num_ranks, num_steps, len(QUANTITIES)))
    return values + np.arange(1, len(QUANTITIES) + 1)


def floats(result: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in result.items()}


def test_one_number_is_that_of_all() -> None:
    """If it fails, a number has two definitions, or a metric keeps too little to compute it."""
    values = steps_of(3, 20)
    values[2, :, QUANTITIES.index("wire_s")] -= 5
    for name in NAMES:
        metric = StepMetric(name, world_size=3)
        metric.update(values[:, :7])
        metric.update(values[:, 7:])
        number = metric.compute()
        assert (number.dtype, number.shape) == (torch.float64, ())
        assert float(number) == pytest.approx(Steps.of(values).statistics()[name], rel=1e-12), name


def test_of_a_record() -> None:
    metric, record = ExposedShare(), step_record(3)
    metric.update(record)
    assert float(metric.compute()) == record.totals.exposed_s / record.totals.step_s > 0
    assert metric.steps.sums.tolist() == Steps.of([[row(record)]]).sums.tolist()


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"name must be one of .*, got 'exposed'.*exposed_s"):
        StepMetric("exposed")


@pytest.mark.parametrize("sizes", [[50] * 40, [2000], [3, 997, 1, 999], [64, 1, 1, 1934]])
def test_the_sample_is_that_of_a_plain_reservoir(sizes: list[int]) -> None:
    """If it fails, percentiles of long fits are others than those of earlier versions."""
    values = steps_of(2, 2000)
    plain: list[Values] = []
    for index in range(2000):
        place = index if index < 100 else Random(index).randrange(index + 1)
        if place < 100:
            plain[place : place + 1] = [values[:, index]]
    metric = StepStatistics(max_sampled_values=100 * 2 * 16)
    for start, size in zip(np.cumsum([0, *sizes[:-1]]), sizes, strict=True):
        metric.update(values[:, start : start + size])
    assert np.array_equal(metric.steps.values[:, :, : len(QUANTITIES)], plain)


def test_forward_gives_the_batch_and_accumulates() -> None:
    one, other, whole = StepStatistics(), StepStatistics(), StepStatistics()
    for seed in range(5):
        values = steps_of(2, 30, seed)
        assert floats(one(values)) == Steps.of(values).statistics()
        other.update(values)
    whole.update(np.concatenate([steps_of(2, 30, seed) for seed in range(5)], axis=1))
    assert floats(one.compute()) == pytest.approx(floats(other.compute()), rel=1e-12)
    assert floats(one.compute()) == pytest.approx(floats(whole.compute()), rel=1e-12)


def test_merged_samples_have_a_share_for_each_step() -> None:
    """If it fails, the shorter of two fits counts more or less in percentiles, or a merge changes the other metric."""
    long, short = (StepStatistics(max_sampled_values=1000 * 2 * 16) for _ in range(2))
    for metric, num_windows, step_s in ((long, 200, 1.0), (short, 50, 2.0)):
        values = steps_of(2, 50)
        values[:, :, 0] = step_s
        for _ in range(num_windows):
            metric.update(values)
    before = long.steps.values.copy()
    short.merge_state(long)
    for _ in range(5):
        short.update(np.ones((2, 50, len(QUANTITIES))))
    assert short.steps.num_steps == 12_750
    assert len(short.steps.values) == 1000
    assert np.mean(short.steps.values[:, 0, 0] == 2) == pytest.approx(2500 / 12_750, abs=0.04)  # always the same draw
    assert np.array_equal(long.steps.values, before)


def test_reset_copy_and_pickle() -> None:
    metric = StepStatistics(max_sampled_values=1)
    metric.update(steps_of(2, 200))
    copies = copy.deepcopy(metric), pickle.loads(pickle.dumps(metric)), metric.clone()
    metric.reset()
    metric.update(steps_of(3, 5))
    assert floats(metric.compute()) == Steps.of(steps_of(3, 5)).statistics()
    for one in copies:
        assert isinstance(one, StepStatistics)
        assert one.steps.num_steps == 200
        one.update(steps_of(2, 200, 1))
    assert copies[0].compute() == copies[1].compute() == copies[2].compute()


@pytest.mark.parametrize("turn", range(4))
def test_in_a_collection(turn: int) -> None:
    """If it fails, a metric shares the states of another one that keeps less than it needs, or other steps."""
    names = ["exposed_share", "exposed_s_p95", "step_s_p50", "straggler_rank"]
    keys = {f"{index}": name for index, name in enumerate(names[turn:] + names[:turn])}
    collection = MetricCollection({key: StepMetric(name) for key, name in keys.items()})
    for seed in range(3):
        collection.update(steps_of(2, 40, seed))
    expected = Steps.of(np.concatenate([steps_of(2, 40, seed) for seed in range(3)], axis=1)).statistics()
    assert floats(collection.compute()) == pytest.approx({key: expected[name] for key, name in keys.items()}, rel=1e-12)


def test_states_stay_on_the_host_whatever_the_default_device() -> None:
    with torch.device("meta"):
        metric = StepStatistics()
        metric.update(steps_of(2, 5))
        metric.reset()
        metric.update(steps_of(2, 5))
        assert float(metric.compute()["step_s"]) > 1


def alone_and_together() -> tuple[float, float, float, int]:
    rank = torch.distributed.get_rank()
    values = np.ones((1, 10 + rank, len(QUANTITIES)))
    values[:, :, QUANTITIES.index("step_s")] = 2 + 2 * rank
    alone, together, median = ExposedShare(), ExposedShare(sync_on_compute=True), StepMetric("step_s_p50")
    for metric in (alone, together, median):
        metric.update(values)
    median.sync()
    found = float(alone.compute()), float(together.compute()), median.steps.statistics()["step_s_p50"]
    return *found, together.steps.num_steps


def test_states_are_gathered_only_if_asked() -> None:
    """If it fails, logging a metric waits for other ranks unasked, or counts those of one rank only."""
    found = run_ranks(alone_and_together)
    share = 21 / (10 * 2 + 11 * 4)
    assert found == [(0.5, share, 4.0, 10), (0.25, share, 4.0, 11)]
