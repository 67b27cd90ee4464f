"""``comm_time/...`` as the monitor of other callbacks: the same on all ranks at the same step, from epoch 0 on."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_fit import Net, fit
from torch.utils.data import DataLoader, TensorDataset

from lightning_commopt import CommOptDDP
from lightning_commopt.callbacks import CommTimeMonitor
from lightning_commopt.callbacks import comm_time as comm_time_module
from lightning_commopt.callbacks import publisher as publisher_module
from lightning_commopt.callbacks.all_ranks import AllRanks
from lightning_commopt.callbacks.publisher import LOGGED_BY_DEFAULT
from support.lightnings import Callback, EarlyStopping, LightningModule, ModelCheckpoint, Trainer
from support.ranks import run_ranks
from support.strategy_models import trainer

MONITOR = "comm_time/exposed_share"


class Witness(Callback):
    """Notes what other callbacks would see, and when."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, dict[str, float]]] = []

    def _look(self, hook: str, trainer: Trainer) -> None:
        found = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.seen.append((hook, trainer.global_step, found))

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self._look("batch", trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._look("validation", trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._look("epoch", trainer)


class LateRanks(AllRanks):
    """Messages that have not come yet on this rank whenever that may be said."""

    def take(self, limit_s: float = 0.0) -> Any:
        return super().take(limit_s) if limit_s > 0 else None


def seen(every_n_steps: int, options: dict[str, Any], late_rank: int) -> tuple[list[Any], dict[str, float]]:
    witness = Witness()

    class Late(Callback):
        def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            if trainer.global_rank == late_rank:
                comm_time_module.AllRanks = LateRanks  # type: ignore[misc]

    monitor = CommTimeMonitor(every_n_steps=every_n_steps, num_warmup_steps=2, save_records=False)
    fit(monitor, CommOptDDP(), callbacks=[witness, Late()], max_steps=-1, max_epochs=2, **options)
    return witness.seen, monitor.summary


CASES: list[tuple[int, dict[str, Any], tuple[str, int]]] = [
    (50, {}, ("batch", 20)),
    (50, {"validates": True, "val_check_interval": 6}, ("validation", 6)),
    (4, {"accumulate_grad_batches": 2}, ("batch", 8)),
]


def all_seen() -> list[tuple[list[Any], dict[str, float]]]:
    return [seen(every_n_steps, options, late_rank=1) for every_n_steps, options, _ in CASES]


def test_ranks_see_the_same_at_the_same_step() -> None:
    """If it fails, a ModelCheckpoint on one rank waits for a collective that the other ranks never start."""
    ranks = run_ranks(all_seen)
    for (one, summary), (other, _), (_, _, first) in zip(*ranks, CASES, strict=True):
        assert repr(one) == repr(other)  # NaN as well, as one bucket tells no latency
        with_metrics = [(hook, step) for hook, step, found in one if MONITOR in found]
        assert with_metrics[0] == first
        last = one[-1][2]
        assert set(last) == {f"comm_time/{name}" for name in LOGGED_BY_DEFAULT}
        assert 0 < last[MONITOR] < 1
        assert summary


def monitored(folder: str, every_n_steps: int, options: dict[str, Any]) -> tuple[str, float, dict[str, float], int]:
    checkpoint = ModelCheckpoint(folder, monitor=MONITOR, save_top_k=2, filename="{epoch}-{step}", **options)
    early = EarlyStopping(monitor="comm_time/step_s", patience=100)
    monitor = CommTimeMonitor(every_n_steps=every_n_steps, num_warmup_steps=2, save_records=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*could not find the monitored key.*")
        fit(monitor, CommOptDDP(), callbacks=[early, checkpoint], max_steps=-1, max_epochs=4, enable_checkpointing=True)
    scores = {Path(path).name: float(score) for path, score in checkpoint.best_k_models.items()}
    assert checkpoint.best_model_score is not None
    return Path(checkpoint.best_model_path).name, float(checkpoint.best_model_score), scores, early.stopped_epoch


def all_monitored(folder: str) -> list[tuple[str, float, dict[str, float], int]]:
    cases: list[tuple[int, dict[str, Any]]] = [(50, {}), (5, {}), (5, {"every_n_train_steps": 10})]
    return [monitored(f"{folder}/{index}", *case) for index, case in enumerate(cases)]


@pytest.mark.exhaustive
def test_checkpoints_by_exposed_share(tmp_path: Path) -> None:
    """Epochs of 20 steps end before a first window of 50, and between windows of 5."""
    one, other = run_ranks(all_monitored, str(tmp_path))
    assert one == other
    for index, (name, score, scores, stopped_epoch) in enumerate(one):
        assert score == min(scores.values())
        assert 0 < score < 1
        assert stopped_epoch == 0
        assert {path.name for path in (tmp_path / str(index)).glob("*.ckpt")} == set(scores)
        assert name in scores


def test_after_the_fit_it_is_the_summary() -> None:
    """What a sweep reads from ``trainer.callback_metrics``."""

    class Last(Callback):
        def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            found.update({name: float(value) for name, value in trainer.callback_metrics.items()})

    found: dict[str, float] = {}
    monitor = CommTimeMonitor(num_warmup_steps=2, save_records=False)
    fit(monitor, devices=1, callbacks=[Last()])
    assert found["comm_time/step_s"] == pytest.approx(monitor.summary["step_s"])


def shown() -> list[list[tuple[dict[str, float], dict[str, float]]]]:
    class Bar(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            bars.append((dict(trainer.progress_bar_metrics), monitor.metrics))

    found = []
    for prog_bar in (True, False):
        bars: list[tuple[dict[str, float], dict[str, float]]] = []
        monitor = CommTimeMonitor(every_n_steps=4, save_records=False, prog_bar=prog_bar)
        fit(monitor, CommOptDDP(), callbacks=[Bar()])
        found.append(bars)
    return found


def test_the_progress_bar_shows_the_share_if_it_is_asked_to() -> None:
    """If it fails, nobody sees before the end of a fit what it waits for, or a bar has what nobody asked for."""
    for bars, others in run_ranks(shown):
        assert bars[0] == ({}, {})
        for in_bar, metrics in bars:
            assert in_bar.get("exposed_share") == metrics.get("exposed_share")
        assert 0 < bars[-1][0]["exposed_share"] < 1
        assert others[-1][0] == {}


def alone() -> tuple[dict[str, float], int]:
    def fail(description: str) -> None:
        raise RuntimeError("connection refused")

    publisher_module.borrow_host_group = fail  # type: ignore[assignment]
    witness = Witness()
    monitor = CommTimeMonitor(every_n_steps=5, num_warmup_steps=0, save_records=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(monitor, CommOptDDP(), callbacks=[witness])
    (message,) = [str(warning.message) for warning in caught if "CommTimeMonitor" in str(warning.message)]
    assert "cannot connect over gloo (connection refused)" in message
    return witness.seen[-1][2], len(monitor.metrics)


def uneven() -> tuple[dict[str, float], int]:
    """Trains on ranks that end their epochs after different steps."""
    options: dict[str, Any] = {"num_warmup_steps": 0, "save_records": False, "print_summary": False}
    witness, monitor = Witness(), CommTimeMonitor(every_n_steps=4, **options)
    data = TensorDataset(torch.ones(2 + dist.get_rank(), 8))
    run = trainer(
        CommOptDDP(uneven_batches="allow"),
        callbacks=[monitor, witness],
        max_steps=6,
        max_epochs=-1,
        use_distributed_sampler=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.fit(Net(), DataLoader(data))
    assert monitor.summary["step_s"] > 0
    return witness.seen[-1][2], len(monitor.metrics)


@pytest.mark.parametrize("train", [alone, uneven])
def test_nothing_is_shared_that_differs_between_ranks(train: Callable[[], tuple[dict[str, float], int]]) -> None:
    """If it fails, ranks whose times cannot be gathered decide differently, or wait for each other."""
    for found, num_metrics in run_ranks(train):
        assert found == {}
        assert num_metrics > 0
