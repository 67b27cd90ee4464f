"""Fits that are saved at a random step and resumed under other circumstances: exactly, or without losing a residual."""

import random
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_commopt import CommOptDDP, CommOptModelParallel, shard
from support.collectives import takes_collectives
from support.cross_section import sampled
from support.every_compressor import COMPRESSORS
from support.lightnings import Callback, LightningModule
from support.strategy_models import Params, assert_same, trainer
from support.warm_ranks import run_ranks

_NUM_STEPS = 9
_SHAPES = [(12, 20), (30, 8), (16, 16)]
_INT4 = {"name": "int4", "error_feedback": True, "block_size": 32}
_INT8 = {"name": "int8", "error_feedback": True, "block_size": 16}
_HOOKS: dict[bool, list[Any]] = {
    False: [COMPRESSORS[name] for name in ("powersgd", "powersgd_rank_2", "int4_feedback")],
    True: [_INT4, _INT8],
}
"""Compressors with a residual, for DDP and for FSDP2."""
_CHANGES = (
    "same",
    "compressor",
    "no_residual",
    "none",
    "ranks",
    "layout",
    "strategy",
    "strategy_none",
    "strategy_ranks",
)
_CASES = [
    *((source, change) for source in ("ddp", "file") for change in _CHANGES),
    *(("directory", change) for change in ("same", "compressor", "ranks")),
]


class Setup(NamedTuple):
    """How a fit synchronizes gradients."""

    is_sharded: bool
    hook: Any
    num_ranks: int = 2
    is_fine: bool = False  # in small buckets, or in units of one part each
    in_directory: bool = False

    def strategy(self) -> Any:
        """Returns a new strategy."""
        if self.is_sharded:
            return CommOptModelParallel(self.num_ranks, 1, self.in_directory, comm_hook=self.hook)
        return CommOptDDP(comm_hook=self.hook, bucket_cap_mb=0.001 if self.is_fine else 25)


class _Part(nn.Module):
    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))
        self.bias = nn.Parameter(torch.zeros(shape[1]))

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return (self.weight * gradients[0]).sum() + (self.bias * gradients[1]).sum()


class _Fed(LightningModule):
    """Has gradients that depend on step and rank only, and sums up in its parameters what was applied of them."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.setup_of_sync = setup
        self.parts = nn.ModuleList([_Part(shape) for shape in _SHAPES])

    def configure_model(self) -> None:
        if self.setup_of_sync.is_sharded:
            shard(self, self.device_mesh, blocks=_Part if self.setup_of_sync.is_fine else 10**6)

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        losses = [part([gradients[f"parts.{i}.{x}"] for x in ("weight", "bias")]) for i, part in enumerate(self.parts)]
        return torch.stack(losses).sum()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(_gradients(self.global_step, self.global_rank))

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.zeros(4, 1))  # type: ignore[arg-type]  # a tensor serves as a data set

    def configure_optimizers(self) -> Optimizer:
        # The momentum is too small to change a sum: Lightning loads no optimizer without a state into sharded models.
        return torch.optim.SGD(self.parameters(), lr=1.0, momentum=1e-30)


def _gradients(step: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    shapes = {
        f"parts.{i}.{x}": y for i, shape in enumerate(_SHAPES) for x, y in (("weight", shape), ("bias", shape[1:]))
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _sum_of_means(steps: range, num_ranks: int) -> Params:
    gradients = [_gradients(step, rank) for step in steps for rank in range(num_ranks)]
    return {name: sum(x[name].double() for x in gradients).numpy() / num_ranks for name in gradients[0]}  # type: ignore[union-attr]


class _Keep(Callback):
    """Saves a checkpoint, and keeps the residuals of that moment, of the start and of the end."""

    def __init__(self, path: Path, save_at: int) -> None:
        self.path, self.save_at = path, save_at
        self.residuals: dict[str, Params] = {}

    def _note(self, trainer: Any, moment: str) -> None:
        strategy = trainer.strategy
        sync = strategy.gradient_sync if isinstance(strategy, CommOptDDP) else strategy.sharded_sync
        state = None if sync is None else sync.state()
        residuals = {} if state is None else state.all_residuals()
        self.residuals[moment] = {name: value.double().numpy().copy() for name, value in residuals.items()}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._note(trainer, "start")

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.save_at:
            self._note(trainer, "save")
            trainer.save_checkpoint(self.path)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._note(trainer, "end")


class _Outcome(NamedTuple):
    params: Params
    residuals: dict[str, Params]
    messages: list[str]


def _fit(setup: Setup, path: Path, save_at: int) -> _Outcome:
    """Fits and saves at a step; resumes from ``path`` where ``save_at`` is 0."""
    model, keep = _Fed(setup), _Keep(path, save_at)
    run = trainer(
        setup.strategy(), max_steps=_NUM_STEPS, max_epochs=-1, use_distributed_sampler=False, callbacks=[keep]
    )
    with warnings.catch_warnings(record=True) as caught, torch.random.fork_rng():
        warnings.simplefilter("always")
        run.fit(model, ckpt_path=None if save_at else path)
    params = {
        name: (x.full_tensor() if setup.is_sharded else x).detach().double().numpy()  # type: ignore[attr-defined]
        for name, x in model.named_parameters()
    }
    messages = [str(warning.message) for warning in caught if "comm_hook" in str(warning.message)]
    return _Outcome(params, keep.residuals, messages)


def _mean(outcomes: list[_Outcome], moment: str) -> Params:
    residuals = [outcome.residuals[moment] for outcome in outcomes]
    return {name: np.mean([x[name] for x in residuals], axis=0) for name in residuals[0]}


def _changed(before: Setup, change: str, choose: random.Random) -> Setup:
    kind = before.is_sharded != change.startswith("strategy")
    hook = choose.choice([hook for hook in _HOOKS[kind] if hook != before.hook])
    if change in ("ranks", "strategy_ranks"):
        before = before._replace(num_ranks=5 - before.num_ranks)
    if change in ("none", "strategy_none"):
        hook = None
    elif change == "no_residual":
        hook = "bf16"
    elif change in ("ranks", "layout", "same"):
        hook = before.hook
    return before._replace(is_sharded=kind, hook=hook, is_fine=before.is_fine != (change == "layout"))


@takes_collectives
@pytest.mark.parametrize(("source", "change"), sampled(_CASES, by_default=[("file", "strategy_ranks")]))
def test_what_was_held_back_outlives_a_change(source: str, change: str, tmp_path: Path) -> None:
    """If it fails, what error feedback held back is lost, or counts twice, where a fit is resumed."""
    choose, path = random.Random(f"{source} {change}"), tmp_path / "saved.ckpt"
    is_sharded = source != "ddp"
    hook, num_ranks, save_at = choose.choice(_HOOKS[is_sharded]), choose.choice([2, 3]), choose.randint(1, 7)
    before = Setup(is_sharded, hook, num_ranks, choose.random() < 0.5, source == "directory")
    after = _changed(before, change, choose)
    first = run_ranks(_fit, before, path, save_at, world_size=before.num_ranks)
    second = run_ranks(_fit, after, path, 0, world_size=after.num_ranks)
    assert [outcome.messages for outcome in second] == [[]] * after.num_ranks, (before, after)
    if change == "same":
        for through, resumed in zip(first, second, strict=True):
            assert_same(resumed.params, through.params)
            assert_same(resumed.residuals["end"], through.residuals["end"])
    saved, start, end = _mean(first, "save"), _mean(second, "start"), _mean(second, "end")
    size = max(np.abs(value).max() for residuals in (saved, end) for value in residuals.values())
    assert all(np.abs(value).max() > 1e-3 for name, value in saved.items() if "weight" in name), (before, after)
    assert_same(start, saved, rtol=1e-5)
    fed_before, fed_after = _sum_of_means(range(save_at), num_ranks), _sum_of_means(range(save_at, 9), after.num_ranks)
    for name, value in second[0].params.items():
        sent = -value + end.get(name, 0)
        np.testing.assert_allclose(sent, fed_before[name] + fed_after[name], rtol=0, atol=size / 10, err_msg=name)
