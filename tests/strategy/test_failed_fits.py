"""What a strategy knows and does while an exception that has ended its fit is handled."""

from __future__ import annotations

import os
import signal
import time
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from lightning_commopt import CommOptDDP, CommOptDiLoCo, PowerSGD
from lightning_commopt.strategy.base import has_failed
from lightning_commopt.sync.checkpoint import KEY
from lightning_commopt.sync.gather import values_of_all_ranks
from lightning_commopt.watch import times
from support.lightnings import PACKAGE, Callback, OnExceptionCheckpoint
from support.ranks import run_ranks, run_ranks_or_raise
from support.strategy_models import FEATURES, Tiny, trainer

SIGTERMException = import_module(f"{PACKAGE}.utilities.exceptions").SIGTERMException


class _Fails(Callback):
    """Raises in the first batch, and notes whether the fit has failed: before, and where the exception is handled."""

    def __init__(self, error: BaseException) -> None:
        self._error, self.noted = error, list[bool]()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.noted.append(has_failed(trainer.strategy))
        raise self._error

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.noted.append(has_failed(trainer.strategy))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("error", "is_failure"),
    [(ValueError(), True), (SystemExit(), True), (SIGTERMException(), False), (KeyboardInterrupt(), False)],
    ids=repr,
)
def test_a_fit_has_failed_while_its_error_is_handled(error: BaseException, is_failure: bool) -> None:
    """If it fails, a repeated fit saves no residuals, or a failed rank waits for others before it saves."""
    callback, batches = _Fails(error), DataLoader([torch.zeros(FEATURES)])  # type: ignore[arg-type,var-annotated]
    run: Any = trainer("auto", callbacks=[callback])
    assert not has_failed(run.strategy)
    before = signal.getsignal(signal.SIGINT)
    try:
        raise MemoryError
    except MemoryError:  # the fit repeats one that has failed
        with pytest.raises(SystemExit if isinstance(error, KeyboardInterrupt) else type(error)):
            run.fit(Tiny(), batches, batches)
    finally:
        signal.signal(signal.SIGINT, before)  # Lightning ignores it from Ctrl+C on
    assert callback.noted == [False, is_failure]
    assert not has_failed(run.strategy)


class _Breaks(Tiny):
    """Raises on rank 1: in the third batch of training, or before a validation, whose metric needs all ranks.

    Rank 0 receives a launcher's SIGTERM while it saves, as if rank 1 had ended before.
    """

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._break("training", batch_idx == 2)

    def on_validation_epoch_start(self) -> None:
        self._break("validation", True)

    def _break(self, where: str, is_there: bool) -> None:
        if self.global_rank == 1 and where == self._where and is_there:
            raise ArithmeticError("broken on purpose")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.global_rank == 0:
            with mock.patch.object(dist, "broadcast", side_effect=RuntimeError("Connection closed by peer")):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.05)  # the handler runs in it


class _RaisesLate(Tiny):
    """Raises on all ranks before the first step, on rank 1 later than rank 0 waits for it."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        time.sleep(2 * times.STALLED_S * self.global_rank)
        raise ArithmeticError("broken on purpose")


def _catch_and_go_on(folder: Path) -> list[Any]:
    batches = DataLoader(TensorDataset(torch.ones(8, FEATURES), torch.ones(8, 1)))
    saves = OnExceptionCheckpoint(folder)
    with pytest.raises(ArithmeticError):
        trainer(CommOptDDP(), enable_checkpointing=True, callbacks=[saves]).fit(_RaisesLate(), batches, batches)
    return values_of_all_ranks(dist.get_rank())


def test_a_program_that_catches_the_same_error_on_all_ranks_goes_on(tmp_path: Path) -> None:
    """If it fails, a rank that raises late waits in the checkpoint's barrier, and meets the program's collective."""
    assert run_ranks(_catch_and_go_on, tmp_path, world_size=2) == [[0, 1]] * 2
    assert (tmp_path / "on_exception.ckpt").exists()


def _save_alone(where: str, strategy: Any, folder: Path) -> None:
    batches = DataLoader(TensorDataset(torch.ones(8, FEATURES), torch.ones(8, 1)))
    run: Any = trainer(strategy, enable_checkpointing=True, callbacks=[OnExceptionCheckpoint(folder)])
    run.fit(_Breaks(where), batches, batches)


@pytest.mark.parametrize(
    ("where", "strategy"),
    [
        ("training", CommOptDDP()),
        ("validation", CommOptDDP(comm_hook=PowerSGD(min_compression_rate=0.5))),
        pytest.param("training", CommOptDDP(comm_hook=PowerSGD()), marks=pytest.mark.exhaustive),
        pytest.param("training", CommOptDiLoCo(sync_every=3), marks=pytest.mark.exhaustive),
    ],
    ids=["training", "validation", "compressed", "diloco"],
)
def test_a_rank_that_breaks_alone_lets_the_others_save(where: str, strategy: Any, tmp_path: Path) -> None:
    """If it fails, a rank waits at its checkpoint for others, which are ended meanwhile without a checkpoint."""
    (_, trace_0), (_, trace_1) = run_ranks_or_raise(_save_alone, where, strategy, tmp_path, world_size=2, limit_s=60)
    assert trace_0 is not None
    assert (trace_1 or "").rstrip().endswith("ArithmeticError: broken on purpose")
    checkpoint = torch.load(tmp_path / "on_exception.ckpt", weights_only=True)
    assert checkpoint["global_step"] > 0
    assert not checkpoint.get(KEY, {}).get("ranks")
