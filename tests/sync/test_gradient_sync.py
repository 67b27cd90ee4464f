"""What gradient sync resumes from, without other ranks."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from lightning_commopt.compressors import Layout, State
from lightning_commopt.plan import CommPlan
from lightning_commopt.sync.ddp.attach import ResidualAdder
from lightning_commopt.sync.ddp.checkpoint import usable_state
from lightning_commopt.sync.ddp.gradient_sync import GradientSync
from lightning_commopt.sync.state import CommState
from support.own_compressors import Averages


def test_a_checkpoint_takes_the_place_of_what_is_still_to_be_sent() -> None:
    """If it fails, a checkpoint that is loaded in the middle of a fit gets residuals of the fit before, or no steps."""
    module, sync = nn.Linear(3, 2, bias=False), GradientSync(CommPlan())
    sync._residual_adder = ResidualAdder(module, {"weight": torch.ones(2, 3)})
    sync.restore(CommState(None, 5, {}, {"weight": torch.full((2, 3), 4.0)}))
    sync.resume(module)
    assert sync.num_syncs == 5
    module(torch.zeros(1, 3)).sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad.tolist() == [[4.0] * 3] * 2


@dataclass(frozen=True, kw_only=True)
class _Keeps(Averages):
    def init(self, layout: Layout, device: torch.device, step: int = 0) -> State:
        return {"step": step, "sums": [torch.zeros(3)], "inner": {"scale": torch.ones(())}}


@pytest.mark.parametrize(
    ("change", "is_used"),
    [
        ({}, True),
        ({"further": torch.ones(2)}, True),  # an entry that is made in the first step
        ({"step": 2.0}, False),
        ({"sums": [torch.zeros(4)]}, False),
        ({"sums": [torch.zeros(3).double()]}, False),
        ({"sums": [torch.zeros(3)] * 2}, False),
        ({"sums": [1.0]}, False),
        ({"inner": {}}, False),
        ({"inner": 1}, False),
    ],
    ids=str,
)
def test_a_state_of_another_form_is_not_used(change: dict[str, Any], is_used: bool) -> None:
    """If it fails, a compressor whose class has changed since the checkpoint computes with entries of another shape."""
    module, compressor = nn.Linear(3, 2, bias=False), _Keeps()
    layout = Layout.of([module.weight], torch.float32)
    saved = {**compressor.init(layout, torch.device("cpu"), 4), **change}
    state = CommState(compressor, 5, {0: (("weight",), layout, saved)})
    usable = usable_state(state, compressor, module)
    assert usable.num_syncs == 5
    assert [str(kept) for _, _, kept in usable.buckets.values()] == ([str(saved)] if is_used else [])
