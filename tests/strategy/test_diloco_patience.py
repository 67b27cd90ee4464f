"""CommOptDiLoCo with ``patience_s``: a rank of a Trainer freezes, the others go on, and it joins again."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from lightning_commopt import CommOptDiLoCo
from lightning_commopt.plan import OptionError
from lightning_commopt.sync.diloco.patient import PatientExchange
from support.ranks import run_ranks
from support.strategy_models import BatchNormed, Params, assert_same, loader, numbers, trainer

_SAMPLES, _STEPS_PER_EPOCH = 3 * 4 * 24, 24
_PLAN: dict[str, Any] = {"sync_every": 4, "fragments": 2}


class _Freezing(BatchNormed):
    """Freezes rank 2 before its 10th step; rank 0 lets it go on after two exchanges without it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_trained = 0

    def on_fit_start(self) -> None:
        self.pids: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(self.pids, os.getpid())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 9 and self.global_rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.trainer.global_step == 16 and self.global_rank == 0:
            os.kill(self.pids[2], signal.SIGCONT)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.num_trained += 1
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)


def _train(model: BatchNormed, **options: Any) -> tuple[Params, bool]:
    # Without watch only exchanges use the file that the ranks have as a store: a rank that froze while it holds the
    # file's lock would stop them all.
    strategy = CommOptDiLoCo(**_PLAN, watch=False, **options)
    is_patient: list[bool] = []

    fit = trainer(strategy, max_epochs=3)
    original = strategy._make_exchange

    def make() -> Any:
        exchange = original()
        is_patient.append(isinstance(exchange, PatientExchange))
        return exchange

    strategy._make_exchange = make  # type: ignore[method-assign]
    data = loader(_SAMPLES)
    fit.fit(model, data, data)
    return numbers(model), is_patient == [True]


def _freeze() -> tuple[Params, int]:
    model = _Freezing()
    weights, _ = _train(model, patience_s=3.0)
    return weights, model.num_trained


def test_a_frozen_rank_of_a_trainer_joins_again() -> None:
    results = run_ranks(_freeze, world_size=3)
    for weights, _ in results[1:]:
        assert_same(weights, results[0][0])
    trained = [number for _, number in results]
    assert trained[:2] == [3 * _STEPS_PER_EPOCH] * 2
    assert 10 < trained[2] < 3 * _STEPS_PER_EPOCH


def _calm(patience_s: float | None) -> tuple[Params, bool]:
    return _train(BatchNormed(), patience_s=patience_s)


@pytest.mark.exhaustive
def test_patience_changes_no_bit_of_a_healthy_fit() -> None:
    plain, patient = run_ranks(_calm, None), run_ranks(_calm, 120.0)
    assert [is_patient for _, is_patient in (*plain, *patient)] == [False, False, True, True]
    for weights, _ in (*plain, *patient):
        assert_same(weights, plain[0][0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patience_s": 0}, "patience_s must be a number of seconds above 0 or None, got 0"),
        ({"patience_s": "long"}, "patience_s must be a number of seconds above 0 or None, got 'long'"),
        ({"patience_s": 3, "inner": "ddp"}, "patience_s is not possible with inner"),
        ({"patience_s": 3, "sigterm_every_n_steps": 5}, "patience_s and sigterm_every_n_steps exclude each other"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        CommOptDiLoCo(**options)
