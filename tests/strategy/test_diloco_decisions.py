"""What ranks decide in a fit with DiLoCo: all the same."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support.diloco_fits import fit
from support.lightnings import ModelCheckpoint, callbacks
from support.strategy_models import Tiny
from support.warm_ranks import run_ranks


class _Deciding(Tiny):
    """Lets all ranks decide within a batch, logs beside that, and ends the fit when rank 0 wants to."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        strategy, rank = self.trainer.strategy, self.global_rank
        self.decided = [strategy.reduce_boolean_decision(x) for x in (True, rank == 0)]
        self.decided += [strategy.reduce_boolean_decision(x, all=False) for x in (False, rank == 0)]
        self.total = float(strategy.reduce(torch.ones(()), reduce_op="sum"))
        self.log("rank", float(rank), sync_dist=True)
        return super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        stop = self.global_step == 1 and self.global_rank == 0
        self.trainer.should_stop = self.trainer.strategy.reduce_boolean_decision(stop, all=False)


def _decide() -> tuple[list[bool], float, float, int]:
    model = _Deciding()
    fit(model, max_epochs=1)
    return model.decided, model.total, float(model.trainer.callback_metrics["rank"]), model.global_step


def test_what_a_step_asks_all_ranks_has_their_answer() -> None:
    """If it fails, ranks go different ways after a decision that they have made together."""
    for rank, answers in enumerate(run_ranks(_decide)):
        assert answers == ([True, False, False, True], 2.0, float(rank), 2)


class _Monitored(Tiny):
    """Logs numbers of which neither rank has the least mean or the largest sum in the same step as both together."""

    numbers = ((5, 1, 6, 3, 9, 9), (6, 9, 2, 9, 4, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        own = float(self.numbers[self.global_rank][self.global_step])
        self.log("own", own, sync_dist=True)
        self.log("total", own, on_step=True, on_epoch=True, sync_dist=True, reduce_fx="sum")
        self.log("unreduced", own)
        return super().training_step(batch, batch_idx)


def _names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.ckpt"))


def _save(folder: Path) -> list[tuple[str, dict[str, float]]]:
    settings: dict[str, dict[str, Any]] = {
        "own": {"filename": "{step}_{own:.1f}_{unreduced:.0f}", "save_top_k": 2, "every_n_train_steps": 1},
        "total": {"filename": "{step}_{total:.0f}", "monitor": "total", "mode": "max", "every_n_train_steps": 1},
        "epoch": {"filename": "{step}_{total:.0f}_{own:.1f}", "save_top_k": -1},
        "timed": {
            "filename": "{step}",
            "monitor": None,
            "save_top_k": -1,
            "train_time_interval": timedelta(microseconds=1),
        },
    }
    saving = [
        ModelCheckpoint(folder / name, **{"monitor": "own", "auto_insert_metric_name": False, **options})
        for name, options in settings.items()
    ]
    fit(_Monitored(), *saving, enable_checkpointing=True)
    return [
        (of.best_model_path, {Path(path).stem: float(score) for path, score in of.best_k_models.items()})
        for of in saving
    ]


def test_ranks_save_and_remove_the_same_checkpoints(tmp_path: Path) -> None:
    """If it fails, a rank takes another checkpoint for the best, which nobody has saved, or removes files in use."""
    first, second = run_ranks(_save, tmp_path)
    assert first == second
    assert [Path(path).is_file() for path, _ in first] == [True] * 4
    own, total, epoch, _ = (scores for _, scores in first)
    assert own == {"2_5.0_1": 5.0, "3_4.0_6": 4.0}
    assert total == {"5_13": 13.0}
    assert epoch == {"3_29_4.0": 4.0, "6_36_5.5": 5.5}
    saved = {"own": [*own], "total": [*total], "epoch": [*epoch], "timed": ["2", "4", "6"]}
    for folder, names in saved.items():
        assert _names(tmp_path / folder) == names, folder
        assert _names(tmp_path / folder / "lightning_commopt_ranks") == names, folder


class _Stopped(Tiny):
    """Logs a number that becomes better from epoch to epoch until epoch 2 in the mean, but on no rank."""

    numbers = ((5.0, 6.0, 1.0, 9.0, 1.0), (5.0, 2.0, 4.0, 9.0, 1.0))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("own", self.numbers[self.global_rank][self.current_epoch], sync_dist=True)
        return super().training_step(batch, batch_idx)


def _stop() -> tuple[int, float]:
    stopping = callbacks.EarlyStopping("own", patience=1, check_on_train_epoch_end=True)
    model = _Stopped()
    fit(model, stopping, max_epochs=5)
    return model.trainer.current_epoch, float(stopping.best_score)


def test_ranks_stop_early_by_what_all_have_logged() -> None:
    """If it fails, a fit ends as soon as the value of a single rank is no better than before."""
    assert run_ranks(_stop) == [(4, 2.5)] * 2
