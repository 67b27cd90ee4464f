"""Fits that nobody has chosen, with plan="auto": what they train, what they leave, and whether ranks agree."""

from __future__ import annotations

import contextlib
import math
import os
import random
import warnings
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_commopt import CommOptDDP, CommPlan
from lightning_commopt.tune.step_timer import StepTimer
from support.lightnings import Callback, DDPStrategy, LightningModule, Trainer
from support.ranks import run_ranks
from support.scripted_tuning import scripted
from support.strategy_models import Gan, Manual, Tiny, Unused, assert_same, loader, numbers, trainer

_MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (Tiny, {}),
    "bucket view": (Tiny, {"gradient_as_bucket_view": True}),
    "manual": (Manual, {}),
    "two optimizers": (Gan, {"find_unused_parameters": True}),
    "unused": (lambda: Unused(now_and_then=True), {"find_unused_parameters": True}),
}


class FitError(Exception):
    """A mistake in a callback."""


class _StopAt(Callback):
    """Ends a fit at a step, and keeps the plan of that moment."""

    def __init__(self, step: int, how: str) -> None:
        self._left, self._how = step, how
        self.plan: CommPlan | None = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._left -= 1
        if self._left:
            return
        self.plan = getattr(trainer.strategy, "plan", None)
        if self._how == "raises":
            raise FitError
        trainer.should_stop = self._how == "stops"


class _Sizes:
    """Batches of sizes by chance, the same on all ranks, of other samples on each."""

    def __init__(self, seed: int, num_batches: int, sizes: list[int]) -> None:
        self._seed, self._num_batches, self._sizes = seed, num_batches, sizes

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[list[int]]:
        rng, rank = random.Random(self._seed), dist.get_rank()
        for _ in range(self._num_batches):
            yield [(rng.randrange(8) + rank) % 8 for _ in range(rng.choice(self._sizes))]


def _fit(strategy: Any, seed: int, model: Any) -> tuple[Any, int, CommPlan | None]:
    """Returns parameters, the number of steps, and the plan at the step at which something happens."""
    rng = random.Random(seed)
    num_batches = rng.randint(3, 40)
    options: dict[str, Any] = {"max_epochs": rng.randint(2, 2 + 200 // num_batches)}
    if model is Tiny:
        options["accumulate_grad_batches"] = rng.randint(1, 3)
    if has_validation := rng.random() < 0.5:
        options["val_check_interval"] = rng.randint(1, num_batches)
    stop = _StopAt(rng.randint(1, num_batches * options["max_epochs"]), rng.choice(["stops", "raises", "nothing"]))
    sizes = _Sizes(seed, num_batches, rng.choice([[4], [4, 4, 4, 7], [1, 2, 3, 5, 8]]))
    batches = DataLoader(loader().dataset, batch_sampler=sizes)
    module, job = model(), trainer(strategy, callbacks=[stop], use_distributed_sampler=False, **options)
    with contextlib.suppress(FitError):
        job.fit(module, batches, loader() if has_validation else None)
    return numbers(module), job.global_step, stop.plan


def _fit_by_chance(seed: int) -> dict[str, Any]:
    rng, launched = random.Random(-seed), dict(os.environ)
    noise = random.Random(f"{seed} {dist.get_rank()}")  # ranks do not see the same times
    model, arguments = rng.choice([*_MODELS.values()])
    base, is_lossy, spread = CommPlan(**arguments), rng.random() < 0.3, rng.choice([0.0, 0.02, 0.1])
    others = [{"bucket_cap_mb": 0.001}, {"comm_hook": "int8"} if is_lossy else {"bucket_cap_mb": 100}]
    shares = {
        CommPlan.from_dict({**base.to_dict(), **other}): rng.choice([0.5, 0.8, 0.95, 1.0, 1.6]) for other in others
    }
    warnings.simplefilter("ignore")
    with scripted(shares, num_steps=rng.choice([1e5, 3000, 500, math.inf])):
        take = StepTimer.take
        with patch.object(StepTimer, "take", lambda timer: [s * math.exp(noise.gauss(0, spread)) for s in take(timer)]):
            strategy = CommOptDDP(plan="auto", lossy=["int8"] if is_lossy else "never", **arguments)
            trained, num_steps, plan = _fit(strategy, seed, model)
    os.environ.update(launched)  # Lightning removes its variables after a fit
    plain = (trained, num_steps) if is_lossy else _fit(DDPStrategy(**arguments), seed, model)[:2]
    found = strategy.auto_plan.describe()
    kept = strategy.plan.name, base.name, found.get("chosen"), found.get("status")
    return {"trained": (trained, num_steps), "plain": plain, "plan": plan, "kept": kept}


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(12))
def test_any_fit_trains_the_same_and_keeps_no_plan_that_is_only_tried(seed: int) -> None:
    """If it fails, a search changes training, outlives a fit that ends within it, or divides the ranks."""
    first, second = run_ranks(_fit_by_chance, seed)
    for rank in (first, second):
        assert rank["trained"][1] == rank["plain"][1]
        assert_same(rank["trained"][0], rank["plain"][0])
    assert_same(first["trained"][0], second["trained"][0])
    assert first["plan"] == second["plan"]
    kept, base, chosen, status = first["kept"]
    assert kept == second["kept"][0] == (chosen or base)
    assert kept == base or status == "faster"
