"""What ranks with DiLoCo do on the fake device."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import nn

from fake_device.device import Outcome, digest, in_all_schedules
from lightning_commopt.compressors.channel import Channel
from lightning_commopt.plan import DiLoCoPlan
from lightning_commopt.sync.diloco.exchange import Exchange
from lightning_commopt.sync.diloco.rounds import Rounds
from lightning_commopt.sync.groups import borrow_groups, default_group

_WIDTH = 48
_NUM_LAYERS = 4
_STEPS_TO_VALIDATION, _STEPS_IN_ALL = 5, 9  # the second ends in the middle of a round


def train(plan: DiLoCoPlan) -> Outcome:
    """Makes steps in which nothing but an exchange waits for the device, with a validation between two of them."""
    torch.manual_seed(0)
    device = torch.device("cuda", dist.get_rank())
    module = nn.Sequential(*(layer for _ in range(_NUM_LAYERS) for layer in (nn.Linear(_WIDTH, _WIDTH), nn.Tanh())))
    module.register_buffer("seen", torch.zeros(_WIDTH))
    module.register_buffer("num_seen", torch.zeros((), dtype=torch.int64))
    module.to(device)
    batches = torch.randn(8, 16, _WIDTH).add(dist.get_rank()).to(device)
    groups = borrow_groups(default_group(), backend="gloo")
    rounds = Rounds(plan, module, Exchange(Channel(groups.all_ranks), plan.comm_hook))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    shown = []
    for step in range(_STEPS_IN_ALL):
        batch = batches[step % len(batches)]
        loss = module(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        module.get_buffer("seen").add_(batch.mean(0))
        module.get_buffer("num_seen").add_(1)
        rounds.counts.samples += 1 + dist.get_rank()
        rounds.step()
        if step == _STEPS_TO_VALIDATION:
            rounds.show_global()
            shown.append(module(batches[0]))
            rounds.show_own()
    own = digest(module.parameters())
    rounds.finish()
    shown.append(module(batches[0]))
    values = Outcome(digest([*module.parameters(), *module.buffers()]), own, digest(shown))
    if rounds.close():
        groups.return_to_pool()
    return values


def run_diloco(plan: DiLoCoPlan) -> dict[str, Outcome]:
    """Trains in all schedules."""
    torch.cuda.set_device(dist.get_rank())
    warnings.simplefilter("ignore")  # of settings that are made for a test
    return in_all_schedules(lambda: train(plan))
