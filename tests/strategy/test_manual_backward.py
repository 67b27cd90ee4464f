"""Manual optimization: what DDP does not synchronize is reported, and whatever is healthy is not."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_commopt import CommOptDDP, CommOptDiLoCo
from lightning_commopt.callbacks import CommTimeMonitor
from lightning_commopt.text import validation
from support.lightnings import DDPStrategy
from support.strategy_models import Gan, Manual, Params, Tiny, loader, numbers, trainer
from support.warm_ranks import run_ranks


class LossBackward(Manual):
    """Calls backward of the loss, as without Lightning."""

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class ByWrapper(LossBackward):
    """Calls DDP itself, whose forward prepares the backward."""

    def loss(self, batch: Any) -> Tensor:
        wrapper: Any = self.trainer.strategy.model
        return torch.nn.functional.mse_loss(wrapper(batch[0]), batch[1])


class WithoutSync(Manual):
    """Never synchronizes gradients, on purpose."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        with self.trainer.strategy.block_backward_sync():  # type: ignore[attr-defined]
            self.manual_backward(self.loss(batch))
        optimizer.step()
        optimizer.zero_grad()


class AsksTheWrapper(Manual):
    """Accumulates as programs for DDP do."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        wrapper: Any = self.trainer.model
        with wrapper.no_sync():
            self.manual_backward(self.loss(batch))


class ClosureBackward(Manual):
    """Runs backward within the optimizer's step, after one without gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        optimizer.step()
        optimizer.step(lambda: self.manual_backward(self.loss(batch)))


class OtherParameters(LossBackward):
    """Trains a probe whose parameters DDP was told to leave alone, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = torch.nn.Linear(1, 1)
        self._ddp_params_and_buffers_to_ignore = ["probe.weight", "probe.bias"]

    def loss(self, batch: Any) -> Tensor:
        return self.probe(self(batch[0]).detach()).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.probe.parameters(), lr=0.01)


_HEALTHY: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "automatic": (Tiny, {}),
    "manual": (Manual, {}),
    "accumulated": (lambda: Manual(accumulate=2), {}),
    "two optimizers": (Gan, {"find_unused_parameters": True}),
    "on purpose": (WithoutSync, {}),
    "closure": (ClosureBackward, {}),
    "wrapper": (ByWrapper, {}),
    "other parameters": (OtherParameters, {}),
}


def _fit(strategy: Any, module: Any, **options: Any) -> tuple[list[str], Params]:
    validation.warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(strategy, max_epochs=1, **options).fit(module, loader())
    messages = [str(warning.message) for warning in caught if "manual_backward" in str(warning.message)]
    return messages, numbers(module)


def _fit_broken() -> dict[str, tuple[list[str], Params]]:
    found = {"ddp alone": _fit(DDPStrategy(), LossBackward())}
    for comm_hook in (None, "int8"):
        found[f"commopt {comm_hook}"] = _fit(CommOptDDP(comm_hook=comm_hook), LossBackward(accumulate=2))
    with tempfile.TemporaryDirectory() as folder:
        monitors = {"ddp monitored": DDPStrategy(), "commopt monitored": CommOptDDP()}
        for name, strategy in monitors.items():
            monitor = CommTimeMonitor(dirpath=folder, print_summary=False, save_records=False)
            found[name] = _fit(strategy, LossBackward(), callbacks=[monitor])
    return found


def test_loss_backward_is_reported() -> None:
    """If it fails, ranks train weights of their own, and nobody says so; or a warning comes with every step."""
    first, second = run_ranks(_fit_broken)
    for name, (messages, params) in first.items():
        assert len(messages) == (name != "ddp alone"), name
        assert all("call self.manual_backward(loss) instead of loss.backward()" in message for message in messages)
        assert any(not np.array_equal(values, second[name][1][key]) for key, values in params.items()), name


def _fit_healthy() -> dict[str, tuple[list[str], Params]]:
    found = {name: _fit(CommOptDDP(**options), make()) for name, (make, options) in _HEALTHY.items()}
    with tempfile.TemporaryDirectory() as folder:
        monitor = CommTimeMonitor(dirpath=folder, print_summary=False, save_records=False)
        found["monitored"] = _fit(DDPStrategy(), Manual(), callbacks=[monitor])
    return found


def test_healthy_manual_optimization_is_not_reported() -> None:
    """If it fails, a program that synchronizes its gradients, or does not on purpose, gets a warning."""
    first, second = run_ranks(_fit_healthy)
    for name, (messages, params) in first.items():
        assert not messages, name
        is_own = name in ("on purpose", "other parameters")
        assert is_own or all(np.array_equal(values, second[name][1][key]) for key, values in params.items()), name


def _error_of(strategy: Callable[[], Any]) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a short fit
        with pytest.raises(AttributeError) as caught:
            trainer(strategy()).fit(AsksTheWrapper(), loader())
    return str(caught.value)


@pytest.mark.parametrize("strategy", [CommOptDDP, partial(CommOptDiLoCo, sync_every=2)])
def test_a_module_that_is_not_wrapped_says_why_it_has_no_no_sync(strategy: Callable[[], Any]) -> None:
    [error] = run_ranks(_error_of, strategy, world_size=1)
    assert "contextlib.nullcontext" in error
