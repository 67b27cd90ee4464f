"""The naive and the interleaved strategy: they train as DDP does, and show every gradient sync."""

import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn

from lightning_commopt import CommOptDDP
from lightning_commopt.baselines import InterleavedDP, NaiveDP
from lightning_commopt.commands.tune.inject import tuned_strategy
from lightning_commopt.measure.record import StepRecord
from lightning_commopt.strategy.base import plan_of
from support.cross_section import sampled
from support.lightnings import LightningEnvironment, MisconfigurationException
from support.ranks import run_ranks_or_raise
from support.strategy_models import (
    FEATURES,
    BatchNormed,
    Embedded,
    Keeping,
    Manual,
    Params,
    Tiny,
    Unused,
    assert_same,
    loader,
    numbers,
    trainer,
)
from support.training_modes import MODES, Mode
from support.warm_ranks import run_ranks
from support.watched_steps import GRADIENT_BYTES, Watch, assert_in_order

BASELINES: dict[str, type[NaiveDP] | type[InterleavedDP]] = {"naive": NaiveDP, "interleaved": InterleavedDP}
PARAMETERS = {name: 4 * parameter.numel() for name, parameter in Tiny().named_parameters()}
BATCHES = 3  # in an epoch of two ranks


# Lightning's DDPStrategy trains on where parameters are frozen or unfrozen within a fit, but wrongly.
REFERENCES: dict[str, Callable[[], DDPStrategy]] = {
    "unfrozen_in_training": CommOptDDP,
    "frozen_in_training": CommOptDDP,
}
_LEFT_OUT = (
    *("unused", "unused_now_and_then", "sparse"),  # refused, see below
    # More of what comes before a sync, or after it.
    *("accumulation_3", "accumulation_4", "accumulation_uneven", "uneven_last_batch"),
    *("clip_norm", "early_stopping", "compiled_aot"),
)
EVERY_MODE = {name: mode for name, mode in MODES.items() if name not in _LEFT_OUT}
DEFAULT_MODES = ("batch_norm", "unfrozen_in_training")


def fit(strategy: Any, mode: Mode, **options: Any) -> Params:
    module = mode.module()
    trainer(strategy, **mode.trainer(), **options).fit(module, loader(mode.samples), loader(8))
    return numbers(module)


def fit_each(name: str) -> tuple[Params, dict[str, Params]]:
    mode = EVERY_MODE[name]
    reference = REFERENCES.get(name, lambda: DDPStrategy(**mode.strategy))()
    return fit(reference, mode), {key: fit(strategy(), mode) for key, strategy in BASELINES.items()}


@pytest.mark.parametrize("name", sampled(EVERY_MODE, DEFAULT_MODES))
def test_trains_as_ddp_bit_by_bit(name: str) -> None:
    """If it fails, a comparison of strategies compares different trainings; buffers of each rank are compared too."""
    for of_ddp, of_baselines in run_ranks(fit_each, name):
        for strategy, params in of_baselines.items():
            assert_same(params, of_ddp, of=strategy)


class Branched(Tiny):
    """Computes its branches in another order on every rank, and in every epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(FEATURES, FEATURES) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        first = self.global_rank + self.current_epoch
        outputs = {place % 4: self.branches[place % 4](x) for place in range(first, first + 4)}
        return self.layers(outputs[0] + outputs[1] * outputs[2] + outputs[3])


def fit_branched() -> tuple[Params, Params, list[StepRecord]]:
    watch = Watch()
    mode = Mode(module=Branched)
    return fit(NaiveDP(), mode), fit(InterleavedDP(), mode, callbacks=[watch]), watch.records()


def test_ranks_whose_graphs_differ() -> None:
    """If it fails, gradients of one parameter are averaged with those of another."""
    for naive, interleaved, records in run_ranks(fit_branched):
        assert_same(interleaved, naive)
        assert [len(record.buckets) for record in records] == [1, *[14] * (2 * BATCHES - 1)]


def fit_watched(strategy: str, module: type[Tiny], options: dict[str, Any]) -> tuple[Params, Params, Any]:
    watch, mode = Watch(), Mode(module=module, trainer=lambda: options)
    watched = BASELINES[strategy]()
    params = fit(watched, mode, callbacks=[watch])
    return params, fit(BASELINES[strategy](), mode), (watch.records(), watched.wire_bytes)


WATCHED: dict[str, tuple[type[Tiny], dict[str, Any], int]] = {
    "automatic": (Tiny, {}, 1),
    "accumulating": (Tiny, {"accumulate_grad_batches": 3}, 3),
    "gradients kept": (Keeping, {}, 1),
    "manual": (Manual, {}, 1),
}


@pytest.mark.parametrize("strategy", BASELINES)
@pytest.mark.parametrize("model", sampled(WATCHED, by_default=["accumulating"]))
def test_every_gradient_is_seen_once(model: str, strategy: str) -> None:
    """If it fails, communication times of the baselines are wrong, or measuring changes the training."""
    module, options, num_accumulated = WATCHED[model]
    for watched, unwatched, (records, wire_bytes) in run_ranks(fit_watched, strategy, module, options):
        assert_same(watched, unwatched)
        assert len(records) == 2 * BATCHES // num_accumulated
        assert sum(record.totals.wire_bytes for record in records) == wire_bytes == len(records) * GRADIENT_BYTES
        for record in records[1:]:
            assert [bucket.index for bucket in record.buckets] == list(range(len(PARAMETERS)))
            assert sorted(bucket.gradient_bytes for bucket in record.buckets) == sorted(PARAMETERS.values())
            assert record.totals.gradient_bytes == GRADIENT_BYTES
            assert all(bucket.wire_bytes == bucket.gradient_bytes for bucket in record.buckets)
            assert_in_order(record)
            assert_overlap(strategy, record)


def assert_overlap(strategy: str, record: StepRecord) -> None:
    ready = [bucket.ready_s for bucket in record.buckets]
    if strategy == "naive":
        assert max(ready) <= min(bucket.start_s for bucket in record.buckets)
    else:
        assert all(bucket.start_s < later for bucket, later in zip(record.buckets, ready[1:], strict=False))


class UnusedOnOneRank(Tiny):
    """Does not use its last layer on rank 1."""

    def loss(self, batch: Any) -> Tensor:
        if self.global_rank == 1:
            return self.layers[:4](batch[0]).square().mean()
        return super().loss(batch)


def fit_once(strategy: str, module: type[Tiny]) -> None:
    fit(BASELINES[strategy](), Mode(module=module))


def fit_refused() -> None:
    for strategy in BASELINES:
        with pytest.raises(MisconfigurationException, match=r"gave no gradient to never\.weight, never\.bias, s"):
            fit_once(strategy, Unused)
        with pytest.raises(MisconfigurationException, match=r"'table\.weight' has a sparse gradient"):
            fit_once(strategy, Embedded)


def test_gradients_that_cannot_be_synchronized_are_refused() -> None:
    """If it fails, ranks hang, or each trains by itself what is not synchronized."""
    run_ranks(fit_refused)


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", BASELINES)
def test_a_gradient_that_one_rank_lacks_is_named_by_it(strategy: str) -> None:
    """If it fails, ranks wait for each other without a word of why."""
    answers = run_ranks_or_raise(fit_once, strategy, UnusedOnOneRank, world_size=2, limit_s=60)
    assert "backward gave no gradient to layers.4.weight, layers.4.bias" in (answers[1][1] or "")
    assert answers[0][1] is not None


def all_alone() -> list[tuple[Params, int]]:
    return [fit_alone(strategy) for strategy in (None, *BASELINES)]


def fit_alone(strategy: str | None) -> tuple[Params, int]:
    watch = Watch()
    chosen: Any = BASELINES[strategy]() if strategy else SingleDeviceStrategy(torch.device("cpu"))
    params = fit(chosen, Mode(module=BatchNormed), callbacks=[watch])
    assert not any(record.buckets for record in watch.records())
    return params, getattr(chosen, "wire_bytes", 0)


def test_one_rank_sends_nothing() -> None:
    """If it fails, one process pays for a gradient sync, or trains otherwise than without."""
    (((expected, _), *of_baselines),) = run_ranks(all_alone, world_size=1)
    for params, wire_bytes in of_baselines:
        assert_same(params, expected, rtol=1e-5)  # the order of sums depends on the processor
        assert wire_bytes == 0


@pytest.mark.parametrize("strategy", BASELINES.values())
def test_strategy_pickles(strategy: type[NaiveDP]) -> None:
    """If it fails, start_method="spawn" cannot hand the strategy to its processes."""
    copied = pickle.loads(pickle.dumps(strategy(start_method="spawn", timeout=timedelta(seconds=9))))
    assert copied._start_method == "spawn"
    assert copied._timeout == timedelta(seconds=9)


@pytest.mark.parametrize("strategy", BASELINES.values())
def test_nobody_takes_it_for_a_plan(strategy: type[NaiveDP]) -> None:
    """If it fails, records name the plan behind a baseline instead of the baseline, or ``commopt tune`` changes it."""
    assert plan_of(strategy()) is None
    with pytest.raises(ValueError, match="commopt tune is for DDP"):
        tuned_strategy(strategy(), CommOptDDP, {})


def test_the_environment_of_ray() -> None:
    """If it fails, the error names a strategy that there is not."""
    environment = type("RayLightningEnvironment", (LightningEnvironment,), {"__module__": "ray.train.lightning"})()
    with pytest.raises(MisconfigurationException, match=r"lightning_commopt\.ray\.CommOptDDP,"):
        trainer(NaiveDP(), plugins=[environment])
