"""GradientSync without ranks: what it resumes from."""

import torch
from torch import nn

from lightning_commopt.plan import CommPlan
from lightning_commopt.sync.ddp.attach import ResidualAdder
from lightning_commopt.sync.ddp.gradient_sync import GradientSync
from lightning_commopt.sync.state import CommState


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
