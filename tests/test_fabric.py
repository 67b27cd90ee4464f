"""CommOptDDP for Fabric, on real ranks."""

import copy
import pickle
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from lightning.pytorch import Trainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt import CommOptDDP as TrainerCommOptDDP
from lightning_commopt.fabric import CommOptDDP
from lightning_commopt.plan import OptionError
from support.warm_ranks import run_ranks

LOSSLESS: list[dict[str, Any]] = [
    {},
    {"comm_hook": "all_reduce", "bucket_cap_mb": 0.01},
    {"static_graph": True, "gradient_as_bucket_view": True},
    {"static_graph": True, "comm_hook": "all_reduce", "bucket_cap_mb": 0.01},
]


def _train(options: dict[str, Any] | None, accumulate: int, devices: int) -> tuple[list[np.ndarray], int | None]:
    strategy = DDPStrategy() if options is None else CommOptDDP(**options)
    fabric = Fabric(accelerator="cpu", devices=devices, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    generator = torch.Generator().manual_seed(1)
    for step in range(6 * accumulate):
        x, y = torch.randn(8, 16, generator=generator), torch.randint(0, 4, (8,), generator=generator)
        share = slice(fabric.global_rank, None, fabric.world_size)
        is_last = (step + 1) % accumulate == 0
        with fabric.no_backward_sync(model, enabled=not is_last):
            fabric.backward(nn.functional.cross_entropy(model(x[share]), y[share]) / accumulate)
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().numpy() for p in model.parameters()], getattr(strategy, "wire_bytes", None)


@cache
def _trained_with_ddp(accumulate: int) -> list[Any]:
    return run_ranks(_train, None, accumulate, 2)


@pytest.mark.parametrize(
    ("options", "accumulate"),
    [
        pytest.param(options, accumulate, marks=[] if (number + accumulate // 3) % 2 == 0 else pytest.mark.exhaustive)
        for number, options in enumerate(LOSSLESS)
        for accumulate in (1, 3)
    ],
    ids=str,
)
def test_lossless_equals_ddp(options: dict[str, Any], accumulate: int) -> None:
    """If it fails, Fabric users get other parameters from a lossless plan."""
    trained = run_ranks(_train, options, accumulate, 2)
    for (ours, _), (ddp, _) in zip(trained, _trained_with_ddp(accumulate), strict=True):
        for mine, other in zip(ours, ddp, strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-7)


def test_compression_sends_less_and_ranks_agree() -> None:
    """If it fails, comm_hook does nothing under Fabric, or ranks drift apart."""
    sent = {}
    for name in ("all_reduce", "bf16", "powersgd"):
        (first, sent[name]), (second, _) = run_ranks(_train, {"comm_hook": name}, 1, 2)
        for mine, other in zip(first, second, strict=True):
            np.testing.assert_array_equal(mine, other)
    assert sent["bf16"] == sent["all_reduce"] // 2
    assert sent["powersgd"] < sent["bf16"]


def test_accumulating_steps_send_nothing() -> None:
    """If it fails, no_backward_sync synchronizes all the same."""
    (_, every), _ = run_ranks(_train, {"comm_hook": "all_reduce"}, 1, 2)
    (_, accumulated), _ = run_ranks(_train, {"comm_hook": "all_reduce"}, 3, 2)
    assert accumulated == every


def _copy_in_training(comm_hook: str | None, plan: str | None) -> None:
    strategy = CommOptDDP(comm_hook=comm_hook, plan=plan)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    layer = nn.Linear(4, 3)
    model, optimizer = fabric.setup(layer, torch.optim.SGD(layer.parameters(), lr=0.1))

    def gradients(of: nn.Module) -> list[list[float]]:
        fabric.backward(of(torch.full((2, 4), 1.0 + fabric.global_rank)).square().sum())
        return [x.grad.tolist() for x in of.parameters() if x.grad is not None]

    gradients(model)
    optimizer.step()
    optimizer.zero_grad()
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model._forward_module))
    sent = strategy.wire_bytes
    from_copies = [gradients(one) for one in copies]
    assert strategy.wire_bytes == sent
    assert copies[0]._strategy.wire_bytes == 0
    assert from_copies == [gradients(model)] * 2


@pytest.mark.parametrize("options", [(None, None), ("all_reduce", None), (None, "auto")], ids=str)
def test_copies_are_modules_of_their_own(options: tuple[str | None, str | None]) -> None:
    """If it fails, a loop that keeps a copy of its best model raises, or the copy counts as the model in training."""
    run_ranks(_copy_in_training, *options)


def _one_rank(hook: str | None) -> tuple[bool, str | None]:
    fabric = Fabric(accelerator="cpu", devices=1, strategy=CommOptDDP(comm_hook=hook))
    fabric.launch()
    with patch("lightning_commopt.fabric.explain_one_rank") as explain:
        model = fabric.setup_module(nn.Linear(2, 2))
    with fabric.no_backward_sync(model):
        fabric.backward(model(torch.ones(1, 2)).sum())
    return isinstance(model._forward_module, DistributedDataParallel), explain.call_args.args[0]


@pytest.mark.parametrize(("hook", "unused"), [("bf16", "comm_hook"), (None, None)])
def test_one_rank_has_no_wrapper(hook: str | None, unused: str | None) -> None:
    """If it fails, one process pays for DDP, or no_backward_sync refuses it, or nobody says that no hook runs."""
    assert run_ranks(_one_rank, hook, world_size=1) == [(False, unused)]


def test_bad_option() -> None:
    """If it fails, Fabric users find a mistake late."""
    with pytest.raises(OptionError, match="matrix_rank must be an integer of at least 1, got 0"):
        CommOptDDP(comm_hook={"name": "powersgd", "matrix_rank": 0})
    with pytest.raises(OptionError, match="NCCL_ALGO must be a list of"):
        CommOptDDP(nccl={"algo": "Rnig"})


def test_the_other_class_of_the_same_name_is_refused_with_the_right_import() -> None:
    """If it fails, the Trainer's strategy in Fabric, or the reverse, is called an invalid name and nothing more."""
    with pytest.raises(ValueError, match=r"for Fabric there is lightning_commopt\.fabric\.CommOptDDP"):
        Fabric(accelerator="cpu", strategy=TrainerCommOptDDP())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"for a Trainer there is lightning_commopt\.CommOptDDP"):
        Trainer(accelerator="cpu", strategy=CommOptDDP(comm_hook="bf16"))  # type: ignore[arg-type]
