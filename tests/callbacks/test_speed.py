import warnings
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset, default_collate

from lightning_commopt import CommOptDDP
from lightning_commopt.callbacks import SpeedMonitor
from ranks import run_ranks

NUMEL = 3 * 2 + 2


class Line(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).sum()

    def validation_step(self, batch, batch_idx):
        return None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Opaque(Line):
    """Its batches show no size."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return SimpleNamespace(x=batch[0])

    def training_step(self, batch, batch_idx):
        return self.layer(batch.x).sum()


def every_other(samples):
    return None if samples[0][0][0] % 2 else default_collate(samples)


def fit(strategy="auto", devices=1, num_warmup_steps=2, model=Line, collate_fn=None, **settings):
    throughput = SpeedMonitor(num_warmup_steps=num_warmup_steps)
    batch_numbers = torch.arange(10).repeat_interleave(4 * devices)
    data = TensorDataset(batch_numbers[:, None].expand(-1, 3).float())
    loader = DataLoader(data, batch_size=4, collate_fn=collate_fn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            accelerator="cpu",
            devices=devices,
            strategy=strategy,
            callbacks=[throughput],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **{"max_epochs": 2, **settings},
        )
        trainer.fit(model(), loader, loader)
    return throughput


@pytest.mark.parametrize(
    ("settings", "num_steps"),
    [
        ({}, 18),
        ({"num_warmup_steps": 0}, 20),
        ({"val_check_interval": 3}, 18),
        ({"accumulate_grad_batches": 5}, 2),
        ({"num_warmup_steps": 20}, 0),
    ],
)
def test_every_step_after_the_warm_up_counts(settings, num_steps):
    throughput = fit(**settings)
    assert throughput.num_steps == num_steps
    if not num_steps:
        assert (throughput.steps_per_s, throughput.samples_per_s, throughput.wire_bytes_per_step) == (None,) * 3
        return
    batches = settings.get("accumulate_grad_batches", 1)
    assert throughput.samples_per_s == pytest.approx(4 * batches * throughput.steps_per_s)
    assert throughput.steps_per_s == pytest.approx(num_steps / throughput.seconds)
    assert throughput.wire_bytes_per_step == 0


def two_ranks(kind):
    strategies = {
        "ddp": DDPStrategy(),
        "none": CommOptDDP(),
        "bf16": CommOptDDP(comm_hook="bf16"),
        "torch_hook": DDPStrategy(ddp_comm_hook=print),
    }
    throughput = fit(strategies[kind], devices=2)
    return throughput.num_steps, throughput.wire_bytes_per_step


@pytest.mark.parametrize(
    ("kind", "wire_bytes"), [("ddp", 4 * NUMEL), ("none", 4 * NUMEL), ("bf16", 2 * NUMEL), ("torch_hook", None)]
)
def test_bytes_on_the_wire(kind, wire_bytes):
    assert run_ranks(two_ranks, kind) == [(18, wire_bytes)] * 2


def test_batches_that_do_not_show_their_size():
    throughput = fit(model=Opaque)
    assert throughput.num_steps == 18
    assert throughput.samples_per_s is None


def test_batches_that_lightning_skips():
    """If it fails, a collate_fn that returns None ends training, or the batches that it drops are counted."""
    throughput = fit(collate_fn=every_other, num_warmup_steps=0)
    assert throughput.num_steps == 10
    assert throughput.samples_per_s == pytest.approx(4 * throughput.steps_per_s)


def test_a_negative_warm_up_is_refused():
    with pytest.raises(ValueError, match="at least 0, got -1"):
        SpeedMonitor(num_warmup_steps=-1)
