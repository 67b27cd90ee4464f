"""DiLoCo across nodes, with DDP within each."""

import os
from typing import Any

import pytest
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


def _one_node() -> list[Params]:
    return _on_nodes(3, sync_every=2, inner="ddp")


_INNER = {"comm_hook": {"name": "int8", "error_feedback": True}, "bucket_cap_mb": 0.001}


def _two_nodes() -> tuple[list[Params], list[Params]]:
    plain = _on_nodes(5, sync_every=2, inner="ddp")
    return plain, _on_nodes(5, sync_every=2, fragments=2, overlap=1, comm_hook="int4", inner=_INNER)


@pytest.mark.exhaustive
def test_ranks_of_one_node_are_one_worker() -> None:
    """If it fails, a fit on one node hangs, or its ranks do not average their gradients."""
    first, second = run_ranks(_one_node)
    for a, b in zip(first, second, strict=True):
        assert_same(a, b)


def _differ(a: Params, b: Params) -> bool:
    return any((a[name] != x).any() for name, x in b.items())


def _hierarchical() -> list[Params]:
    hooks = {"name": "hierarchical", "inner": "all_reduce"}, None
    return [_on_nodes(5, sync_every=2, comm_hook=hook)[-1] for hook in hooks]


@pytest.mark.exhaustive
def test_differences_of_single_ranks_cross_nodes_once() -> None:
    """If it fails, comm_hook="hierarchical" has no groups of nodes, or another mean."""
    ranks = run_ranks(_hierarchical, world_size=4)
    for hierarchical, plain in ranks:
        assert_same(hierarchical, ranks[0][0])
        assert_same(hierarchical, plain, rtol=1e-4)


def test_ranks_of_a_node_train_together_and_nodes_by_themselves() -> None:
    """If it fails, the ranks of a node drift apart, or nodes exchange more or less than once in a round."""
    ranks = run_ranks(_two_nodes, world_size=4)
    for option in (0, 1):
        of_ranks = [fits[option] for fits in ranks]
        for first, second in (of_ranks[:2], of_ranks[2:]):
            for a, b in zip(first, second, strict=True):
                assert_same(a, b)
        assert_same(of_ranks[0][-1], of_ranks[2][-1])
    together = [not _differ(a, b) for a, b in zip(ranks[0][0], ranks[2][0], strict=True)]
    assert together == [False, True, False, True, False, True]
