"""Trains as a schedule says, as one rank, and returns what a test asks about it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from healthy_schedules import HOOKS, Call, Schedule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_commopt import CommOptDDP
from lightning_commopt.callbacks import HangMonitor
from lightning_commopt.watch import times
from lightning_commopt.watch.hangs import rank_side
from support.lightnings import Callback, Logger, ModelCheckpoint, TorchCheckpointIO, Trainer
from support.strategy_models import FEATURES, Params, Tiny, numbers, trainer

LIMIT_S = 240.0
"""Only against waiting for ever."""

_TICK_S = 0.02
_GONE_S = 20.0
_QUICK = """
from lightning_commopt.watch import times
times.HANG_LOOK_S, times.CONFIRM_S, times.ASK_AGAIN_S = 0.05, 0.1, 0.2
main()
"""
"""Lets a watcher look more often than it would."""


class Broken(Exception):  # noqa: N818
    """What all ranks raise where a schedule says so."""


def deep(calls: int) -> None:
    """Changes the stack, as Python code does that computes."""
    if calls:
        deep(calls - 1)


class Pauses:
    """Sleeps, or computes on ranks of odd number, where the present call of a schedule says so.

    Args:
        after_s: unit of the delays; 0 for none.
    """

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self.begin(Call())

    def begin(self, call: Call) -> None:
        """A call begins."""
        self.call = call
        self._seconds = {(each.place, each.rank, each.call): each.factor * self._after_s for each in call.delays}
        self._counts: Counter[str] = Counter()

    def at(self, place: str, rank: int, number: int | None = None) -> int:
        """Waits if a rank does so at a place when it comes there for the ``number``-th time; None to count."""
        if number is None:
            number = self._counts[place]
            self._counts[place] += 1
        end = time.monotonic() + self._seconds.get((place, rank, number), 0.0)
        while time.monotonic() < end:
            deep(20) if rank % 2 else time.sleep(max(0.0, end - time.monotonic()))
        return number


class SlowHooks(Callback):
    """Sleeps in its hooks, and ends a fit on all ranks."""

    def __init__(self, pauses: Pauses) -> None:
        self.pauses = pauses

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        number = self.pauses.at("on_train_batch_start", trainer.global_rank)
        if number == 1 and self.pauses.call.ends == "raise":
            raise Broken
        if number == 1 and self.pauses.call.ends == "should_stop":
            trainer.should_stop = True


def _add_hook(name: str) -> None:
    # As of a callback that was made by another: its functions are not called as their hooks are.
    def sleep(self: SlowHooks, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self.pauses.at(name, trainer.global_rank)

    setattr(SlowHooks, name, sleep)


for _name in HOOKS:
    if _name not in vars(SlowHooks):
        _add_hook(_name)


class SlowCheckpoint(ModelCheckpoint):
    """Sleeps before it decides what to save."""

    def __init__(self, folder: Path, pauses: Pauses) -> None:
        super().__init__(folder, save_last=True, every_n_train_steps=2)
        self.pauses = pauses

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.pauses.at("checkpoint", trainer.global_rank)
        super().on_train_epoch_end(trainer, pl_module)


class SlowWrites(TorchCheckpointIO):
    """Sleeps before it writes a file, which rank 0 alone does."""

    def __init__(self, pauses: Pauses) -> None:
        self.pauses = pauses

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.pauses.at("write", 0)
        super().save_checkpoint(*args, **kwargs)


class SlowLogger(Logger):
    """Sleeps before it logs, on rank 0."""

    name = version = "slow"

    def __init__(self, pauses: Pauses) -> None:
        super().__init__()
        self.pauses = pauses

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if dist.get_rank() == 0:
            self.pauses.at("logger", 0)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


class Rows(Dataset[Any]):
    """Rows of a rank; reading those of one batch may take long."""

    def __init__(self, rank: int, place: str, num_batches: int, pauses: Pauses) -> None:
        generator = torch.Generator().manual_seed(rank)
        self.x = torch.randn(num_batches, 4, FEATURES, generator=generator)
        self.rank, self.place, self.pauses = rank, place, pauses

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        self.pauses.at(self.place, self.rank, index)
        return self.x[index], self.x[index].sum(1, keepdim=True).sin()


class Stream(IterableDataset[Any]):
    """The same without a length."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        yield from (self.rows[index] for index in range(len(self.rows)))


class Model(Tiny):
    """Trains as the present call says."""

    def __init__(self, pauses: Pauses) -> None:
        super().__init__()
        self.pauses = pauses

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.pauses.at("forward", self.global_rank)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.pauses.at("validation_step", self.global_rank)
        super().validation_step(batch, batch_idx)

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader("batch")

    def val_dataloader(self) -> DataLoader[Any] | list[Any]:
        if self.pauses.call.method == "fit":
            return self._loader("validation_batch") if self.pauses.call.validates else []
        return self._loader("batch")

    test_dataloader = predict_dataloader = train_dataloader

    def _loader(self, place: str) -> DataLoader[Any]:
        rows = Rows(self.global_rank, place, self.pauses.call.num_batches, self.pauses)
        data = rows if self.pauses.call.has_length else Stream(rows)
        num_workers = self.pauses.call.num_workers
        context = "fork" if num_workers else None  # another start imports torch, for longer than some limits
        return DataLoader(data, batch_size=None, num_workers=num_workers, multiprocessing_context=context)


class Program:
    """Makes the calls of a schedule, one after the other.

    Args:
        schedule: of the calls.
        after_s: of the monitors, and unit of the delays; 0 to train without delays and without any watching.
        folder: for checkpoints and reports.
    """

    def __init__(self, schedule: Schedule, after_s: float, folder: Path) -> None:
        self._schedule, self._after_s, self._folder = schedule, after_s, folder
        self._pauses = Pauses(after_s)
        self._monitor: Any = None
        self._trainer: Any = None
        self._model = Model(self._pauses)

    def run(self) -> tuple[list[int], Params]:
        """Returns the step after every call, and the weights in the end."""
        steps = []
        for number, call in enumerate(self._schedule.calls):
            self._pauses.begin(call)
            if call.keeps_trainer:
                self._trainer.fit_loop.max_epochs += call.max_epochs
            else:
                self._trainer = self._make_trainer(call, self._folder / f"call{number}")
            with contextlib.suppress(Broken):
                getattr(self._trainer, call.method)(self._model)
            steps.append(self._trainer.global_step)
        return steps, numbers(self._model)

    def _make_trainer(self, call: Call, folder: Path) -> Trainer:
        callbacks: list[Any] = [SlowHooks(self._pauses)]
        if self._after_s:
            if call.monitor != "kept":
                self._monitor = HangMonitor(after_s=self._after_s, action="abort", dirpath=self._folder)
            callbacks.insert(int(call.monitor != "first"), self._monitor)
        if call.saves:
            callbacks.append(SlowCheckpoint(folder, self._pauses))
        return trainer(
            CommOptDDP(comm_hook=call.comm_hook, watch=self._after_s > 0),
            devices=self._schedule.world_size,
            max_epochs=call.max_epochs,
            max_steps=call.max_steps,
            accumulate_grad_batches=call.accumulate,
            num_sanity_val_steps=call.num_sanity,
            callbacks=callbacks,
            enable_checkpointing=call.saves,
            logger=SlowLogger(self._pauses),
            log_every_n_steps=2,
            use_distributed_sampler=False,
            plugins=[SlowWrites(self._pauses)],
            default_root_dir=self._folder,
        )


def run_on_rank(schedule: Schedule, after_s: float, folder: Path) -> tuple[list[int], list[int], list[str], list[str]]:
    """Trains without and with watching; returns the steps of both, weights that differ, and threads that are left."""
    times.FIT_LOOK_S, times.STALLED_S, times.FIT_GRACE_S = 0.05, after_s / 4, 2 * after_s
    assert rank_side._START.endswith("\nmain()\n")
    rank_side._START = rank_side._START.replace("\nmain()\n", _QUICK)
    expected = Program(schedule, 0.0, folder / "unwatched").run()
    late = folder / f"late{dist.get_rank()}.txt"
    threading.Thread(target=_note_lateness, args=(late,), name="lateness", daemon=True).start()
    before = set(threading.enumerate())
    got = Program(schedule, after_s, folder).run()
    deadline = time.monotonic() + _GONE_S
    while (left := [*map(str, set(threading.enumerate()) - before)]) and time.monotonic() < deadline:
        time.sleep(_TICK_S)  # the thread that waits for the watcher is the last one
    differing = [name for name, values in expected[1].items() if (values != got[1][name]).any()]
    return got[0], expected[0], differing, left


def _note_lateness(path: Path) -> None:
    """Writes by how many seconds this process has been late at most, as often as that grows."""
    most = 0.0
    while True:
        began = time.monotonic()
        time.sleep(_TICK_S)
        late = time.monotonic() - began - _TICK_S
        if late > most + _TICK_S:
            most = late
            path.write_text(str(most))
