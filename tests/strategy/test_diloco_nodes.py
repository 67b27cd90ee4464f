"""DiLoCo across nodes, with DDP within each."""

import os
from typing import Any

import torch.distributed as dist

from lightning_commopt import CommOptDiLoCo
from support.ranks import run_ranks
from support.strategy_models import BatchNormed, Params, assert_same, loader, numbers, trainer


class _Watched(BatchNormed):
    """Keeps its weights after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Params] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.steps.append({name: x.copy() for name, x in numbers(self).items() if "running" not in name})


def _on_nodes(max_steps: int, **options: Any) -> list[Params]:
    """Trains on two ranks a node; returns the weights after each step, and the final ones."""
    rank = dist.get_rank()
    os.environ.update(LOCAL_RANK=str(rank % 2), NODE_RANK=str(rank // 2))
    model = _Watched()
    num_nodes = dist.get_world_size() // 2
    fit = trainer(
        CommOptDiLoCo(**options), devices=2, num_nodes=num_nodes, max_steps=max_steps, max_epochs=9, limit_val_batches=0
    )
    fit.fit(model, loader(48))
    return [*model.steps, numbers(model)]


def test_ranks_of_one_node_are_one_worker() -> None:
    """If it fails, a fit on one node hangs, or its ranks do not average their gradients."""
    first, second = run_ranks(_one_node)
    for a, b in zip(first, second, strict=True):
        assert_same(a, b)


def _one_node() -> list[Params]:
    return _on_nodes(3, sync_every=2, inner="ddp")
