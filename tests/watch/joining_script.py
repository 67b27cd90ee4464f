"""Joins a process group as one rank of a host each, and prints how many batches it trained; run by ``test_join_watch``.

Usage: joining_script.py FOLDER BEFORE REPORT_AFTER_S TIMEOUT_S [GLOO_SOCKET_IFNAME of rank 1]

The ranks wait for each other in FOLDER, then the shell of each host does BEFORE.
"""

import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

from lightning_commopt import CommOptDDP
from lightning_commopt.watch import times
from support.strategy_models import Tiny, loader, trainer


def main() -> None:
    folder, before, report_after_s, timeout_s, *interface = sys.argv[1:]
    Path(folder, os.environ["RANK"]).touch()
    while len(os.listdir(folder)) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.02)
    subprocess.run(["sh", "-c", before])
    times.JOIN_REPORT_AFTER_S = float(report_after_s)
    times.JOIN_LOOK_S, times.JOIN_TRY_S = 0.1, 1.0
    if interface and os.environ["RANK"] == "1":
        os.environ["GLOO_SOCKET_IFNAME"] = interface[0]
    strategy = CommOptDDP(timeout=timedelta(seconds=float(timeout_s)))
    run = trainer(strategy, devices=1, num_nodes=int(os.environ["WORLD_SIZE"]), max_epochs=1)
    run.fit(Tiny(), loader(16))
    print("TRAINED", run.global_step)


if __name__ == "__main__":
    main()
