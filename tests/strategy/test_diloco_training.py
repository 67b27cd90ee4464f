"""Ways to train with DiLoCo: what a Trainer does in other strategies works, and all ranks end with equal weights."""

from __future__ import annotations

import contextlib
import csv
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from lightning_commopt import CommOptDiLoCo, OptionError
from lightning_commopt.sync.diloco.errors import UnequalStepsError
from support.lightnings import (
    Callback,
    CSVLogger,
    LightningModule,
    MixedPrecision,
    ModelCheckpoint,
    Trainer,
    callbacks,
)
from support.strategy_models import BatchNormed, Gan, Manual, Params, Tiny, assert_same, loader, numbers, trainer
from support.training_modes import MODES
from support.warm_ranks import run_ranks

_STREAMING = {"sync_every": 3, "fragments": 2, "overlap": 1}


class _Scheduled(Tiny):
    """Returns a dict of a loss, and has a scheduler that steps with the optimizer."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:  # type: ignore[override]
        return {"loss": super().training_step(batch, batch_idx)}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class _Complex(Tiny):
    """Has a complex and an empty parameter, and a buffer of integers."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.ones(6, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return self.layers((x * self.phase).abs())


class _PerSample(Manual):
    """Returns a loss for each sample."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:  # type: ignore[override]
        super().training_step(batch, batch_idx)
        return (self(batch[0]) - batch[1]).detach().square()


class _LossesFirst(Gan):
    """Computes both losses before either optimizer steps, as actors with critics do, once or more in a batch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizers: Any = self.optimizers()
        for _ in range(1 + 4 * (batch_idx % 2)):
            losses = [self(batch[0], turn).square().mean() for turn in (0, 1)]
            for loss, optimizer in zip(losses, optimizers, strict=True):
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()


_OWN_MODES: dict[str, Callable[[], LightningModule]] = {
    "scheduled": _Scheduled,
    "complex": _Complex,
    "per_sample": _PerSample,
    "losses_first": _LossesFirst,
}
_MODES = sorted(({*MODES, *_OWN_MODES}) - {"own_collectives"})  # that one couples the ranks in every step
_SHORT = {
    *("gan", "losses_first", "manual_accumulation", "per_sample"),
    *("16_mixed", "unfrozen_in_training", "complex", "swa"),
}


def _fit(mode: str, options: dict[str, Any]) -> Params:
    setup = MODES.get(mode, MODES["automatic"])
    model = _OWN_MODES.get(mode, setup.module)()
    fit = trainer(CommOptDiLoCo(**options), limit_val_batches=0, **setup.trainer())
    fit.fit(model, loader(setup.samples))
    return numbers(model)


def _fit_modes(modes: list[str]) -> dict[str, Params]:
    return {mode: _fit(mode, _STREAMING) for mode in modes}


@pytest.mark.parametrize(
    "modes",
    [
        pytest.param(sorted(_SHORT), id="short"),
        pytest.param([mode for mode in _MODES if mode not in _SHORT], id="others", marks=pytest.mark.exhaustive),
    ],
)
def test_ranks_end_with_equal_weights(modes: list[str]) -> None:
    """If it fails, a way to train leaves something out of the exchanges."""
    first, second = run_ranks(_fit_modes, modes)
    for mode in modes:
        assert_same(first[mode], second[mode], of=mode)
        assert all((x == x).all() for x in first[mode].values()), mode


class _Steps(Callback):
    """Keeps the number of steps of the rounds after each batch, and the loss scale."""

    def __init__(self) -> None:
        self.num_steps: list[int] = []
        self.scales: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        strategy: Any = trainer.strategy
        self.num_steps.append(strategy.rounds.num_steps)
        if isinstance(trainer.precision_plugin, MixedPrecision):
            assert trainer.precision_plugin.scaler is not None
            self.scales.append(trainer.precision_plugin.scaler.get_scale())


class _Overflowing(Tiny):
    """Has an infinite gradient on rank 1 in the second batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx == 1 and self.global_rank == 1 else loss


def _count() -> tuple[list[int], list[int], list[float], int]:
    accumulated, two, scaled = _Steps(), _Steps(), _Steps()
    options: dict[str, Any] = {"limit_val_batches": 0, "max_epochs": 1}
    strategy = CommOptDiLoCo(sync_every=2)
    trainer(strategy, accumulate_grad_batches=2, callbacks=[accumulated], **options).fit(Tiny(), loader(56))
    gan = MODES["gan"]
    trainer(CommOptDiLoCo(sync_every=2), callbacks=[two], **options).fit(gan.module(), loader(32))
    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=256.0))
    trainer(CommOptDiLoCo(sync_every=3), plugins=[plugin], callbacks=[scaled], **options).fit(
        _Overflowing(), loader(32)
    )
    return accumulated.num_steps, two.num_steps, scaled.scales, strategy.wire_bytes


def test_steps_of_the_first_optimizer_count() -> None:
    """If it fails, rounds are shorter than ``sync_every``, or gradient scalers drift apart for good."""
    ranks = run_ranks(_count)
    for accumulated, two, _, num_bytes in ranks:
        assert accumulated == [0, 1, 1, 2, 2, 3, 4]  # the last batch of an epoch always steps
        assert two == [1, 2, 3, 4]
        model_bytes = sum(4 * x.numel() for x in Tiny().parameters())
        assert 2 * model_bytes < num_bytes < 2.3 * model_bytes  # two exchanges with reports, known after the fit
    assert [scales for _, _, scales, _ in ranks] == [[256, 256, 128, 128], [256, 128, 128, 128]]


class _Skipping(Tiny):
    """Leaves out the steps of some batches on rank 1."""

    def __init__(self, *skipped: int) -> None:
        super().__init__()
        self.skipped = skipped

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if self.global_rank == 1 and batch_idx in self.skipped:
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)


class _Saving(Callback):
    """Saves a checkpoint after the third batch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if args[-1] == 2:
            trainer.save_checkpoint(self.path)


def _skip(folder: Path) -> tuple[list[str], Params]:
    told = []
    plain: dict[str, Any] = {"limit_val_batches": 0, "limit_train_batches": 6}
    timing = {**plain, "callbacks": [callbacks.Timer(timedelta(hours=1))]}
    validating: dict[str, Any] = {"val_check_interval": 3}
    choosing = {"callbacks": [ModelCheckpoint(folder, every_n_train_steps=3)], "enable_checkpointing": True, **plain}
    saving = {"callbacks": [_Saving(folder / "saved.ckpt")], **plain}
    overlapped = {"overlap": 1}
    cases: list[tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]] = [
        ((1,), {}, plain),
        ((3,), {}, timing),
        ((1, 2, 3, 4), overlapped, {**plain, "limit_train_batches": 7}),
        ((5,), {}, plain),
        ((1,), overlapped, validating),
        ((1,), overlapped, choosing),
        ((1,), {}, saving),
    ]
    for skipped, plan, options in cases:
        fit = trainer(CommOptDiLoCo(sync_every=3, **plan), **{"max_epochs": 1, **options})
        with pytest.raises(UnequalStepsError) as caught:
            fit.fit(_Skipping(*skipped), loader(56), loader(8))
        told.append(str(caught.value).partition(". All ranks")[0])
    model = _Skipping(5)
    strategy = CommOptDiLoCo(sync_every=5, overlap=1, mixing=0.0, fragments=2, outer_momentum=0.0)
    trainer(strategy, max_epochs=1, **plain).fit(model, loader(56))
    return told, numbers(model)


def test_ranks_with_different_numbers_of_steps(tmp_path: Path) -> None:
    """If it fails, ranks that step in different batches wait for each other until the timeout, without a reason."""
    (told, final), (others, other) = run_ranks(_skip, tmp_path, group_timeout_s=20)
    assert told == others
    first, *rest = [text.partition(": ")[2] for text in told]
    # Before Lightning 2.6 nothing makes ranks meet between two batches.
    assert first in [
        f"rank 0 is at step 3 in batch 3, rank 1 is {at}" for at in ("after step 2", "at step 3 in batch 4")
    ]
    ended = "rank 0 is at step 6 in batch 6, rank 1 has ended after step 5"
    assert rest == [
        ended,
        "rank 0 is at step 3 in batch 3, rank 1 is at step 3 in batch 7",
        ended,
        *["rank 0 is at step 3 in batch 3, rank 1 is after step 2"] * 3,
    ]
    assert_same(final, other)  # a step after the same exchanges


class _Validating(BatchNormed):
    """Keeps the weights that it validates; may raise in a validation."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.breaks, self.validated = breaks, list[Params]()

    def on_validation_epoch_start(self) -> None:
        self.validated.append(numbers(self))
        if self.breaks:
            raise ArithmeticError("broken on purpose")


def _validate(folder: Path) -> tuple[dict[str, list[Params]], Params, list[dict[str, str]], list[str]]:
    seen, warned = {}, list[str]()
    options: dict[str, Any] = {"val_check_interval": 3, "max_epochs": 1, "callbacks": []}
    for weights in ("global", "local"):
        model, strategy = _Validating(), CommOptDiLoCo(sync_every=4, eval_weights=weights)
        logger = CSVLogger(folder, weights, "")
        fit = trainer(strategy, **{**options, "logger": logger, "log_every_n_steps": 1})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit.fit(model, loader(48), loader(8))
        warned += [str(warning.message) for warning in caught if "outer_momentum" in str(warning.message)]
        seen[weights] = [*model.validated, numbers(model)]
    saving = ModelCheckpoint(folder / "saved", "{step}", monitor="val_loss", save_top_k=-1)
    broken = _Validating(breaks=True)
    fit = trainer(CommOptDiLoCo(sync_every=4), **options)
    with contextlib.suppress(ArithmeticError):
        fit.fit(broken, loader(48), loader(8))
    model = _Validating()
    options |= {"callbacks": [saving], "enable_checkpointing": True}
    fit = trainer(CommOptDiLoCo(sync_every=4), **options)
    fit.fit(model, loader(48), loader(8))
    fit.test(model, loader(8), verbose=False)
    trainer(CommOptDiLoCo()).validate(model, loader(8), folder / "saved" / "step=3.ckpt", verbose=False)
    assert_same(numbers(model), numbers(broken))
    dist.barrier()
    with open(folder / "global" / "metrics.csv", encoding="utf-8") as file:
        rows = [*csv.DictReader(file)]
    return seen, numbers(broken), rows, warned


def test_validation_uses_global_weights(tmp_path: Path) -> None:
    """If it fails, a validation judges one worker, or a fit goes on with other weights than before it."""
    ranks = run_ranks(_validate, tmp_path)
    (first, *_), (second, *_) = ranks
    assert len(first["global"]) == 3
    for a, b in zip(first["global"], second["global"], strict=True):
        assert_same(a, b)
    assert (first["local"][0]["layers.0.weight"] != second["local"][0]["layers.0.weight"]).any()
    assert_same(first["local"][-1], first["global"][-1])  # a validation changes nothing
    start = numbers(BatchNormed())
    assert_same(first["global"][0], start)  # no exchange has been yet
    for _, broken, *_ in ranks:
        assert_same(broken, start)
    saved = torch.load(tmp_path / "saved" / "step=3.ckpt", weights_only=True)["state_dict"]
    assert_same({name: x.double().numpy() for name, x in saved.items()}, start)
    own = torch.load(tmp_path / "saved" / "lightning_commopt_ranks" / "step=3.ckpt" / "rank_0.ckpt", weights_only=True)
    assert not torch.equal(own["weights"][0][0], saved["layers.0.weight"])
    rows, warned = ranks[0][2:]
    assert len(warned) == 1  # on rank 0, once
    assert "too large for sync_every=4 and 1 exchange: compare the loss with outer_lr=1.0" in warned[0]
    logged = {name: [row[name] for row in rows if row.get(name)] for name in rows[0] if name.startswith("diloco/")}
    assert logged.keys() == {"diloco/drift/fragment_0", "diloco/loss/worker_0", "diloco/loss/worker_1"}
    assert all(len(values) == 1 and float(values[0]) > 0 for values in logged.values()), logged


class _Synchronized(BatchNormed):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.SyncBatchNorm(6)  # type: ignore[assignment]


class _Divided(Tiny):
    def configure_optimizers(self) -> Any:
        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.SGD, lr=0.1)


def _refused() -> None:
    with pytest.raises(OptionError, match="use BatchNorm, whose statistics the exchanges average"):
        trainer(CommOptDiLoCo(), limit_val_batches=0).fit(_Synchronized(), loader())
    pruning = callbacks.ModelPruning("l1_unstructured", amount=0.3)
    with pytest.raises(OptionError, match="ModelPruning is not possible with DiLoCo"):
        trainer(CommOptDiLoCo(), callbacks=[pruning], limit_val_batches=0).fit(Tiny(), loader())
    with pytest.raises(OptionError, match="ZeroRedundancyOptimizer divides each step among ranks that DiLoCo trains"):
        trainer(CommOptDiLoCo(), limit_val_batches=0).fit(_Divided(), loader())
    trainer(CommOptDiLoCo(inner="ddp"), limit_val_batches=0, max_epochs=1).fit(_Divided(), loader())


def test_what_couples_workers_is_refused() -> None:
    """If it fails, ranks wait for each other in every forward or step, or exchanges average masks to fractions."""
    run_ranks(_refused)


def _train_calmly(patience_s: float | None) -> Params:
    model = BatchNormed()
    strategy = CommOptDiLoCo(sync_every=4, fragments=2, patience_s=patience_s)
    trainer(strategy, max_epochs=3).fit(model, loader(288), loader(288))
    return numbers(model)


@pytest.mark.exhaustive
def test_patience_changes_no_bit_of_a_healthy_fit() -> None:
    for plain, patient in zip(run_ranks(_train_calmly, None), run_ranks(_train_calmly, 120.0), strict=True):
        assert_same(patient, plain)
