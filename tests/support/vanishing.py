"""A rank whose process ends in the middle of a fit, and what the other one prints before it ends."""

import os
import time
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_commopt.watch import times
from support.ranks import run_ranks_or_raise


class Vanishing:
    """A LightningModule: on rank 1 the process ends in the second batch, while rank 0 hears of it by no connection."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            time.sleep(0.3)
            if self.global_rank == 1:  # type: ignore[attr-defined]
                os._exit(3)
            time.sleep(600)
        step: Tensor = super().training_step(batch, batch_idx)  # type: ignore[misc]
        return step


def prepare_rank(folder: Path) -> None:
    """Writes what this rank prints into a file, as the process that forks would have it; the watch is quick."""
    own = os.open(folder / os.environ["LOCAL_RANK"], os.O_WRONLY | os.O_CREAT)
    os.dup2(own, 2)
    times.FIT_LOOK_S, times.STALLED_S, times.FIT_GRACE_S = 0.05, 0.1, 0.2


def check_that_both_end(fit: Any, folder: Path, limit_s: float) -> None:
    """Calls ``fit(folder)``, which trains a `Vanishing`, on two ranks; raises an AssertionError unless both end."""
    ends = run_ranks_or_raise(fit, folder, world_size=2, limit_s=limit_s)
    assert [trace for _, trace in ends] == ["it died before it answered"] * 2
    printed = (folder / "0").read_text()
    assert "[rank 0] Rank 1 has died: its process " in printed
    assert "[rank 0] This rank has waited for 0.2 s, and ends." in printed
