"""Checks of DiLoCo's exchanges, in the host's memory beside a model on the device."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_commopt.commands.selftest.checks import check
from lightning_commopt.compressors.channel import Channel
from lightning_commopt.plan import DiLoCoPlan
from lightning_commopt.sync.diloco.exchange import Exchange
from lightning_commopt.sync.diloco.rounds import Rounds
from lightning_commopt.testing.places import Place

_NUM_STEPS = 8
_RTOL, _ATOL = 1e-5, 1e-6  # the mean is computed from differences, in float32
_PLANS = {  # each ends with all ranks' weights equal, and the last of the steps exchanged
    "one fragment": DiLoCoPlan(sync_every=4, outer_lr=1.0, outer_momentum=0.0),
    "two fragments": DiLoCoPlan(sync_every=4, fragments=2, fragment_by="bytes", outer_lr=1.0, outer_momentum=0.0),
}


@check("DiLoCo without an outer optimizer gives the mean of the ranks' weights, with the same bits on all")
def _mean_of_weights(place: Place) -> str:
    rank, size = dist.get_rank(), dist.get_world_size()
    device = place.device(rank)
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    channel = Channel(group)
    for name, plan in _PLANS.items():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(33, 65), torch.nn.Linear(65, 7)).to(device)
        expected = [x.detach().double() for x in model.parameters()]
        rounds = Rounds(plan, model, Exchange(channel, None))
        try:
            for step in range(_NUM_STEPS):
                _change(model, expected, step, rank, size)
                rounds.step()
            rounds.finish()
        finally:
            rounds.close()
        for parameter, mean in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.detach(), mean.float(), rtol=_RTOL, atol=_ATOL)
        own = torch.cat([x.detach().reshape(-1) for x in model.parameters()]).cpu()
        others = channel.all_gather(own).wait()
        assert all(torch.equal(other, own) for other in others), f"{name}: the ranks have different bits"
    return f"{len(_PLANS)} plans, {_NUM_STEPS} steps"


@torch.no_grad()
def _change(model: torch.nn.Module, expected: list[torch.Tensor], step: int, rank: int, size: int) -> None:
    """Changes each rank's parameters by other values, and adds their mean to ``expected``."""
    for index, (parameter, mean) in enumerate(zip(model.parameters(), expected, strict=True)):
        for other in range(size):
            generator = torch.Generator().manual_seed(1000 * step + 10 * index + other)
            change = torch.randn(parameter.shape, generator=generator).to(parameter.device)
            mean.add_(change.double(), alpha=1 / size)
            if other == rank:
                parameter.add_(change)
