"""What happens around a fit: again, resumed, validated; on one rank; the bytes that it sent."""

import logging
import pickle
import warnings
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning_utilities.core import rank_zero
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt import CommOptDDP, CommOptModelParallel, CommPlan, ErrorFeedback, PowerSGD
from lightning_commopt.compressors import Layout, LowRank, Rounds, State
from support.cross_section import sampled
from support.lightnings import (
    Callback,
    DDPStrategy,
    LightningModule,
    MisconfigurationException,
    MixedPrecision,
    ModelCheckpoint,
    Trainer,
)
from support.own_compressors import Averages
from support.ranks import run_ranks_or_raise
from support.strategy_models import (
    FEATURES,
    BatchNormed,
    Gan,
    Manual,
    Params,
    Tiny,
    assert_same,
    loader,
    numbers,
    trainer,
)
from support.warm_ranks import run_ranks

_BYTES = sum(parameter.numel() * 4 for parameter in Tiny().parameters())
_BATCHES = 3  # in an epoch of two ranks


def _fit_twice(module_class: type[Tiny], options: dict[str, Any]) -> tuple[Params, Params]:
    both = []
    for strategy in (CommOptDDP(**options), DDPStrategy()):
        module = module_class()
        run = trainer(strategy)
        run.fit(module, loader())
        run.fit_loop.max_epochs = 4
        run.fit(module, loader())
        both.append(numbers(module))
    return both[0], both[1]


@pytest.mark.parametrize(
    ("module_class", "options"),
    [
        (Tiny, {"comm_hook": "all_reduce", "bucket_cap_mb": 0.001}),
        pytest.param(Manual, {"static_graph": True}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_fit_twice_with_one_strategy(module_class: type[Tiny], options: dict[str, Any]) -> None:
    """If it fails, the second fit with a strategy object hangs, or its gradients are not synchronized."""
    for ours, lightnings in run_ranks(_fit_twice, module_class, options):
        assert_same(ours, lightnings)


def _use_all_loops() -> tuple[float, float, int, bool]:
    strategy = CommOptDDP(comm_hook="all_reduce")
    run = trainer(strategy)
    module = Tiny()
    run.fit(module, loader(), loader())
    validated = run.validate(module, loader())[0]["val_loss"]
    tested = run.test(module, loader())[0]["test_loss"]
    predicted = run.predict(module, loader())
    assert predicted is not None
    return validated, tested, len(predicted), isinstance(strategy.model, DistributedDataParallel)


def test_fit_then_validate_test_predict() -> None:
    """If it fails, the loops that synchronize no gradients do not work with the strategy."""
    first, second = run_ranks(_use_all_loops)
    assert first == second
    assert first[0] == pytest.approx(first[1])
    assert first[2:] == (_BATCHES, False)


def _resume() -> tuple[Params, Params]:
    through = Tiny()
    trainer(CommOptDDP(), max_epochs=3).fit(through, loader())
    folder = [str(Path.cwd() / "checkpoints")]
    dist.broadcast_object_list(folder)
    saver = ModelCheckpoint(folder[0], filename="kept")
    saving = {"enable_checkpointing": True, "callbacks": [saver]}
    trainer(CommOptDDP(), max_epochs=1, **saving).fit(Tiny(), loader())
    resumed = Tiny()
    trainer(CommOptDDP(), max_epochs=3).fit(resumed, loader(), ckpt_path=saver.best_model_path)
    return numbers(through), numbers(resumed)


def test_resume_from_a_checkpoint_without_a_state_of_gradient_sync() -> None:
    """If it fails, a run that is resumed goes another way than one that was never interrupted."""
    for through, resumed in run_ranks(_resume):
        assert_same(resumed, through)


def _sent(options: dict[str, Any], trainer_options: dict[str, Any]) -> int:
    strategy = CommOptDDP(**options)
    trainer(strategy, **trainer_options).fit(Tiny(), loader())
    return strategy.wire_bytes


_SENT: list[tuple[dict[str, Any], dict[str, Any], int]] = [
    ({}, {}, 2 * _BATCHES * _BYTES),
    ({"comm_hook": "all_reduce", "bucket_cap_mb": 0.001}, {}, 2 * _BATCHES * _BYTES),
    ({"comm_hook": "bf16"}, {}, 2 * _BATCHES * _BYTES // 2),
    ({}, {"accumulate_grad_batches": 3}, 2 * _BYTES),
    ({"comm_hook": "all_reduce"}, {"accumulate_grad_batches": 3}, 2 * _BYTES),
    ({"comm_hook": "all_reduce"}, {"accumulate_grad_batches": 2}, 4 * _BYTES),
    ({"comm_hook": "all_reduce", "static_graph": True}, {"accumulate_grad_batches": 3}, 3 * _BYTES),
    ({"static_graph": True}, {"accumulate_grad_batches": 3}, 3 * _BYTES),
]


def _sent_in_all() -> list[int]:
    return [_sent(options, trainer_options) for options, trainer_options, _ in _SENT]


def test_wire_bytes() -> None:
    """If it fails, accumulating steps are synchronized (but for a static graph's first), or the count is wrong."""
    assert run_ranks(_sent_in_all) == [[expected for _, _, expected in _SENT]] * 2


def _fit_alone(strategy: Any) -> tuple[Params, bool, int]:
    wrapped = []
    messages = []

    class Listen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    rank_zero.log.addHandler(Listen())

    class Look(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            wrapped.append(isinstance(trainer.strategy.model, DistributedDataParallel))

    module = BatchNormed()
    trainer(strategy, callbacks=[Look()]).fit(module, loader())
    return numbers(module), wrapped[0], sum("CommOptDDP: one process" in message for message in messages)


def _fit_alone_in_all() -> list[tuple[Params, bool, int]]:
    ours = [CommOptDDP(**options) for options in ({}, {"comm_hook": "powersgd"}, {"static_graph": True})]
    return [_fit_alone(strategy) for strategy in ("auto", *ours)]


def test_one_rank_has_no_wrapper() -> None:
    """If it fails, one process pays for DDP, or trains otherwise than without it."""
    (((expected, _, _), *results),) = run_ranks(_fit_alone_in_all, world_size=1)
    for params, is_wrapped, num_messages in results:
        assert not is_wrapped
        assert num_messages == 1
        assert_same(params, expected, rtol=1e-5)  # the order of sums depends on the processor


def _more_ranks() -> tuple[Params, Params]:
    ours, lightnings = Tiny(), Tiny()
    trainer(CommOptDDP(comm_hook="all_reduce", bucket_cap_mb=0.001)).fit(ours, loader(samples=48))
    trainer(DDPStrategy()).fit(lightnings, loader(samples=48))
    return numbers(ours), numbers(lightnings)


def test_three_ranks() -> None:
    """If it fails, the average is wrong where it is not that of two ranks."""
    results = run_ranks(_more_ranks, world_size=3)
    for ours, lightnings in results:
        assert_same(ours, lightnings, rtol=1e-6)
        assert_same(ours, results[0][0])


class Overflows(Tiny):
    """Has an infinite gradient on rank 0 in step 1."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if self.global_step == 1 and self.global_rank == 0 else loss


def _fit_with_overflow(compressor: Any) -> tuple[list[Params], Params, float]:
    after_steps = []

    class Record(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
            after_steps.append(numbers(pl_module))

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    module = Overflows()
    plugins = [MixedPrecision("16-mixed", "cpu", scaler=scaler)]
    trainer(CommOptDDP(comm_hook=compressor), plugins=plugins, callbacks=[Record()], max_epochs=1).fit(module, loader())
    return after_steps, numbers(module), scaler.get_scale()


def _fits_with_overflow() -> list[tuple[list[Params], Params, float]]:
    compressors = (None, "bf16", PowerSGD(min_compression_rate=0.1), ErrorFeedback(inner=LowRank(matrix_rank=2)))
    return [_fit_with_overflow(compressor) for compressor in compressors]


def test_step_that_overflows_is_skipped_on_all_ranks() -> None:
    """If it fails, one overflow under a gradient scaler breaks the model or the error feedback for ever."""
    for after_steps, params, scale in chain(*run_ranks(_fits_with_overflow)):
        assert scale == 512.0
        assert_same(after_steps[1], after_steps[0])
        assert (after_steps[2]["layers.0.weight"] != after_steps[1]["layers.0.weight"]).any()
        assert all((abs(values) < 100).all() for values in params.values())


def _warned_of_fp16() -> list[bool]:
    were_warned = []
    for comm_hook in ("fp16", "bf16"):
        plugins = [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer(CommOptDDP(comm_hook=comm_hook), plugins=plugins, max_steps=1).fit(Tiny(), loader())
        were_warned.append(any("comm_hook='fp16' rounds gradients" in str(warning.message) for warning in caught))
    return were_warned


def test_fp16_under_a_scaler_warns() -> None:
    """If it fails, scaled gradients overflow in float16 without a word, or the warning comes for nothing."""
    assert run_ranks(_warned_of_fp16)[0] == [True, False]


def test_strategy_pickles() -> None:
    """If it fails, start_method="spawn" cannot hand the strategy to its processes."""
    strategy = CommOptDDP(
        bucket_cap_mb=3, comm_hook={"name": "powersgd", "matrix_rank": 2}, timeout=timedelta(seconds=9)
    )
    assert pickle.loads(pickle.dumps(strategy)).plan == strategy.plan


def test_from_plan(tmp_path: Path) -> None:
    """If it fails, a plan that was found and saved does not come back."""
    plan = CommPlan(bucket_cap_mb=3, static_graph=True, comm_hook=PowerSGD(matrix_rank=2))
    plan.save(tmp_path / "plan.json")
    strategy = CommOptDDP.from_plan(tmp_path / "plan.json", start_method="spawn")
    assert strategy.plan == plan
    assert strategy._ddp_kwargs == {"bucket_cap_mb": 3, "static_graph": True}


def _toggle_with_static_graph() -> None:
    with pytest.raises(MisconfigurationException, match="static_graph=True cannot be used with toggle_optimizer"):
        trainer(CommOptDDP(static_graph=True)).fit(Gan(), loader())


def test_static_graph_with_toggled_optimizers_is_refused() -> None:
    """If it fails, a GAN with a static graph trains wrongly, or dies with an assertion of DDP's."""
    run_ranks(_toggle_with_static_graph)


def _train_on_three() -> list[str]:
    errors = []
    for strategy in (CommOptDDP(), CommOptModelParallel()):
        with pytest.raises(MisconfigurationException) as raised:
            trainer(strategy, devices=3).fit(Tiny(), loader())
        errors.append(str(raised.value))
    return errors


def test_process_group_of_another_size_is_refused() -> None:
    """If it fails, a job of a sweep trains on the number of processes that the last one had."""
    for errors in run_ranks(_train_on_three):
        for name, error in zip(("CommOptDDP", "CommOptModelParallel"), errors, strict=True):
            assert f"{name} was made for 3 processes, but the process group that exists has 2" in error


class Breaks(Tiny):
    """Raises on one rank."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.global_rank == 1:
            raise ArithmeticError("broken on purpose")


def _break_a_rank(comm_hook: str) -> None:
    trainer(CommOptDDP(comm_hook=comm_hook)).fit(Breaks(), loader())


@pytest.mark.parametrize("comm_hook", sampled(["none", "all_reduce"], by_default=["all_reduce"]))
def test_exception_in_one_rank(comm_hook: str) -> None:
    """If it fails, a rank's exception is hidden, or its peers hang."""
    waiting, broken = run_ranks_or_raise(_break_a_rank, comm_hook, world_size=2, limit_s=60)
    assert broken[1] is not None
    assert "ArithmeticError: broken on purpose" in broken[1]
    assert waiting[1] is not None


class Fails(Averages):
    """Averages, but for bucket 1 of the third gradient sync on rank 1, where it raises."""

    def init(self, layout: Layout, device: torch.device, step: int = 0) -> State:
        return {"steps": 0}

    def rounds(
        self, flat: Tensor, layout: Layout, state: State, channel: Any, residual: Tensor | None = None
    ) -> Rounds:
        state["steps"] += 1
        is_second_bucket = torch.Size([24, FEATURES]) in layout.shapes
        if dist.get_rank() == 1 and is_second_bucket and state["steps"] == 3:
            raise ArithmeticError("broken on purpose")
        yield from super().rounds(flat, layout, {}, channel)


def _break_a_gradient_sync() -> None:
    trainer(CommOptDDP(comm_hook=Fails(), bucket_cap_mb=0.0005)).fit(Tiny(), loader())


def test_exception_in_a_gradient_sync() -> None:
    """If it fails, an error in a compressor is hidden, names no parameters, or its peers hang."""
    waiting, broken = run_ranks_or_raise(_break_a_gradient_sync, world_size=2, limit_s=60)
    assert broken[1] is not None
    assert "gradient sync of bucket 1 failed (ArithmeticError: broken on purpose)" in broken[1]
    assert "layers.0.bias, layers.0.weight" in broken[1]
    assert waiting[1] is not None
    assert "gradient sync of bucket 1 failed" in waiting[1]


def _convert_batch_norm() -> tuple[str, str]:
    seen = []

    class Look(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            seen.append(type(pl_module.norm).__name__)
            pl_module.norm.eval()  # type: ignore[union-attr]

    module = BatchNormed()
    trainer(CommOptDDP(), sync_batchnorm=True, callbacks=[Look()]).fit(module, loader())
    return seen[0], type(module.norm).__name__


def test_batch_norm_is_converted_and_back() -> None:
    """If it fails, Trainer(sync_batchnorm=True) has no effect; torch trains the converted layers on GPUs only."""
    assert run_ranks(_convert_batch_norm, world_size=1) == [("SyncBatchNorm", "_BatchNormXd")]
