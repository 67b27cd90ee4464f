"""Trains on two ranks, however they are started, saves and loads; run by ``test_launching``.

Usage: launched_script.py FILE START_METHOD [--breaks]
"""

import sys
from datetime import timedelta

import numpy as np

from lightning_commopt import CommOptDDP
from support.strategy_models import SelfFed, numbers, trainer


def main() -> None:
    path, start_method, *breaks = sys.argv[1:]
    strategy = CommOptDDP(
        comm_hook="all_reduce",
        bucket_cap_mb=0.001,
        start_method=start_method,  # type: ignore[arg-type]
        timeout=timedelta(seconds=60),  # holds for the ranks' first meeting too, which a busy machine delays
    )
    module = SelfFed(bool(breaks))
    run = trainer(strategy, devices=2)
    run.fit(module)
    run.save_checkpoint("fit.ckpt")
    run.strategy.load_checkpoint("fit.ckpt")
    if run.is_global_zero:
        np.savez(path, **numbers(module))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
