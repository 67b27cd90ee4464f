"""What programs ask of a Trainer besides steps: a test, and one fit after another."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from lossless_fits import (
    PLANS,
    Trained,
    assert_same,
    assert_same_parameters,
    numbers,
    quiet_trainer,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_commopt import CommOptDDP
from support.ranks import run_ranks

pytestmark = pytest.mark.exhaustive


class _Sine(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.layers(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", F.mse_loss(self.layers(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def _data() -> DataLoader[Any]:
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=4)


def _fit_test_fit(make_strategy: Callable[[], DDPStrategy]) -> Trained:
    """Fits, tests, fits further with the same Trainer; then the same module with another Trainer and strategy."""
    seed_everything(7, verbose=False)
    module, losses = _Sine(), []
    for _ in range(2):
        trainer = quiet_trainer(make_strategy(), max_epochs=1)
        for max_epochs in (1, 2):
            trainer.fit_loop.max_epochs = max_epochs
            trainer.fit(module, _data())
            losses.append(float(trainer.callback_metrics["loss"]))
            losses.append(trainer.test(module, _data(), verbose=False)[0]["test_loss"])
    return Trained(losses, numbers(module.state_dict()))


def _fit_test_fit_all() -> dict[str, Trained]:
    trained = {"lightning": _fit_test_fit(DDPStrategy)}
    for name, plan in PLANS.items():
        trained[name] = _fit_test_fit(lambda plan=plan: CommOptDDP(**plan))  # type: ignore[misc]
    return trained


def test_fits_and_tests_in_one_process() -> None:
    """If it fails, a second fit, or a test between two, meets what the first one left."""
    of_ranks = run_ranks(_fit_test_fit_all)
    for rank, trained in enumerate(of_ranks):
        for name in PLANS:
            assert_same(trained[name], trained["lightning"], f"{name}, rank {rank}")
            assert_same_parameters(trained[name], of_ranks[0][name], f"{name}, ranks 0 and {rank}")
