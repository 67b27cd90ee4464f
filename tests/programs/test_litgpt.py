"""A GPT of litgpt in a training loop with Fabric, as litgpt writes it: accumulation without gradient sync, clipping."""

import math
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from lossless_fits import EXACT_IN_ACCUMULATION, PLANS, Trained, assert_same, assert_same_parameters, numbers
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_commopt.fabric import CommOptDDP
from support.ranks import run_ranks

pytestmark = pytest.mark.exhaustive

_ACCUMULATE, _NUM_STEPS, _WARMUP_STEPS, _PEAK = 3, 5, 2, 3e-3


@pytest.fixture(autouse=True)
def litgpt() -> None:
    pytest.importorskip("litgpt", reason="benchmarks/programs.sh installs and runs this")


def _learning_rate(step: int) -> float:
    if step < _WARMUP_STEPS:
        return _PEAK * (step + 1) / _WARMUP_STEPS
    return _PEAK * 0.5 * (1 + math.cos(math.pi * (step - _WARMUP_STEPS) / (_NUM_STEPS - _WARMUP_STEPS)))


def _pretrain(strategy: Any, precision: Any) -> Trained:
    from litgpt.model import GPT, Config

    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, precision=precision)
    fabric.launch()
    fabric.seed_everything(7, verbose=False)
    config = Config.from_name("pythia-14m", block_size=32, n_layer=2, n_embd=64, n_head=4, vocab_size=128)
    with fabric.init_module(empty_init=False):
        model = GPT(config)
    model = fabric.setup(model)
    optimizer: Any = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=_PEAK, betas=(0.9, 0.95)))
    tokens = torch.randint(0, 128, (200, 17), generator=torch.Generator().manual_seed(1))
    batches = fabric.setup_dataloaders(DataLoader(tokens, batch_size=4))  # type: ignore[arg-type]
    losses = []
    for number, batch in zip(range(_ACCUMULATE * _NUM_STEPS), batches, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(number // _ACCUMULATE)
        is_accumulating = (number + 1) % _ACCUMULATE != 0
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
            fabric.backward(loss / _ACCUMULATE)
        losses.append(loss.item())
        if not is_accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    return Trained(losses, numbers(model.state_dict()), getattr(strategy, "wire_bytes", None))


def _pretrain_all(precision: str) -> dict[str, Trained]:
    trained = {"lightning": _pretrain(DDPStrategy(), precision)}
    for name, options in PLANS.items():
        trained[name] = _pretrain(CommOptDDP(**options), precision)
    return trained


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_trains_as_with_lightnings_ddp(precision: str) -> None:
    """If it fails, a pretraining script on Fabric gets another model from a plan that loses nothing."""
    of_ranks = run_ranks(_pretrain_all, precision, limit_s=500)
    for rank, trained in enumerate(of_ranks):
        for name in EXACT_IN_ACCUMULATION:
            assert_same(trained[name], trained["lightning"], f"{name}, rank {rank}")
            assert_same_parameters(trained[name], of_ranks[0][name], f"{name}, ranks 0 and {rank}")
        # A static graph's first backward is synchronized whether or not the step accumulates.
        assert trained["static_all_reduce"].wire_bytes > trained["all_reduce"].wire_bytes > 0
