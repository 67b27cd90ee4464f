"""Checkpoints that tests keep, a folder for each strategy and version: made by ``python -m support.kept_states``.

Run it, with PYTHONPATH=tests, before the version of a state is raised: tests then read the files of the version before.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_commopt import CommOptDDP, CommOptModelParallel, shard
from lightning_commopt.sync import checkpoint
from support.ranks import run_ranks
from support.strategy_models import Tiny, loader, trainer

HERE = Path(__file__).parents[1] / "strategy" / "kept_states"
DDP: dict[str, dict[str, Any]] = {"powersgd": {"name": "powersgd", "start_step": 1}, "int8": {"name": "int8"}}
SHARDED: dict[str, tuple[dict[str, Any], bool]] = {
    "feedback": ({"name": "int8", "error_feedback": True, "block_size": 16}, True),
    "stochastic": ({"name": "int8", "stochastic_rounding": True}, False),
}


class Sharded(Tiny):
    """The model of the checkpoints of FSDP2."""

    def configure_model(self) -> None:
        shard(self, self.device_mesh, blocks=150)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


def _save(folder: Path) -> None:
    for name, hook in DDP.items():
        run = trainer(CommOptDDP(comm_hook=hook, bucket_cap_mb=0.002), max_epochs=2)
        run.fit(Tiny(), loader(24))
        run.save_checkpoint(folder / f"ddp_{checkpoint._VERSION}" / f"{name}.ckpt")
    for name, (hook, is_folder) in SHARDED.items():
        strategy = CommOptModelParallel(comm_hook=hook, save_distributed_checkpoint=is_folder)
        run = trainer(strategy, max_epochs=2)
        with torch.random.fork_rng():
            run.fit(Sharded(), loader(24))
        run.save_checkpoint(folder / f"fsdp2_{checkpoint._VERSION}" / f"{name}.ckpt")


if __name__ == "__main__":
    run_ranks(_save, HERE)
