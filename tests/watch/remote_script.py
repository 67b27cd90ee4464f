"""Trains with one rank on each host; one fails, and no connection shows it to the other. Run by ``test_remote_ranks``.

Usage: remote_script.py RANK FAULT FOLDER

In the third batch of RANK its process is killed (FAULT ``kill``), or it raises and stays until FOLDER has a file
``ended`` (``raise``). The other rank waits in backward for a gradient sync that never ends, as over NCCL; or raises the
same some seconds later (``all``).
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

times.FIT_LOOK_S, times.STALLED_S, times.FIT_GRACE_S = 0.1, 0.5, 1.0
_LIMIT_S, _LATE_S = 60, 6


class Failing(Tiny):
    def __init__(self, rank: int, fault: str) -> None:
        super().__init__()
        self.failing_rank, self.fault = rank, fault

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2 and self.global_rank == self.failing_rank:
            time.sleep(1)  # the other is in backward
            if self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError("broken on purpose")
        if batch_idx == 2 and self.fault == "all":
            time.sleep(_LATE_S)
            raise ArithmeticError("broken on purpose")
        return super().training_step(batch, batch_idx)


def average(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Averages the first two steps, and never gets to an end in the third."""
    state[bucket.index()] = state.get(bucket.index(), 0) + 1
    if state[bucket.index()] > 2:
        return torch.futures.Future()
    dist.all_reduce(bucket.buffer().div_(2))
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def main() -> None:
    rank, fault, folder = sys.argv[1:]
    strategy = CommOptDDP(ddp_comm_hook=average, ddp_comm_state={}, timeout=timedelta(seconds=600))
    run = trainer(strategy, devices=1, num_nodes=2)
    try:
        run.fit(Failing(int(rank), fault), loader(48))
    except ArithmeticError:
        if run.global_rank != int(rank):
            print("CAUGHT")
            return
        deadline = time.monotonic() + _LIMIT_S
        while not (Path(folder) / "ended").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        print("STAYED" if time.monotonic() < deadline else "THE OTHER RANK NEVER ENDED")


if __name__ == "__main__":
    main()
