"""Joins a process group as one rank of a host each, and says how many batches it trained; run by ``test_join_watch``.

Usage: joining_script.py TELL_AFTER_S TIMEOUT_S [GLOO_SOCKET_IFNAME of rank 1]
"""

import os
import sys
from datetime import timedelta

from strategy_models import Tiny, loader, trainer

from lightning_commopt import CommOptDDP
from lightning_commopt.strategy import join_watch


def main() -> None:
    join_watch._TELL_AFTER_S = float(sys.argv[1])
    join_watch._LOOK_S, join_watch._TRY_S = 0.1, 1.0
    if len(sys.argv) > 3 and os.environ["RANK"] == "1":
        os.environ["GLOO_SOCKET_IFNAME"] = sys.argv[3]
    strategy = CommOptDDP(timeout=timedelta(seconds=float(sys.argv[2])))
    run = trainer(strategy, devices=1, num_nodes=int(os.environ["WORLD_SIZE"]), max_epochs=1)
    run.fit(Tiny(), loader(16))
    print("TRAINED", run.global_step)


if __name__ == "__main__":
    main()
