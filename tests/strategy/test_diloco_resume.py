"""Fits with DiLoCo that are saved, and resumed exactly, or from their global weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_commopt import CommOptDiLoCo
from support.lightnings import ModelCheckpoint
from support.ranks import run_ranks
from support.strategy_models import BatchNormed, Params, assert_same, loader, numbers, trainer

_OVERLAPPED = {
    "sync_every": 4,
    "fragments": 2,
    "overlap": 1,
    "comm_hook": {"name": "int4", "error_feedback": True, "block_size": 32},
}


class _Steady(BatchNormed):
    """Trains on a batch that depends on step and rank only, since Lightning begins an epoch anew that it resumes."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        generator = torch.Generator().manual_seed(2 * self.global_step + self.global_rank)
        x = torch.randn(batch[0].shape, generator=generator)
        return super().training_step((x, x.sum(1, keepdim=True).sin()), batch_idx)


def _fit(folder: Path, max_steps: int, resumed: Path | None = None, /, **options: Any) -> Params:
    """Trains on the ranks of the group, with a checkpoint after each step; returns the final weights."""
    model = _Steady()
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    fit = trainer(
        CommOptDiLoCo(**options),
        max_steps=max_steps,
        max_epochs=99,
        limit_val_batches=0,
        callbacks=[saving],
        enable_checkpointing=True,
    )
    fit.fit(model, loader(48), ckpt_path=resumed)
    return numbers(model)


def _resume_everywhere(folder: Path, options: dict[str, Any], steps: list[int]) -> Params:
    expected = _fit(folder / "whole", 9, **options)
    for step in steps:
        # A checkpoint in the middle of a fit, and the last one of a fit, which has exchanged once more.
        _fit(folder / f"short_{step}", step, **options)
        for source in ("whole", f"short_{step}"):
            got = _fit(folder / f"{source}_{step}", 9, folder / source / f"step={step}.ckpt", **options)
            assert_same(got, expected, of=f"{source} {step}")
    return expected


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        pytest.param(_OVERLAPPED, [4, 5], id="overlapped"),
        pytest.param(_OVERLAPPED, [1, 2, 3, 6, 7, 8], id="all_steps", marks=pytest.mark.exhaustive),
        pytest.param({"sync_every": 3}, [1, 2, 3], id="plain", marks=pytest.mark.exhaustive),
    ],
)
def test_resumed_fit_equals_the_uninterrupted_one(options: dict[str, Any], steps: list[int], tmp_path: Path) -> None:
    """If it fails, a part of the state of a round is lost in a checkpoint, or mixed up between ranks."""
    first, second = run_ranks(_resume_everywhere, tmp_path, options, steps)
    assert_same(first, second)
