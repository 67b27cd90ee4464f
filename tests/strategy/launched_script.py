"""Trains on two ranks, however they are started, saves and loads; run by ``test_launching``.

Usage: launched_script.py FILE START_METHOD... [--breaks]
"""

import sys
from datetime import timedelta

import numpy as np

from lightning_commopt import CommOptDDP
from support.strategy_models import SelfFed, numbers, trainer


def main() -> None:
    path, *words = sys.argv[1:]
    breaks = "--breaks" in words
    results = {}
    for start_method in words[: -1 if breaks else None]:
        strategy = CommOptDDP(
            comm_hook="all_reduce",
            bucket_cap_mb=0.001,
            start_method=start_method,  # type: ignore[arg-type]
            timeout=timedelta(seconds=60),  # holds for the ranks' first meeting too, which a busy machine delays
        )
        module = SelfFed(breaks)
        run = trainer(strategy, devices=2)
        run.fit(module)
        run.save_checkpoint("fit.ckpt")
        run.strategy.load_checkpoint("fit.ckpt")
        results.update({f"{start_method} {name}": values for name, values in numbers(module).items()})
    if run.is_global_zero:
        np.savez(path, **results)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
