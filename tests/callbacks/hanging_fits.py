"""Fits of which one rank keeps the other waiting until that is reported; for ``test_hang_monitor``."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commopt import CommOptDDP, CommOptDiLoCo
from lightning_commopt.callbacks import CommTimeMonitor, HangMonitor
from support.lightnings import Callback, DDPStrategy
from support.strategy_models import Tiny, loader, trainer

AFTER_S = 1.0
LONG_END_AFTER_S = 0.5
LIMIT_S = 120.0
"""Only against waiting for ever."""

STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": DDPStrategy,
    "native": CommOptDDP,
    "int8": lambda: CommOptDDP(comm_hook="int8"),
    "diloco": lambda: CommOptDiLoCo(sync_every=5),
}


def interrupt_main(module: Any) -> None:
    """Rank 1 interrupts rank 0's process, which has started its own. Both wait in Python, so that rank 0 notices."""
    if module.global_rank == 1:
        os.kill(os.getppid(), signal.SIGINT)
    time.sleep(LIMIT_S)


def stop_here(module: Any) -> None:
    module.trainer.should_stop = True


ENDINGS: dict[str, Callable[[Any], object]] = {
    "exit": lambda module: sys.exit(3),
    "interrupt": interrupt_main,
    "should_stop": stop_here,
    "terminated": lambda module: os.kill(os.getpid(), signal.SIGTERM),
    "killed": lambda module: os.kill(os.getpid(), signal.SIGKILL),
}


class Holding(Tiny):
    """On one rank, which is rank 1 but for "buffers", one batch takes until a hang has been reported."""

    def __init__(self, fault: str, folder: Path) -> None:
        super().__init__()
        self.fault, self.report = fault, folder / "hangs" / "report.json"
        if fault == "buffers":
            self.register_buffer("seen", torch.zeros(1))

    def train_dataloader(self) -> Any:
        return loader(48)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        is_at_fault = batch_idx == 4 and self.global_rank == 1
        if self.fault == "forward" and is_at_fault:
            wait_for(self.report)
        if self.fault == "stopped" and is_at_fault:
            stop_until(self.report)
        if self.fault == "collective" and not is_at_fault:
            self.all_gather(torch.ones(3))
        if self.fault in ENDINGS and (is_at_fault or (self.fault == "interrupt" and batch_idx == 4)):
            ENDINGS[self.fault](self)
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.fault == "buffers" and batch_idx == 4 and self.global_rank == 0:
            wait_for(self.report)

    def on_fit_end(self) -> None:
        if self.fault == "long_end" and self.global_rank == 0:
            time.sleep(13 * LONG_END_AFTER_S)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.fault == "callbacks" and self.trainer.global_step == 4 and self.global_rank == 1:
            wait_for(self.report)


class Blocking(Callback):
    """Another callback, whose hook comes after that of the monitor; on one rank it takes until a hang is reported."""

    def __init__(self, report: Path, rank: int = 1, batch: int = 4) -> None:
        self.report, self.rank, self.batch = report, rank, batch

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch and trainer.global_rank == self.rank:
            wait_for(self.report)


class LosingBroadcast(Callback):
    """Makes every rank's broadcast before the second batch fail, as a timeout does."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.broadcast, dist.broadcast = dist.broadcast, self.fail

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            dist.broadcast = self.broadcast

    def fail(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("Timed out waiting 2000ms")


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not path.exists():
        assert time.monotonic() < deadline, "no hang has been reported"
        time.sleep(0.05)


def stop_until(path: Path) -> None:
    """Stops this process; another continues it."""
    waits = f"import os, time\nwhile not os.path.exists({str(path)!r}): time.sleep(0.05)\nos.kill({os.getpid()}, 18)"
    with subprocess.Popen([sys.executable, "-S", "-c", waits]):
        os.kill(os.getpid(), signal.SIGSTOP)


def fit_with_faults(folder: Path, faults: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Returns the report of every fault, each in a fit of its own."""
    reports = []
    for fault, strategy in faults:
        own = folder / f"{fault}-{strategy}"
        monitor = HangMonitor(after_s=AFTER_S, dirpath=own)
        report, others = own / "hangs" / "report.json", list[Any]()
        if fault in ("hook", "first_hook"):
            others = [Blocking(report, rank=int(fault == "hook"))]
        if fault == "window":  # behind the last batch, the other rank waits for this one's times
            others = [Blocking(report, batch=5), CommTimeMonitor(dirpath=own)]
        run = trainer(STRATEGIES[strategy](), callbacks=[monitor, *others], max_epochs=1)
        run.fit(Holding(fault, own))
        assert run.global_step == 6
        reports.append(read_when_over(report))
    return reports


def read_when_over(path: Path) -> dict[str, Any]:
    """Returns a report once its watcher has noted that the ranks have gone on."""
    deadline = time.monotonic() + LIMIT_S
    while (report := json.loads(path.read_text()))["verdict"] == "non-communication hang":
        assert time.monotonic() < deadline, "nobody has noted that the ranks have gone on"
        time.sleep(0.05)
    assert isinstance(report, dict)
    return report


class Slow(Tiny):
    """Takes long wherever that may be so."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_step == 0:
            time.sleep(self.seconds)  # as a compiler does
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            time.sleep(self.seconds)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        time.sleep(self.seconds)

    def on_train_epoch_end(self) -> None:
        features, time_left = torch.ones(20_000_000), torch.ones(1)
        deadline = time.monotonic() + 2 * self.seconds
        while time_left.item() > 0:  # on all ranks for as long, nearly always in a collective
            dist.all_reduce(features, op=dist.ReduceOp.MAX)
            time_left.fill_(deadline - time.monotonic())
            dist.all_reduce(time_left, op=dist.ReduceOp.MAX)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.global_rank == 0:
            time.sleep(self.seconds)


def fit_slowly(folder: Path, after_s: float) -> list[str]:
    """Returns what watchers have left."""
    monitor = HangMonitor(after_s=after_s, dirpath=folder)
    run = trainer(CommOptDDP(), callbacks=[monitor], max_epochs=1, num_sanity_val_steps=1)
    model = Slow(2.5 * after_s)
    run.fit(model, loader(8), loader(8))
    run.save_checkpoint(folder / "slow.ckpt")
    run.test(model, loader(8))
    return [str(path) for path in folder.rglob("*report.json")]  # a later watch renames it


def main() -> None:
    """Trains on two ranks that a fault keeps from ending; usage: hanging_fits.py FOLDER FAULT STRATEGY."""
    folder, fault, strategy = Path(sys.argv[1]), *sys.argv[2:]
    after_s = LONG_END_AFTER_S if fault == "long_end" else 3 * AFTER_S
    monitor = HangMonitor(after_s=after_s, action="abort", dirpath=folder)
    run = trainer(STRATEGIES[strategy](), callbacks=[monitor], devices=2)
    run.fit(Holding(fault, folder / "never"))


if __name__ == "__main__":
    main()
