"""Steps of gradient sync without training: random gradients through DDP and a compressor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.commands.selftest.gradients import Net, flatten, random_gradients, send
from lightning_commopt.commands.selftest.places import TestDevices
from lightning_commopt.compressors import Compressor, Rounds
from lightning_commopt.plan import CommPlan
from lightning_commopt.sync.gradient_sync import GradientSync

NUM_STEPS = 8


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How gradients travel, but for the compressor.

    Attributes:
        place: devices of the ranks.
        net: whose gradients they are.
        ddp: options of DDP.
        ranks_per_node: for the hierarchical compressor; 1 is as if each rank were on a node of its own.
    """

    place: TestDevices
    net: Callable[[], nn.Module] = Net
    ddp: Mapping[str, Any] = field(default_factory=dict)
    ranks_per_node: int = 1

    @property
    def device(self) -> torch.device:
        """This rank's."""
        return self.place.device(dist.get_rank())

    def wrap(
        self, compressor: Compressor | None, module: nn.Module | None = None, **ddp: Any
    ) -> tuple[DistributedDataParallel, GradientSync]:
        """Returns a model in DDP, ``net`` if none is given, synchronized by a compressor."""
        model = DistributedDataParallel((module or self.net()).to(self.device), **self.ddp, **ddp)
        sync = GradientSync(CommPlan(comm_hook=compressor))
        sync.attach(model, timeout=None, ranks_per_node=self.ranks_per_node)
        return model, sync

    def gradients(self, step: int, scale: float = 1.0) -> dict[str, Tensor]:
        """Returns random gradients of this rank, on its device."""
        gradients = random_gradients(step, dist.get_rank(), scale, self.net)
        return {name: x.to(self.device) for name, x in gradients.items()}


def run_step(model: DistributedDataParallel, sync: GradientSync, gradients: Mapping[str, Tensor]) -> Tensor:
    """Sends this rank's gradients, and returns their average, ``(n,)`` float64."""
    average = send(model, gradients)
    sync.end_backward(ends_static_graph=False)
    return flatten(average)


class Steps(NamedTuple):
    """What went through a compressor: in float64 on the CPU, step by step.

    Attributes:
        sent: ``(steps, n)`` this rank's gradients.
        received: ``(steps, n)`` averages.
        residual: ``(n,)`` of this rank, at the end.
        bytes_per_step: handed to collectives, in the mean of the last two steps.
        declared_bytes: that the compressor says it sends.
    """

    sent: Tensor
    received: Tensor
    residual: Tensor
    bytes_per_step: float
    declared_bytes: int


def run_steps(setup: Setup, compressor: Compressor | None) -> Steps:
    """Makes `NUM_STEPS` steps with a compressor, or with DDP alone."""
    model, sync = setup.wrap(compressor)
    sent, received, byte_counts = [], [], [0]
    for step in range(NUM_STEPS):
        gradients = setup.gradients(step)
        sent.append(flatten(gradients))
        received.append(run_step(model, sync, gradients))
        byte_counts.append(sync.wire_bytes)
    layouts = [] if sync.hook is None else [layout for _, layout, _ in sync.hook.state().buckets.values()]
    placed = None if sync.hook is None else sync.hook.compressor
    declared = sum(placed.wire_bytes(layout, dist.get_world_size()) for layout in layouts) if placed else 0
    left = sync.detach()
    residual = {name: left.get(name, torch.zeros_like(value)) for name, value in setup.net().named_parameters()}
    per_step = (byte_counts[-1] - byte_counts[-3]) / 2  # alternating compressors send one factor, then the other
    return Steps(torch.stack(sent), torch.stack(received), flatten(residual), per_step, declared)


def of_all_ranks(value: Any) -> list[Any]:
    """Returns the values of all ranks; all must call it."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def run_alone(rounds: Rounds) -> None:
    """Drives the rounds of a compressor to their end, without a hook."""
    try:
        pending = next(rounds)
        while True:
            pending = rounds.send(pending.wait())
    except StopIteration:
        pass
