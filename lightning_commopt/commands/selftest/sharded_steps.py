"""Steps of sharded gradient sync without training: any gradients one likes through FSDP2 and a compressor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_commopt.commands.selftest.gradients import flatten
from lightning_commopt.compressors.sharded import ShardedCompressor
from lightning_commopt.sync.sharded import ShardedSync

NUM_STEPS = 8


class Unit(nn.Module):
    """Parameters without a use of their own; the loss has the gradients that it is given."""

    def __init__(self, generator: torch.Generator, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        for index, shape in enumerate(shapes):
            self.register_parameter(f"p{index}", nn.Parameter(torch.randn(shape, generator=generator)))
        self.parts = nn.ModuleList()

    def forward(self, gradients: Mapping[str, Tensor], prefix: str = "") -> Tensor:
        """Returns ``sum(parameter * gradient)``, of the parts too."""
        own = [p * gradients[prefix + name] for name, p in self.named_parameters(recurse=False) if p.requires_grad]
        losses = [part(gradients, f"{prefix}parts.{index}.") for index, part in enumerate(self.parts)]
        return torch.stack([*(each.sum() for each in own), *losses]).sum()


def new_model() -> Unit:
    """Returns three units: matrices between vectors, kernels, few rows, and rows that no number of ranks divides."""
    generator = torch.Generator().manual_seed(0)
    model = Unit(generator, (30, 40), (1,))
    model.parts.extend([Unit(generator, (33, 17), (33,), (64, 48), (7, 3, 2, 2)), Unit(generator, (5,), (2, 129))])
    return model


@dataclass(frozen=True, kw_only=True)
class ShardedSetup:
    """How a model is sharded.

    Attributes:
        device_type: "cpu" or "cuda".
        num_replicas: of each shard; above 1 this is HSDP.
        fsdp: options of ``fully_shard``.
    """

    device_type: str = "cpu"
    num_replicas: int = 1
    fsdp: Mapping[str, Any] = field(default_factory=dict)

    def shard(self, compressor: ShardedCompressor | None) -> tuple[Unit, ShardedSync | None]:
        """Returns a model, each of whose parts is a unit, synchronized by a compressor."""
        num_ranks = dist.get_world_size()
        shape = (num_ranks,) if self.num_replicas == 1 else (self.num_replicas, num_ranks // self.num_replicas)
        mesh = init_device_mesh(self.device_type, shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
        model = new_model().to(self.device_type)
        for module in (*model.parts, model):
            fully_shard(module, mesh=mesh, **self.fsdp)
        if compressor is None:
            return model, None
        sync = ShardedSync(compressor)
        sync.attach(model)
        return model, sync


def gradients_of(step: int, rank: int, scale: float = 1.0) -> dict[str, Tensor]:
    """Returns normally distributed gradients on the CPU, different on every rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: scale * torch.randn(p.shape, generator=generator) for name, p in new_model().named_parameters()}


def run_step(model: Unit, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sends this rank's gradients; returns their average, whole and on the CPU. All ranks must call it."""
    model.zero_grad()
    model({name: gradient.to(next(model.parameters()).device) for name, gradient in gradients.items()}).backward()
    return averages_of(model)


def averages_of(model: Unit) -> dict[str, Tensor]:
    """Returns the averages that the parameters have now, whole and on the CPU. All ranks must call it."""
    return {
        name: torch.zeros(p.shape) if p.grad is None else p.grad.full_tensor().cpu()  # type: ignore[attr-defined]
        for name, p in model.named_parameters()
    }


class ShardedSteps(NamedTuple):
    """What went through a compressor: in float64 on the CPU, step by step.

    Attributes:
        sent: ``(steps, n)`` this rank's gradients.
        received: ``(steps, n)`` averages.
        residual: ``(n,)`` of this rank, at the end.
        bytes_per_step: handed to collectives.
        declared_bytes: that the compressor says it sends.
        is_compressed: ``(n,)`` bool.
    """

    sent: Tensor
    received: Tensor
    residual: Tensor
    bytes_per_step: float
    declared_bytes: int
    is_compressed: Tensor


def run_steps(setup: ShardedSetup, compressor: ShardedCompressor, *, repeat: bool = False) -> ShardedSteps:
    """Makes `NUM_STEPS` steps.

    Args:
        setup: how the model is sharded.
        compressor: of the gradients.
        repeat: the same gradients in each of them.
    """
    model, sync = setup.shard(compressor)
    assert sync is not None
    sent, received = [], []
    for step in range(NUM_STEPS):
        gradients = gradients_of(0 if repeat else step, dist.get_rank())
        sent.append(flatten(gradients))
        received.append(flatten(run_step(model, gradients)))
    kept = sync.residuals()
    residual = flatten({name: kept.get(name, torch.zeros(p.shape)) for name, p in new_model().named_parameters()})
    is_matrix = flatten({name: torch.full(p.shape, p.dim() > 1) for name, p in new_model().named_parameters()})
    return ShardedSteps(
        torch.stack(sent),
        torch.stack(received),
        residual,
        sync.wire_bytes / NUM_STEPS,
        declared_bytes(model, compressor, dist.get_world_size() // setup.num_replicas),
        is_matrix.bool(),
    )


def declared_bytes(model: Unit, compressor: ShardedCompressor, num_shards: int) -> int:
    """Returns the bytes of one step, as a `Channel` counts them, from shapes alone."""
    total = 0
    for unit in (*model.parts, model):
        rows = [(-(-p.shape[0] // num_shards) * p.shape[1:].numel(), p.dim()) for p in unit.parameters(recurse=False)]
        total += compressor.message_bytes(sum(numel for numel, dim in rows if dim > 1), num_shards)
        total += 4 * num_shards * sum(numel for numel, dim in rows if dim == 1)
    return total // 2
