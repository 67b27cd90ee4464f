"""LBFGS, which calls its closure, and with it a backward, as often as it decides."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lightning_commopt import CommOptDDP
from lightning_commopt.fabric import CommOptDDP as FabricCommOptDDP
from lightning_commopt.text import validation
from support.cross_section import sampled
from support.strategy_models import Params, Tiny, assert_same, loader, numbers, trainer
from support.warm_ranks import run_ranks

_BY_GRADIENTS = {"line_search_fn": None, "tolerance_change": 0}
_SEARCH = {"line_search_fn": "strong_wolfe"}


class WithLBFGS(Tiny):
    """Counts its evaluations.

    Args:
        options: of LBFGS.
        shares_loss: return a loss of the same value on all ranks.
    """

    def __init__(self, options: dict[str, Any], shares_loss: bool = False) -> None:
        super().__init__()
        self.options = options
        self.shares_loss = shares_loss
        self.num_evaluations = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.num_evaluations += 1
        loss = self.loss(batch)
        if self.shares_loss:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            loss = mean / dist.get_world_size() + (loss - loss.detach())
        return loss

    def configure_optimizers(self) -> Optimizer:
        return LBFGS(self.parameters(), lr=0.5, max_iter=8, **self.options)


def _fit(options: dict[str, Any], shares_loss: bool, comm_hook: str) -> tuple[list[str], int, Params]:
    module = WithLBFGS(options, shares_loss)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(CommOptDDP(comm_hook=comm_hook)).fit(module, loader())
    messages = [str(each.message) for each in caught if "How often LBFGS evaluates its closure" in str(each.message)]
    return messages, module.num_evaluations, numbers(module)


@pytest.mark.parametrize("comm_hook", sampled(["none", "powersgd"], by_default=["powersgd"]))
@pytest.mark.parametrize(
    ("options", "shares_loss"),
    sampled([(_BY_GRADIENTS, False), (_SEARCH, True)], by_default=[(_SEARCH, True)]),
    ids=["by gradients", "shared loss"],
)
def test_what_the_warning_recommends_keeps_ranks_together(
    options: dict[str, Any], shares_loss: bool, comm_hook: str
) -> None:
    """If it fails, who follows the warning still hangs."""
    first, second = run_ranks(_fit, options, shares_loss, comm_hook, group_timeout_s=20)
    assert first[1] == second[1] > 8
    assert_same(first[2], second[2])
    assert len(first[0]) == shares_loss
    assert second[0] == []  # rank 0 warns for all


def _warnings(devices: int) -> list[int]:
    """Returns how many warnings the Trainer gives, and Fabric, for each way to stop; no step is made."""
    numbers = []
    for options in ({}, _SEARCH, _BY_GRADIENTS):
        for set_up in (_set_up_trainer, _set_up_fabric):
            validation.warn_once.cache_clear()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                set_up(options, devices)
            numbers.append(sum("How often LBFGS evaluates its closure" in str(each.message) for each in caught))
    return numbers


def _set_up_trainer(options: dict[str, Any], devices: int) -> None:
    trainer(CommOptDDP(), devices=devices, max_steps=0).fit(WithLBFGS(options), loader())


def _set_up_fabric(options: dict[str, Any], devices: int) -> None:
    fabric = Fabric(accelerator="cpu", devices=devices, strategy=FabricCommOptDDP())
    fabric.launch()
    module = torch.nn.Linear(2, 2)
    fabric.setup(module, LBFGS(module.parameters(), **options))


def test_lbfgs_that_looks_at_the_loss_is_warned_of() -> None:
    """If it fails, LBFGS hangs until the timeout, and nobody has been told why."""
    assert run_ranks(_warnings, 2) == [[1, 1, 1, 1, 0, 0], [0] * 6]
    assert run_ranks(_warnings, 1, world_size=1) == [[0] * 6]
