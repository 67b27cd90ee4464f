"""Steps of gradient sync without training: random gradients through DDP and a compressor."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.compressors import Layout
from lightning_commopt.compressors.base import finish
from lightning_commopt.compressors.channel import AloneChannel
from lightning_commopt.compressors.hierarchical import place_on_nodes
from lightning_commopt.plan import CommPlan
from lightning_commopt.sync.ddp.gradient_sync import GradientSync
from lightning_commopt.sync.state import CommState
from lightning_commopt.testing.places import Place


class Net(nn.Module):
    """Matrices, vectors, convolutions and a scalar, mixed; some are not contiguous, as DDP then lays them out."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 16, 3)
        self.first = nn.Linear(32, 24)
        self.second = nn.Linear(24, 40)
        self.scalar = nn.Parameter(torch.ones(()))
        self.image = nn.Conv2d(4, 16, 3).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.empty(24, 32).t())
        _draw_parameters(self)


class LargeNet(nn.Module):
    """Odd sizes: more than one tile of every kernel, and more partial sums than are added up at once."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(257, 513)
        self.second = nn.Linear(513, 131)
        self.image = nn.Conv2d(33, 17, 3).to(memory_format=torch.channels_last)
        self.wide = nn.Parameter(torch.empty(12, 2101))
        self.tall = nn.Parameter(torch.empty(4101, 6))
        self.vocabulary = nn.Parameter(torch.empty(33_001, 5))
        _draw_parameters(self)


def _draw_parameters(net: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))


class Vectors(nn.Module):
    """Parameters that are too small to compress, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.arange(7.0))
        self.one = nn.Parameter(torch.ones(1))
        self.unused = nn.Parameter(torch.ones(5, 300))

    def forward(self, x: Tensor) -> Tensor:
        """Returns a loss, whose gradients are ``x`` and its sum."""
        return (self.bias * x).sum() + self.one.sum() * x.sum()


def random_gradients(step: int, rank: int, scale: float = 1.0, net: Callable[[], nn.Module] = Net) -> dict[str, Tensor]:
    """Returns normally distributed gradients of a network on the CPU, different on every rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: scale * torch.randn(shape, generator=generator) for name, shape in _shapes(net).items()}


@cache
def _shapes(net: Callable[[], nn.Module]) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in net().named_parameters()}


def send(model: DistributedDataParallel, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sends gradients through DDP, as gradients of the loss ``sum(parameter * gradient)``.

    Returns:
        The average, as the optimizer would see it.
    """
    module = model.module
    original = module.forward
    module.forward = lambda: sum((p * gradients[name]).sum() for name, p in module.named_parameters())
    model.zero_grad()
    model().backward()
    module.forward = original
    return {name: parameter.grad.clone() for name, parameter in module.named_parameters()}


def flatten(tensors: dict[str, Tensor]) -> Tensor:
    """Returns all tensors in one, ``(n,)`` float64 on the CPU."""
    return torch.cat([tensor.detach().cpu().double().reshape(-1) for tensor in tensors.values()])


def in_bucket(layout: Layout, gradients: Mapping[str, Tensor]) -> Tensor:
    """Returns gradients as one bucket, ``(n,)`` float32 on their device."""
    flat = torch.zeros(layout.numel, device=next(iter(gradients.values())).device)
    for part, gradient in zip(layout.split(flat), gradients.values(), strict=True):
        part.copy_(gradient)
    return flat


NUM_STEPS = 8  # even, as some compressors alternate; errors of later steps need residuals of earlier ones


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How gradients travel, but for the compressor: here through DDP."""

    place: Place  # devices of the ranks
    net: Callable[[], nn.Module] = Net  # makes the network that has the gradients
    options: Mapping[str, Any] = field(default_factory=dict)  # keywords of DistributedDataParallel
    ranks_per_node: int = 1  # used by the hierarchical compressor; 1 places each rank on a node of its own
    has_even_parts: ClassVar[bool] = False  # whether all ranks send the same number of bytes for any shapes

    @property
    def device(self) -> torch.device:
        return self.place.device(dist.get_rank())

    def wrap(self, compressor: Any, module: nn.Module | None = None, **ddp: Any) -> tuple[Any, Any]:
        """Returns a model in DDP, ``net`` if none is given, synchronized by a compressor; and its gradient sync."""
        model = DistributedDataParallel((module or self.net()).to(self.device), **self.options, **ddp)
        sync = GradientSync(CommPlan(comm_hook=compressor))
        sync.attach(model, timeout=timedelta(seconds=self.place.timeout_s), ranks_per_node=self.ranks_per_node)
        return model, sync

    def gradients(self, step: int, scale: float = 1.0) -> dict[str, Tensor]:
        """Returns random gradients of this rank, on its device."""
        gradients = random_gradients(step, dist.get_rank(), scale, self.net)
        return {name: x.to(self.device) for name, x in gradients.items()}

    def run_step(self, model: Any, sync: Any, gradients: Mapping[str, Tensor]) -> Tensor:
        """Sends this rank's gradients, and returns their average, ``(n,)`` float64. All ranks must call it."""
        average = send(model, gradients)
        sync.end_backward(ends_static_graph=False)
        return flatten(average)

    def alone(self, compressor: Any) -> Callable[[Mapping[str, Tensor]], list[str]]:
        """Returns what makes a step of this rank without the others, and returns the collectives that it issued."""
        compressor, of_node = place_on_nodes(compressor, dist.get_world_size(), self.ranks_per_node)
        layout = Layout.of(list(self.net().parameters()), torch.float32)
        channel, state = alone_channel(dist.get_world_size(), of_node or 1), compressor.init(layout, self.device)

        def run(gradients: Mapping[str, Tensor]) -> list[str]:
            with torch.no_grad():
                finish(compressor.rounds(in_bucket(layout, gradients), layout, state, channel))
            return take_issued(channel)

        return run

    def declared_bytes(self, model: Any, sync: Any) -> int:
        """Returns the bytes of a step that the compressor declares; 0 without one."""
        if sync.hook is None:
            return 0
        layouts = [layout for _, layout, _ in sync.hook.state().buckets.values()]
        return sum(sync.hook.compressor.wire_bytes(layout, dist.get_world_size()) for layout in layouts)

    def save(self, sync: Any) -> Any:
        """Returns a copy of what a checkpoint holds, for `restore`."""
        state = sync.state()
        return copy.deepcopy(state.on_cpu()) if state is not None else CommState()

    def restore(self, model: Any, sync: Any, saved: Any) -> None:
        """Continues from what `save` has returned."""
        sync.restore(saved)
        sync.resume(model.module)

    def end(self, sync: Any) -> dict[str, Tensor]:
        """Ends the gradient sync; returns the residuals of this rank by parameter."""
        residuals: dict[str, Tensor] = sync.detach()
        return residuals


def alone_channel(size: int, ranks_per_node: int) -> AloneChannel:
    """Returns a channel that sends nothing, over ``size`` consecutive ranks, including this one, and their nodes."""
    rank = dist.get_rank() % size
    within = AloneChannel(ranks_per_node, rank % ranks_per_node)
    across = AloneChannel(size // ranks_per_node, rank // ranks_per_node)
    return AloneChannel(size, rank, within, across)


def take_issued(channel: AloneChannel) -> list[str]:
    """Returns what was issued since the last call, in words; nodes may have messages of their own sizes."""
    issued = [f"{name} of {num_bytes} bytes" for name, num_bytes in channel.issued]
    channel.issued.clear()
    for level, level_channel in (("within a node", channel.within), ("across nodes", channel.across)):
        if isinstance(level_channel, AloneChannel):
            issued += [f"{name} {level}" for name, _ in level_channel.issued]
            level_channel.issued.clear()
    return issued


BUCKET_CAP_MB = 0.5
"""Splits the gradients of `LargeNet` into several buckets."""


def large_setup(place: Place) -> Setup:
    """Returns the setup of several buckets with odd sizes."""
    return Setup(place=place, net=LargeNet, options={"bucket_cap_mb": BUCKET_CAP_MB})


class Steps(NamedTuple):
    """What went through a compressor: in float64 on the CPU, step by step."""

    sent: Tensor  # ``(steps, n)`` this rank's gradients
    received: Tensor  # ``(steps, n)`` averages
    residual: Tensor  # ``(n,)`` residual of this rank after the last step
    bytes_per_step: float  # payload handed to collectives, mean of the last two steps
    declared_bytes: int  # payload of a step according to the compressor


def run_steps(setup: Setup, compressor: Any, *, repeat: bool = False) -> Steps:
    """Makes `NUM_STEPS` steps with a compressor, or with none; with ``repeat`` the gradients of all are the same."""
    model, sync = setup.wrap(compressor)
    sent, received, byte_counts = [], [], [0]
    for step in range(NUM_STEPS):
        gradients = setup.gradients(0 if repeat else step)
        sent.append(flatten(gradients))
        received.append(setup.run_step(model, sync, gradients))
        byte_counts.append(sync.wire_bytes)
    declared, residuals = setup.declared_bytes(model, sync), setup.end(sync)
    residual = {name: residuals.get(name, torch.zeros_like(value)) for name, value in setup.net().named_parameters()}
    per_step = (byte_counts[-1] - byte_counts[-3]) / 2  # alternating compressors send one factor, then the other
    return Steps(torch.stack(sent), torch.stack(received), flatten(residual), per_step, declared)
