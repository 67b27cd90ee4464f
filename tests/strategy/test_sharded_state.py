"""The state of ``CommOptModelParallel``'s ``comm_hook`` in checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commopt import CommOptModelParallel
from lightning_commopt.compressors.sharded import ShardedInt8
from support.collectives import takes_collectives
from support.cross_section import sampled
from support.lightnings import Callback
from support.sharded_model import Sharded
from support.strategy_models import Params, Tiny, assert_same, loader, trainer
from support.warm_ranks import run_ranks

pytestmark = takes_collectives


class OwnInt8(ShardedInt8):  # type: ignore[misc]  # a final class; a compressor of one's own from scratch is longer
    """Somebody's own compressor, which no name stands for."""


FEEDBACK = {"name": "int8", "error_feedback": True, "block_size": 16}
_ON_NODES = {"name": "hierarchical", "inner": FEEDBACK, "ranks_per_node": 1}


class _Keep(Callback):
    """Keeps the residuals of this rank when training starts; they are used up in the first step."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        sync = trainer.strategy.sharded_sync
        self.residuals = {name: value.clone() for name, value in sync.residuals().items()}


def _fit(path: Path | None, comm_hook: Any, *, resume: bool, epochs: int, distributed: bool) -> Params:
    model, strategy = Sharded(), CommOptModelParallel(comm_hook=comm_hook, save_distributed_checkpoint=distributed)
    run = trainer(strategy, max_epochs=epochs)
    with torch.random.fork_rng():
        run.fit(model, loader(48), ckpt_path=path if resume else None)
    if path is not None and not resume:
        run.save_checkpoint(path)
    return {name: value.full_tensor().numpy() for name, value in model.state_dict().items()}


def _resumed(folder: Path, comm_hook: Any, distributed: bool) -> tuple[Params, Params, list[str]]:
    path = folder / "state.ckpt"
    whole = _fit(None, comm_hook, resume=False, epochs=4, distributed=distributed)
    _fit(path, comm_hook, resume=False, epochs=2, distributed=distributed)
    resumed = _fit(path, comm_hook, resume=True, epochs=4, distributed=distributed)
    own = sorted(item.name for item in path.iterdir()) if path.is_dir() else []
    return whole, resumed, own


@pytest.mark.parametrize(
    ("comm_hook", "distributed"),
    sampled(
        [
            (FEEDBACK, True),
            ({"name": "int8", "stochastic_rounding": True}, False),
            (_ON_NODES, True),
            (OwnInt8(error_feedback=True, block_size=16), False),
        ],
        [(FEEDBACK, True)],
    ),
    ids=str,
)
def test_resumes_bit_for_bit(tmp_path: Path, comm_hook: Any, distributed: bool) -> None:
    """If it fails, an interrupted training differs from one that was not."""
    for whole, resumed, own in run_ranks(_resumed, tmp_path, comm_hook, distributed):
        assert_same(resumed, whole)
        assert ("lightning_commopt" in own) == distributed


def _weights_only(folder: Path) -> bool:
    strategy = CommOptModelParallel(comm_hook=FEEDBACK)
    run = trainer(strategy, max_epochs=1)
    run.fit(Sharded(), loader(24))
    run.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    return (folder / "weights.ckpt" / "lightning_commopt").exists()


def test_weights_alone(tmp_path: Path) -> None:
    """If it fails, a checkpoint for inference holds a residual as large as the model for each rank."""
    assert run_ranks(_weights_only, tmp_path) == [False, False]


def _second_fit() -> tuple[bool, bool, bool]:
    strategy = CommOptModelParallel(comm_hook=FEEDBACK)
    model, keep = Sharded(), _Keep()
    run = trainer(strategy, max_epochs=1, callbacks=[keep])
    run.fit(model, loader(24))
    sync = strategy.sharded_sync
    assert sync is not None
    kept = sync.residuals()
    run.fit_loop.max_epochs = 2
    run.fit(model, loader(24))
    is_same = all(torch.allclose(keep.residuals[name], kept[name], atol=1e-6) for name in kept)
    run.fit_loop.max_epochs = 3
    run.fit(Sharded(), loader(24))
    return bool(kept), is_same, not keep.residuals


def test_a_second_fit_goes_on() -> None:
    """If it fails, a second fit is refused, or has lost the residuals of the first; or another model gets them."""
    assert run_ranks(_second_fit) == [(True, True, True)] * 2


def _plain_afterwards() -> bool:
    model = Sharded()
    trainer(CommOptModelParallel(comm_hook="int8"), max_epochs=1).fit(model, loader(24))
    batch = next(iter(loader(8)))
    model.zero_grad()
    model.loss(batch).backward()
    got = model.layers[2].weight.grad.full_tensor()  # type: ignore[union-attr, operator]
    single = Tiny()
    single.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    single.loss(batch).backward()
    exact = single.layers[2].weight.grad.clone()  # type: ignore[union-attr, operator]
    dist.all_reduce(exact)
    return torch.allclose(got, exact / dist.get_world_size(), rtol=1e-5, atol=1e-8)


def test_a_model_is_given_back() -> None:
    """If it fails, a model that was trained compressed stays so with a strategy that does not compress."""
    assert run_ranks(_plain_afterwards) == [True, True]


class _GoBack(Callback):
    """Goes back to an earlier step in the middle of a fit, as Lightning's learning rate finder does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.residuals: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)
        elif trainer.global_step == 4:
            trainer.strategy.load_checkpoint(self.path)
        if trainer.global_step in (2, 3, 4):
            residuals = trainer.strategy.sharded_sync.residuals()
            self.residuals.append({name: value.clone() for name, value in residuals.items()})


def _go_back(path: Path) -> list[dict[str, Tensor]]:
    look = _GoBack(path)
    with torch.random.fork_rng():
        trainer(CommOptModelParallel(comm_hook=FEEDBACK), max_epochs=1, callbacks=[look]).fit(Sharded(), loader(48))
    return look.residuals


def test_loading_in_the_middle_of_a_fit_takes_effect_at_once(tmp_path: Path) -> None:
    """If it fails, the state of a checkpoint waits until parameters are frozen, and then is a stale one."""
    for saved, later, loaded in run_ranks(_go_back, tmp_path / "back.ckpt"):
        assert saved.keys() == loaded.keys() != set()
        assert all(torch.equal(loaded[name], value) for name, value in saved.items())
        assert any((later[name] != value).any() for name, value in saved.items())
