"""Ranks of which one ends before the process group is made, or is only slow; run by ``test_ended_ranks``.

Usage: leaving_script.py NUM_RANKS RANK FAULT

FAULT is ``exit N`` (the status), ``kill``, or ``sleep N`` (seconds, before it trains). Rank 0 of Lightning's launcher
starts the others first.
"""

import os
import signal
import sys
import time
from typing import Any

from lightning_commopt import CommOptDDP
from support.strategy_models import Tiny, loader, trainer


class Leaving(Tiny):
    def configure_callbacks(self) -> list[Any]:
        """Is called when Lightning has started the ranks, before they have a process group."""
        rank, fault, *number = int(sys.argv[2]), *sys.argv[3].split()
        if rank == int(os.environ.get("SLURM_PROCID", os.environ.get("LOCAL_RANK", "0"))):
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "exit":
                sys.exit(int(number[0]))
            time.sleep(float(number[0]))
        return []

    def train_dataloader(self) -> Any:
        return loader()


def main() -> None:
    run = trainer(CommOptDDP(), devices=int(sys.argv[1]), max_epochs=1)
    run.fit(Leaving())
    print(f"TRAINED {run.global_step}\n", end="", flush=True)  # in one piece, as both ranks write to one pipe


if __name__ == "__main__":
    main()
