"""Other people's callbacks and loggers, one of which never returns; for `hanging_script.py`.

They have names of their own, which a report must give.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger

FAULT, FAULT_RANK = os.environ["FAULT"], int(os.environ["FAULT_RANK"])
FAULT_STEP = int(os.environ["FAULT_STEP"])
FOLDER = Path(os.environ["FOLDER"])
FOREVER_S = 3600.0


def mark_fault() -> None:
    """Leaves the time at which the fault begins."""
    (FOLDER / "fault").write_text(str(time.time()))


def hang_if(fault: str, trainer: Any) -> None:
    """Never returns on the rank at fault, from the step of the fault on."""
    if fault == FAULT and trainer.global_rank == FAULT_RANK and trainer.global_step >= FAULT_STEP:
        mark_fault()
        time.sleep(FOREVER_S)


class Upload(Callback):
    """Waits for a server that does not answer."""

    def on_before_optimizer_step(self, trainer: Any, *args: Any) -> None:
        """Before a step."""
        hang_if("optimizer_hook", trainer)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        """After a step."""
        hang_if("batch_end", trainer)

    def on_validation_epoch_end(self, trainer: Any, *args: Any) -> None:
        """After a validation."""
        hang_if("validation_end", trainer)


class Backup(ModelCheckpoint):
    """Copies checkpoints to a disk that hangs."""

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """After a step."""
        hang_if("checkpoint", trainer)
        super().on_train_batch_end(trainer, *args, **kwargs)


class Tracker(Logger):
    """Waits for a server of experiments that does not answer."""

    name = version = "tracker"

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Sends metrics, as rank 0."""
        if FAULT == "logger" and os.environ["LOCAL_RANK"] == str(FAULT_RANK) and (step or 0) >= FAULT_STEP:
            mark_fault()
            time.sleep(FOREVER_S)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Keeps nothing."""


def others() -> Iterator[Any]:
    """Yields callbacks of others, of which that at fault is one."""
    yield Upload()
    if FAULT == "checkpoint":
        yield Backup(FOLDER / "checkpoints")
