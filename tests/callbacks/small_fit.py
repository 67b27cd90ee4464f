"""A fit of a few steps on CPU."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_commopt.callbacks import CommTimeMonitor
from support.lightnings import LightningModule, Trainer
from support.quick_costs import quick_costs

NUM_STEPS = 10
PARAMETERS = 8 * 16 + 16 + 16 * 4 + 4


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layers(batch[0]).square().mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(comm_time: CommTimeMonitor | None, strategy: Any = None, devices: int = 2, **options: Any) -> Net:
    """Trains; compressors are measured at its end with `quick_costs`."""
    net = options.pop("net", None) or Net()
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(TensorDataset(torch.randn(12 * NUM_STEPS, 8, generator=generator)), batch_size=3)
    callbacks = [comm_time] if comm_time is not None else []
    ckpt_path = options.pop("ckpt_path", None)
    val_loader = loader if options.pop("validates", False) else None
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy or "auto",
        callbacks=[*callbacks, *options.pop("callbacks", [])],
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_steps": NUM_STEPS, "max_epochs": -1, "logger": False, "enable_checkpointing": False, **options},
    )
    with warnings.catch_warnings(), quick_costs():
        warnings.filterwarnings("ignore", message="(?!CommTimeMonitor)")  # Lightning's own
        trainer.fit(net, loader, val_loader, ckpt_path=ckpt_path)
    return net
