"""Observing gradient sync: everything is seen, and nothing changes."""

from collections.abc import Callable
from itertools import chain
from typing import Any
from unittest.mock import patch
from warnings import catch_warnings, simplefilter

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt import CommOptDDP, CommPlan
from lightning_commopt.callbacks.phases import PhaseCallback
from lightning_commopt.measure.clock import HostClock
from lightning_commopt.measure.record import StepRecord
from lightning_commopt.measure.recorder import StepRecorder
from lightning_commopt.sync.ddp import observed
from lightning_commopt.sync.ddp.observed import observe, observe_wrapped
from support.cross_section import sampled
from support.lightnings import Callback, DDPStrategy, LightningModule, SingleDeviceStrategy, Trainer
from support.strategy_models import Embedded, Gan, Keeping, Manual, Params, Tiny, assert_same, loader, numbers, trainer
from support.warm_ranks import run_ranks
from support.watched_steps import GRADIENT_BYTES, Watch, assert_in_order

SMALL = 0.001  # MiB: three buckets or more


class ChangePlan(PhaseCallback):
    """Changes the plan before batch 2."""

    def _enter(self, phase: str | None) -> None:
        pass

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            assert isinstance(trainer.strategy, CommOptDDP)
            trainer.strategy.apply_plan(CommPlan.from_dict({"comm_hook": "bf16", "bucket_cap_mb": SMALL}))
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def _end_batch(self, trainer: Trainer, batch: Any, has_stepped: bool) -> None:
        pass


def own(**options: Any) -> CommOptDDP:
    return CommOptDDP(bucket_cap_mb=SMALL, **options)


def stock(**options: Any) -> DDPStrategy:
    return DDPStrategy(bucket_cap_mb=SMALL, **options)


def torchs_powersgd() -> CommOptDDP:
    state = PowerSGDState(None, start_powerSGD_iter=2)
    return CommOptDDP(ddp_comm_state=state, ddp_comm_hook=powerSGD_hook)


STRATEGIES: dict[str, Callable[[], Any]] = {
    "native": own,
    "native static": lambda: own(static_graph=True, gradient_as_bucket_view=True),
    "native unused": lambda: own(find_unused_parameters=True),
    "all_reduce": lambda: own(comm_hook="all_reduce"),
    "int8": lambda: own(comm_hook="int8"),
    "powersgd": lambda: own(comm_hook={"name": "powersgd", "min_compression_rate": 1.1}),
    "torch's all-reduce": lambda: own(ddp_comm_hook=allreduce_hook),
    "torch's, wrapped": lambda: own(ddp_comm_hook=allreduce_hook, ddp_comm_wrapper=fp16_compress_wrapper),
    "torch's PowerSGD": torchs_powersgd,
    "Lightning's": stock,
    "Lightning's static": lambda: stock(static_graph=True),
}
BY_DEFAULT = ("native",)
ON_THREE = ("native unused", "int8", "torch's PowerSGD")
MODELS: dict[str, tuple[type[Tiny], dict[str, Any]]] = {
    "automatic": (Tiny, {}),
    "accumulating": (Tiny, {"accumulate_grad_batches": 3}),
    "gradients kept": (Keeping, {}),
    "manual": (Manual, {}),
}


def fit(strategy: Any, model: type[Tiny], options: dict[str, Any], *callbacks: Any) -> Params:
    torch.manual_seed(0)
    module = model()
    trainer(strategy, callbacks=list(callbacks), **options).fit(module, loader())
    return numbers(module)


def fit_twice(strategy: str, model: str) -> tuple[Params, Params, list[StepRecord]]:
    watch = Watch()
    unwatched, watched = (fit(STRATEGIES[strategy](), *MODELS[model], *callbacks) for callbacks in ([], [watch]))
    return unwatched, watched, watch.records()


def is_impossible(strategy: str, model: str) -> bool:
    is_old = "post_backward" not in vars(DDPStrategy)
    return strategy == "Lightning's static" and (model == "accumulating" or (model == "manual" and is_old))


def fit_all_twice(strategy: str) -> dict[str, tuple[Params, Params, list[StepRecord]]]:
    return {model: fit_twice(strategy, model) for model in MODELS if not is_impossible(strategy, model)}


@pytest.mark.parametrize("strategy", sampled(STRATEGIES, BY_DEFAULT))
def test_every_bucket_is_seen_and_no_bit_changes(strategy: str) -> None:
    world_size = 3 if strategy in ON_THREE else 2
    fits = run_ranks(fit_all_twice, strategy, world_size=world_size)
    for model, (unwatched, watched, records) in (fit for of_rank in fits for fit in of_rank.items()):
        assert_same(watched, unwatched, of=model)
        num_batches = 2 * (24 // world_size // 4)
        accumulated = MODELS[model][1].get("accumulate_grad_batches", 1)
        assert len(records) == 2 * -(-num_batches // 2 // accumulated)
        for record in records[1:]:
            assert record.totals.gradient_bytes == GRADIENT_BYTES
            assert_in_order(record)
        assert len(records[-1].buckets) >= (1 if strategy == "torch's PowerSGD" else 2)


STATIC: list[Callable[[], Any]] = [
    lambda: own(static_graph=True),
    lambda: own(static_graph=True, ddp_comm_hook=allreduce_hook),
    lambda: stock(static_graph=True),
]


class TwoDtypes(Tiny):
    """Has a bucket for each of two dtypes from the first backward on, also with a static graph."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale.float()


def first_steps_of_static_graphs() -> list[StepRecord]:
    records = []
    for strategy in STATIC:
        watch = Watch()
        fit(strategy(), TwoDtypes, {}, watch)
        records.append(watch.records()[0])
    return records


def test_buckets_of_the_first_backward_of_a_static_graph_are_counted() -> None:
    """DDP calls all of them number 0, and none the last."""
    for record in chain(*run_ranks(first_steps_of_static_graphs)):
        assert record.totals.gradient_bytes == GRADIENT_BYTES + 8
        assert [(bucket.backward, bucket.index) for bucket in record.buckets] == [(0, 0), (0, 1)]


def record_wire_bytes() -> tuple[int, int, list[StepRecord]]:
    watch, strategy = Watch(), own(comm_hook="int8")
    fit(strategy, Tiny, {}, watch)
    return strategy.wire_bytes, len(list(strategy.sync_observers)), watch.records()


def test_bytes_are_those_that_the_channel_counted() -> None:
    for counted, num_observers, records in run_ranks(record_wire_bytes):
        assert sum(record.totals.wire_bytes for record in records) == counted
        assert num_observers == 0, "let go of in teardown"


def bytes_of_torchs_hooks() -> list[int]:
    found = []
    for strategy in ("torch's all-reduce", "torch's, wrapped", "torch's PowerSGD"):
        watch = Watch()
        fit(STRATEGIES[strategy](), Tiny, {}, watch)
        found.append(watch.records()[-1].totals.wire_bytes)
    return found


def test_bytes_of_torchs_hooks_are_known() -> None:
    factors = 4 * ((24 + 6) + (24 + 24) + (24 + 24 + 24 + 1))  # of two matrices; three biases and a single row
    for found in run_ranks(bytes_of_torchs_hooks):
        assert found == [GRADIENT_BYTES, GRADIENT_BYTES // 2, factors]


def fit_gan() -> list[StepRecord]:
    watch = Watch()
    fit(own(find_unused_parameters=True), Gan, {}, watch)
    return watch.records()


def test_each_backward_of_a_step_has_its_own_buckets() -> None:
    for records in run_ranks(fit_gan):
        for record in records:
            assert {bucket.backward for bucket in record.buckets} == {0, 1}
            names = [phase.name for phase in record.phases]
            assert names[-5:] == ["forward", "backward", "forward", "optimizer", "forward"]
            assert names.count("backward") == names.count("optimizer") == 2


def fit_embedded() -> tuple[Params, Params, int]:
    watch = Watch()
    unwatched, watched = (fit(CommOptDDP(), Embedded, {}, *callbacks) for callbacks in ([], [watch]))
    return unwatched, watched, len(watch.records()[-1].buckets)


def test_sparse_gradients_are_seen() -> None:
    for unwatched, watched, num_buckets in run_ranks(fit_embedded):
        assert_same(watched, unwatched)
        assert num_buckets == 2


def fit_with_a_change() -> list[StepRecord]:
    watch = Watch()
    fit(own(), Tiny, {}, watch, ChangePlan())
    return watch.records()


def test_a_change_of_plan_is_followed() -> None:
    for records in run_ranks(fit_with_a_change):
        assert [record.totals.wire_bytes for record in records[:4]] == [GRADIENT_BYTES] * 2 + [GRADIENT_BYTES // 2] * 2


def fit_reused() -> tuple[int, int]:
    watch, counts = Watch(), []
    reused = trainer(stock(), callbacks=[watch], max_epochs=1)
    for max_epochs in (1, 2):
        reused.fit_loop.max_epochs = max_epochs
        reused.fit(Tiny(), loader())
        records = watch.records()
        counts.append(sum(len(record.buckets) for record in records[1:]))
    return counts[0], counts[1]


def test_a_strategy_is_watched_again() -> None:
    for first, second in run_ranks(fit_reused):
        assert first == second > 0


class OwnHook(Callback):
    """Registers a comm hook with the wrapper, as a program may that counts its gradient syncs."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(trainer.strategy.model, DistributedDataParallel)
        trainer.strategy.model.register_comm_hook(None, allreduce_hook)


def fit_with_own_hook() -> list[tuple[Params, Params, int]]:
    found = []
    # As on CUDA. The warning that these gradient syncs cannot be observed comes once in a process.
    with patch("lightning_commopt.sync.ddp.observed.can_observe_reducer", return_value=False), catch_warnings():
        simplefilter("ignore", UserWarning)
        for strategy in (own, stock):
            watch = Watch()
            unwatched, watched = (fit(strategy(), Tiny, {}, *more, OwnHook()) for more in ([], [watch]))
            found.append((unwatched, watched, len(watch.records()[-1].buckets)))
    return found


def test_a_hook_that_the_program_registers_takes_precedence() -> None:
    """DDP takes one hook: if it fails, a monitor ends a fit that is healthy without it."""
    for unwatched, watched, num_buckets in chain(*run_ranks(fit_with_own_hook)):
        assert_same(watched, unwatched)
        assert num_buckets == 0


class Elsewhere(SingleDeviceStrategy):
    """Synchronizes gradients in ways of its own."""


def test_what_cannot_be_seen_is_said_once() -> None:
    strategy = Elsewhere(torch.device("cpu"))
    strategy.model = Tiny()
    strategy.world_size = 2
    observe(strategy, StepRecorder(HostClock()))
    with pytest.warns(UserWarning, match="Elsewhere has no DDP buckets to observe"):
        observe_wrapped(strategy)


class Sharding(Elsewhere):
    """Has a name of its own, because a warning comes once."""


def test_a_sharded_model_has_times_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, each fit of FSDP2 with a monitor warns that something is missing, though nothing is."""
    strategy = Sharding(torch.device("cpu"))
    strategy.model = Tiny()
    strategy.world_size = 2
    monkeypatch.setattr(observed, "units_of", lambda model: [model])
    observe(strategy, StepRecorder(HostClock()))
    with catch_warnings():
        simplefilter("error")
        observe_wrapped(strategy)
