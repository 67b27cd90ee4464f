"""DiLoCo across nodes, with DDP within each."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commopt import CommOptDiLoCo, CommPlan
from support.lightnings import ModelCheckpoint
from support.ranks import run_ranks_or_raise
from support.strategy_models import FEATURES, BatchNormed, Gan, Params, assert_same, loader, numbers, trainer
from support.warm_ranks import run_ranks

_FEEDBACK = CommPlan.from_dict({"comm_hook": {"name": "int8", "error_feedback": True}})


class _Watched(BatchNormed):
    """Keeps its weights after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Params] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.steps.append({name: x.copy() for name, x in numbers(self).items() if "running" not in name})


def _on_nodes(max_steps: int, **options: Any) -> list[Params]:
    """Trains on two ranks a node; returns the weights after each step, and the final ones."""
    model = _Watched()
    fit = trainer(CommOptDiLoCo(**options), **_nodes(), max_steps=max_steps, max_epochs=9, limit_val_batches=0)
    fit.fit(model, loader(48))
    return [*model.steps, numbers(model)]


def _nodes() -> dict[str, int]:
    """Places two ranks on each node; returns what the trainer needs to know of it."""
    rank = dist.get_rank()
    os.environ.update(LOCAL_RANK=str(rank % 2), NODE_RANK=str(rank // 2))
    return {"devices": 2, "num_nodes": dist.get_world_size() // 2}


_INNER = {"comm_hook": {"name": "int8", "error_feedback": True}, "bucket_cap_mb": 0.001}


def _two_nodes() -> tuple[list[Params], list[Params]]:
    plain = _on_nodes(5, sync_every=2, inner="ddp")
    return plain, _on_nodes(5, sync_every=2, fragments=2, overlap=1, comm_hook="int4", inner=_INNER)


def _take_turns(inner: Any) -> Params:
    module = Gan()
    trainer(CommOptDiLoCo(sync_every=2, inner=inner, watch=False), **_nodes(), max_epochs=1).fit(module, loader())
    return numbers(module)


@pytest.mark.exhaustive
def test_optimizers_that_take_turns_need_an_option_of_ddp() -> None:
    """If it fails, two optimizers cannot train on a node that is one worker, or the error says to give up DiLoCo."""
    remedy = {"find_unused_parameters": True}
    first, second = run_ranks(_take_turns, remedy)
    assert_same(first, second)
    for _, error in run_ranks_or_raise(_take_turns, "ddp", world_size=2):
        assert error is not None
        assert f"CommOptDiLoCo(inner={remedy})" in error


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


class _Placed(BatchNormed):
    """Trains on a batch that follows from its place, as Lightning does not resume within a dataloader."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(10 * batch_idx + self.global_rank))
        return super().training_step([x, x.sum(1, keepdim=True)], batch_idx)


def _fit_and_resume(folder: Path) -> list[Params]:
    """Validates before the last of five steps; returns the weights of the fit, resumed there, and from its end."""
    fits = []
    for checkpoint in (None, "step=4.ckpt", "end.ckpt"):
        model = _Placed()
        fit = trainer(
            CommOptDiLoCo(sync_every=2, inner=_FEEDBACK),
            **_nodes(),
            max_epochs=1,
            val_check_interval=4,
            callbacks=[ModelCheckpoint(folder, filename="{step}", every_n_train_steps=4)],
            enable_checkpointing=True,
        )
        fit.fit(model, loader(80), loader(16), ckpt_path=checkpoint and str(folder / checkpoint))
        if checkpoint is None:
            fit.save_checkpoint(folder / "end.ckpt")
        fits.append(numbers(model))
    return fits


def test_every_rank_of_a_node_resumes_with_its_own_buffers_and_residuals(tmp_path: Path) -> None:
    """If it fails, a resumed fit ends with other running statistics, or loses what error feedback has held back."""
    for fit, *resumed in run_ranks(_fit_and_resume, tmp_path, world_size=4):
        for params in resumed:
            assert_same(params, fit)
