"""Trains on ranks of which one fails in its third batch; run by ``test_failing_ranks``.

Usage: failing_script.py FOLDER START_METHOD NUM_RANKS RANK FAULT OTHERS

FAULT is ``raise``, ``exit`` or ``kill``; or ``launcher``, where the rank kills the process that started it. OTHERS is
what the other ranks do then: ``sync`` (they wait in gradient sync), ``sleep`` (in Python) or ``stuck`` (in a collective
that the failing rank has no part in).
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commopt import CommOptDDP
from lightning_commopt.watch import times
from support.strategy_models import Tiny, loader, trainer

times.FIT_LOOK_S, times.STALLED_S, times.FIT_GRACE_S = 0.2, 1.0, 2.0


class Failing(Tiny):
    def __init__(self, folder: str, rank: int, fault: str, others: str) -> None:
        super().__init__()
        self.folder, self.failing_rank, self.fault, self.others = Path(folder), rank, fault, others

    def train_dataloader(self) -> Any:
        return loader(48)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            if self.global_rank == self.failing_rank:
                time.sleep(1)  # the others are where they shall be
                self.fail()
            elif self.others == "sleep":
                time.sleep(300)
            elif self.others == "stuck":
                alive = [rank for rank in range(self.trainer.world_size) if rank != self.failing_rank]
                dist.recv(torch.zeros(1), src=alive[1 - alive.index(self.global_rank)])
        return super().training_step(batch, batch_idx)

    def fail(self) -> None:
        (self.folder / "failed").touch()
        if self.fault == "exit":
            os._exit(3)
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "launcher":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(300)
        raise ArithmeticError("broken on purpose")


def main() -> None:
    folder, start_method, num_ranks, rank, fault, others = sys.argv[1:]
    strategy = CommOptDDP(
        start_method=start_method,  # type: ignore[arg-type]
        timeout=timedelta(seconds=600),
    )
    run = trainer(strategy, devices=int(num_ranks))
    run.fit(Failing(folder, int(rank), fault, others))


if __name__ == "__main__":
    main()
