"""Programs drawn from a seed, healthy and faulty, and what a rank of one does; see `schedules.py`.

Usage: schedule_job.py SEED FOLDER
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.distributed.tensor import DTensor
from torch.nn import Linear, Sequential, Tanh
from torch.utils.data import DataLoader, TensorDataset

from lightning_commopt import CommOptDDP, CommOptModelParallel, shard
from lightning_commopt.callbacks import CommTimeMonitor, HangMonitor, SpeedMonitor

HOOKS = (None, "all_reduce", "bf16", "fp16", "int8", "int4", "powersgd", "alternating_powersgd")
FAULTS = (
    *("raise in step", "raise in validation", "raise after", "raise before"),
    *("exit 0 before", "exit 3 in step", "kill in step", "kill before"),
)
_UNKNOWN_TO_STOCK = ("raise before", "exit 0 before", "kill before")
"""Lightning's own strategy waits for half an hour where one rank never joins the group."""
_SLOW_START_S = 0.0, 0.0, 2.0, 25.0
_NUM_FEATURES, _NUM_BATCHES, _BATCH = 8, 6, 4


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A program, the same on all ranks but for one that is slow or fails.

    Attributes:
        strategy: "stock ddp", "ddp", "auto" (a plan that is chosen in the fit) or "fsdp2".
        launcher: "forked": Lightning's, with ranks that are forked instead of started anew, which saves the imports;
            "popen": Lightning's; "torchrun".
        slow_rank: which one comes ``slow_start_s`` later than the others.
        fault: what ``fault_rank`` does in the last fit, or all ranks if that is -1; "" for a healthy program.
    """

    seed: int
    num_ranks: int
    strategy: str
    launcher: str
    comm_hook: str | None
    callbacks: tuple[str, ...]
    slow_rank: int
    slow_start_s: float
    num_fits: int
    accumulate: int
    validates: bool
    tests: bool
    fault: str
    fault_rank: int


def draw(seed: int) -> Schedule:
    """Returns the schedule of a seed; the same on every machine."""
    chance = random.Random(seed)
    num_ranks = chance.choice((2, 2, 3))
    strategy = chance.choice(("stock ddp", "ddp", "ddp", "auto", "fsdp2"))
    callbacks = [name for name in ("CommTimeMonitor", "SpeedMonitor", "HangMonitor") if chance.random() < 0.4]
    fault = chance.choice(FAULTS) if chance.random() < 0.6 else ""
    while strategy == "stock ddp" and fault in _UNKNOWN_TO_STOCK:
        fault = chance.choice(FAULTS)
    if fault.startswith("raise") and "CommTimeMonitor" not in callbacks and chance.random() < 0.5:
        callbacks.append("CommTimeMonitor")
    everywhere = fault.startswith("raise") and chance.random() < 0.4
    hooks = {"ddp": HOOKS, "fsdp2": (None, "bf16", "int8")}.get(strategy, (None,))
    return Schedule(
        seed=seed,
        num_ranks=num_ranks,
        strategy=strategy,
        launcher=chance.choice(("forked",) * 8 + ("popen", "torchrun")),
        comm_hook=chance.choice(hooks),
        callbacks=tuple(callbacks),
        slow_rank=chance.randrange(num_ranks),
        slow_start_s=chance.choice(_SLOW_START_S),
        num_fits=1 if "before" in fault else chance.choice((1, 1, 2)),
        accumulate=chance.choice((1, 1, 2)),
        validates=fault == "raise in validation" or chance.random() < 0.5,
        tests=chance.random() < 0.3,
        fault=fault,
        fault_rank=-1 if everywhere else chance.randrange(num_ranks),
    )


class _Model(LightningModule):
    def __init__(self, schedule: Schedule) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.schedule, self.is_last = schedule, False
        self.layers = Sequential(Linear(_NUM_FEATURES, 32), Tanh(), Linear(32, 32), Tanh(), Linear(32, 1))

    def forward(self, x: Any) -> Any:
        return self.layers(x)

    def fail(self, place: str) -> None:
        schedule, rank = self.schedule, own_rank()
        if not self.is_last or not schedule.fault.endswith(place) or schedule.fault_rank not in (-1, rank):
            return
        if schedule.fault.startswith("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if schedule.fault.startswith("exit"):
            sys.exit(int(schedule.fault.split()[1]))
        raise ArithmeticError(f"broken on purpose {place}, seed {schedule.seed}")

    def configure_callbacks(self) -> list[Any]:
        """Is called when Lightning has started the ranks, before they have a process group."""
        if own_rank() == self.schedule.slow_rank and not torch.distributed.is_initialized():
            time.sleep(self.schedule.slow_start_s)
        self.fail("before")
        return []

    def configure_model(self) -> None:
        if self.schedule.strategy == "fsdp2":
            shard(self, self.device_mesh, blocks=Linear)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3:
            self.fail("in step")
        loss = (self(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.fail("in validation")
        self.log("val_loss", self(batch[0]).square().mean(), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self(batch[0]).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


def own_rank() -> int:
    """Returns this process's rank, also before there is a process group; all ranks are on one host."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def _strategy(schedule: Schedule) -> Any:
    if schedule.strategy == "stock ddp":
        return "ddp"
    if schedule.strategy == "auto":
        return CommOptDDP(plan="auto", lossy=["bf16", "int8"])
    if schedule.strategy == "ddp":
        return CommOptDDP(comm_hook=schedule.comm_hook)
    return CommOptModelParallel(
        data_parallel_size=schedule.num_ranks, tensor_parallel_size=1, comm_hook=schedule.comm_hook
    )


def _callbacks(schedule: Schedule, folder: Path) -> list[Any]:
    made: dict[str, Any] = {
        "CommTimeMonitor": lambda: CommTimeMonitor(dirpath=folder),
        "SpeedMonitor": SpeedMonitor,
        "HangMonitor": lambda: HangMonitor(after_s=120, dirpath=folder),
    }
    return [made[name]() for name in schedule.callbacks]


def run(schedule: Schedule, folder: Path) -> None:
    """Does what this rank has to do, and writes a digest of its weights."""
    torch.set_num_threads(1)
    model = _Model(schedule)
    data = torch.randn(schedule.num_ranks * _NUM_BATCHES * _BATCH, _NUM_FEATURES, generator=torch.manual_seed(1))
    batches = DataLoader(TensorDataset(data), batch_size=_BATCH)
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
    )
    for number in range(schedule.num_fits):
        model.is_last = number == schedule.num_fits - 1
        trainer = Trainer(
            accelerator="cpu",
            devices=schedule.num_ranks,
            strategy=_strategy(schedule),
            callbacks=_callbacks(schedule, folder),
            max_epochs=2,
            num_sanity_val_steps=0,
            accumulate_grad_batches=schedule.accumulate,
            **quiet,
        )
        trainer.fit(model, batches, batches if schedule.validates else None)
    if schedule.tests:
        trainer.test(model, batches, verbose=False)
    model.fail("after")
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        digest.update(whole.contiguous().numpy().tobytes())
    (folder / f"weights{own_rank()}").write_text(digest.hexdigest())


if __name__ == "__main__":
    chosen = draw(int(sys.argv[1]))
    print(asdict(chosen), flush=True) if own_rank() == 0 else None
    run(chosen, Path(sys.argv[2]))
