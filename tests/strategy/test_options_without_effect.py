"""Options of ``CommOptModelParallel`` that change nothing in a fit warn once, on rank 0; others never do."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

from lightning_commopt import CommOptModelParallel, shard
from lightning_commopt.text import validation
from support.kept_states import Sharded
from support.ranks import run_ranks
from support.strategy_models import FEATURES, Tiny, loader, trainer

pytestmark = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_custom_reduce_scatter"), reason="FSDP2 takes other collectives from torch 2.9 on"
)


class _Scaled(Tiny):
    """Has parameters of one dimension only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LayerNorm(FEATURES)  # type: ignore[assignment]

    def configure_model(self) -> None:
        shard(self, self.device_mesh, blocks=nn.LayerNorm)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch[0]).sum(1, keepdim=True), batch[1])


def _fits() -> list[list[str]]:
    told = []
    for options, model, accumulate in (
        ({"accumulate_grads": "unsharded"}, Sharded(), 1),
        ({"accumulate_grads": "unsharded"}, Sharded(), 3),
        ({"comm_hook": "int8"}, _Scaled(), 1),
        ({"comm_hook": "int8"}, Sharded(), 1),
        ({"comm_hook": {"name": "hierarchical", "inner": "int8", "ranks_per_node": 1}}, Sharded(), 1),
    ):
        validation.warn_once.cache_clear()
        with warnings.catch_warnings(record=True) as caught, torch.random.fork_rng():
            warnings.simplefilter("always")
            strategy = CommOptModelParallel(2, 1, **options)
            trainer(strategy, max_epochs=1, accumulate_grad_batches=accumulate).fit(model, loader(24))
        told.append([str(warning.message) for warning in caught if "effect" in str(warning.message)])
    return told


def test_fsdp2s_options_that_change_nothing_are_told_of() -> None:
    """If it fails, somebody trains on with an option that does nothing, or is told so where it does something."""
    first, second = run_ranks(_fits)
    assert second == [[]] * 5
    assert first == [
        ["accumulate_grads='unsharded' had no effect: no gradients were accumulated."],
        [],
        [
            "comm_hook has no effect here: each unit of the model has parameters of one dimension only, which travel as"
            " they are."
        ],
        [],
        ["comm_hook: 'hierarchical' has no effect here: each node has one rank, so all is as with its 'inner'."],
    ]
