"""What ranks wait for between two exchanges of DiLoCo: nothing."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from lightning_commopt import CommOptDiLoCo
from lightning_commopt.sync.diloco.living import LivingRanks
from support.collectives import counted_collectives, needs_hooks
from support.lightnings import Callback, CSVLogger, LightningModule, Trainer, callbacks
from support.ranks import run_ranks
from support.strategy_models import BatchNormed, Params, assert_same, loader, numbers, trainer

_SYNC_EVERY, _SAVE_EVERY = 5, 7


class _Counts(Callback):
    """Notes the collectives before and within each optimizer step, and those of validations."""

    def __init__(self, counted: Counter[str]) -> None:
        self._counted, self._before = counted, Counter[str]()
        self.steps: dict[int, Counter[str]] = {}
        self.validations: list[Counter[str]] = []

    def _take(self) -> Counter[str]:
        taken, self._before = self._counted - self._before, self._counted.copy()
        return taken

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._take()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._add(trainer.global_step)  # of callbacks that follow this one

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._add(trainer.global_step)

    def _add(self, step: int) -> None:
        self.steps[step] = self.steps.get(step, Counter()) + self._take()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._take()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.validations.append(self._take())


class _Logging(BatchNormed):
    """Logs in all ways of which Lightning makes collectives, and validates without any."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("step_loss", loss, on_step=True, on_epoch=True, sync_dist=True, prog_bar=True)
        self.log_dict({"a": loss, "b": 2 * loss}, sync_dist=True, reduce_fx="max")
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("early", float(batch_idx), sync_dist=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log_dict({"late": float(batch_idx)}, on_step=True, on_epoch=True, sync_dist=True, reduce_fx="sum")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


def _count(folder: Path, patience_s: float | None) -> tuple[dict[int, Counter[str]], list[Counter[str]], Params]:
    with counted_collectives(all_groups=True) as counted, patch.object(LivingRanks, "_gather", _counting(counted)):
        counts, model = _Counts(counted), _Logging()
        common = [
            callbacks.LearningRateMonitor(),
            callbacks.ModelCheckpoint(folder, every_n_train_steps=_SAVE_EVERY),
            callbacks.ModelCheckpoint(folder, train_time_interval=timedelta(hours=1)),
            callbacks.ModelCheckpoint(folder, monitor="step_loss", save_top_k=0, every_n_train_steps=1),
            callbacks.EarlyStopping("loss", patience=9, check_on_train_epoch_end=True),
            callbacks.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2),
            callbacks.GradientAccumulationScheduler({0: 2}),
            callbacks.TQDMProgressBar(),
            callbacks.DeviceStatsMonitor(cpu_stats=False),
            callbacks.Timer(timedelta(hours=1)),
            callbacks.ModelSummary(),
        ]
        if hasattr(callbacks, "EMAWeightAveraging"):
            common.append(callbacks.EMAWeightAveraging(decay=0.5))
        fit = trainer(
            CommOptDiLoCo(sync_every=_SYNC_EVERY, patience_s=patience_s),
            callbacks=[*common, counts],
            logger=CSVLogger(folder),
            log_every_n_steps=1,
            val_check_interval=3,
            max_epochs=4,
            enable_progress_bar=True,
            enable_model_summary=True,
            enable_checkpointing=True,
        )
        fit.fit(model, loader(64), loader(8))
        return counts.steps, counts.validations, numbers(model)


def _counting(counted: Counter[str]) -> Any:
    gather = LivingRanks._gather

    def counting(living: LivingRanks, what: str, value: bytes) -> dict[int, bytes]:
        counted[what] += 1
        return gather(living, what, value)

    return counting


@needs_hooks
@pytest.mark.parametrize("patience_s", [None, pytest.param(120.0, marks=pytest.mark.exhaustive)])
def test_steps_between_exchanges_have_no_collective(tmp_path: Path, patience_s: float | None) -> None:
    """If it fails, a rank waits for the others in every step, whatever ``sync_every`` is."""
    first, second = run_ranks(_count, tmp_path, patience_s)
    assert_same(first[2], second[2])
    for steps, validations, _ in (first, second):
        # Checkpoints agree on a path, and Lightning waits for the one who writes; SIGTERM is asked before an exchange.
        silent = [step for step in steps if step % _SYNC_EVERY and step % _SAVE_EVERY]
        assert len(silent) > 8
        assert {step: dict(steps[step]) for step in silent if steps[step]} == {}
        assert steps[_SYNC_EVERY] or patience_s is not None  # those exchanges are over connections of their own
        assert len(validations) > 4
        assert not any(validations[:-1]), validations
