"""Laws that hold for every compressor of FSDP2's shards; `check_compressor` and ``commopt selftest`` check them.

Steps are without training: any gradients one likes go through FSDP2 and a compressor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_commopt.compressors import ShardedCompressor, ShardedHierarchical
from lightning_commopt.compressors.base import finish
from lightning_commopt.compressors.shards import first_seed
from lightning_commopt.plan import OptionError
from lightning_commopt.plan.sharded import check_available
from lightning_commopt.sync.fsdp2.gradients import ShardedSync
from lightning_commopt.sync.gather import values_of_all_ranks
from lightning_commopt.testing import laws
from lightning_commopt.testing.law import Law
from lightning_commopt.testing.laws import law
from lightning_commopt.testing.places import CPU, Place
from lightning_commopt.testing.steps import Setup, alone_channel, flatten, run_steps, take_issued


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
        return torch.stack([*(product.sum() for product in own), *losses]).sum()


def new_model() -> Unit:
    """Returns three units: matrices between vectors, kernels, few rows, and rows that no number of ranks divides."""
    generator = torch.Generator().manual_seed(0)
    model = Unit(generator, (30, 40), (1,))
    model.parts.extend([Unit(generator, (33, 17), (33,), (64, 48), (7, 3, 2, 2)), Unit(generator, (5,), (2, 129))])
    return model


@dataclass(frozen=True, kw_only=True)
class ShardedSetup(Setup):
    """How a model is sharded; ``options`` go to ``fully_shard``."""

    place: Place = CPU
    net: Callable[[], nn.Module] = new_model
    num_replicas: int = 1  # replicas of each shard; HSDP if above 1
    has_even_parts: ClassVar[bool] = True  # FSDP2 pads its shards

    def wrap(self, compressor: Any, module: nn.Module | None = None, **fsdp: Any) -> tuple[Any, Any]:
        """Returns a model, each of whose parts is a unit, synchronized by a compressor; and its gradient sync."""
        num_ranks = dist.get_world_size()
        shape = (num_ranks,) if self.num_replicas == 1 else (self.num_replicas, num_ranks // self.num_replicas)
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
        model: Any = (module or self.net()).to(self.device)
        for part in (*model.parts, model):
            fully_shard(part, mesh=mesh, **self.options, **fsdp)
        sync = ShardedSync(compressor)
        timeout = timedelta(seconds=self.place.timeout_s)
        sync.attach(model, ranks_per_node=self.ranks_per_node, timeout=timeout)
        return model, sync

    def run_step(self, model: Any, sync: Any, gradients: Mapping[str, Tensor]) -> Tensor:
        return flatten(run_step(model, gradients))

    def alone(self, compressor: Any) -> Callable[[Mapping[str, Tensor]], list[str]]:
        num_ranks, of_node, states = dist.get_world_size() // self.num_replicas, 1, {}
        if isinstance(compressor, ShardedHierarchical):
            compressor = compressor.on_nodes([num_ranks], self.ranks_per_node)
            of_node = compressor.ranks_per_node or 1
        channel = alone_channel(num_ranks, of_node)
        matrices = {name: p.shape for name, p in self.net().named_parameters() if p.dim() > 1}
        numels = {name: -(-shape[0] // num_ranks) * shape[1:].numel() for name, shape in matrices.items()}
        for unit, (name, numel) in enumerate(numels.items()):
            states[name] = compressor.init(numel, num_ranks, self.device, first_seed(unit, channel.rank))

        def run(gradients: Mapping[str, Tensor]) -> list[str]:
            for name, numel in numels.items():
                rows = gradients[name].new_zeros(num_ranks * numel)  # FSDP2 pads the last shards with zeros
                rows[: gradients[name].numel()] = gradients[name].reshape(-1)
                columns, mean = rows.view(num_ranks, numel), rows.new_empty(numel)
                with torch.no_grad():
                    finish(compressor.rounds([columns], [mean], states[name], channel))
            return take_issued(channel)

        return run

    def declared_bytes(self, model: Any, sync: Any) -> int:
        """Returns the bytes of one step, as a `Channel` counts them, from shapes alone."""
        total, num_shards = 0, dist.get_world_size() // self.num_replicas
        for unit in (*model.parts, model):
            own = list(unit.parameters(recurse=False))
            rows = [(-(-p.shape[0] // num_shards) * p.shape[1:].numel(), p.dim()) for p in own]
            total += sync.compressor.message_bytes(sum(numel for numel, dim in rows if dim > 1), num_shards)
            total += 4 * num_shards * sum(numel for numel, dim in rows if dim == 1)
        return total // 2

    def save(self, sync: Any) -> Any:
        return copy.deepcopy(sync.state())

    def restore(self, model: Any, sync: Any, saved: Any) -> None:
        sync.restore(saved)

    def end(self, sync: Any) -> dict[str, Tensor]:
        residuals: dict[str, Tensor] = sync.residuals()
        return residuals


def why_unavailable(place: Place) -> str:
    """Returns why FSDP2 can take no compressor in this place; "" if it can."""
    try:
        check_available()
    except OptionError as error:
        return str(error)
    on_nccl = place.device_type == "cpu" or "nccl" in place.backend
    return "" if on_nccl else "FSDP2 on CUDA needs NCCL"


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


_SHARED_LAWS = (laws.same_collectives, laws.averages, laws.bytes_as_declared, laws.overflow, laws.tiny, laws.resume)
_SHARDED_LAWS: dict[str, Law] = {shared.name: shared for shared in _SHARED_LAWS}
SHARDED_LAWS: Mapping[str, Law] = MappingProxyType(_SHARDED_LAWS)
"""The laws for a `ShardedCompressor` with FSDP2 by their names, in the order in which they are checked."""


@law(
    "matrices are compressed, vectors are not, and an infinite number stays in its block",
    "biases and norms lose precision, or an overflow of one parameter is one of all",
    _SHARDED_LAWS,
)
def only_matrices(setup: Setup, name: str, compressor: ShardedCompressor) -> None:
    """A matrix is taken for compressed if it is not exact."""
    gradients = setup.gradients(0)
    if dist.get_rank() == 0:
        gradients["parts.0.p2"][5, 7] = torch.inf
    model, _ = setup.wrap(compressor)
    received, every = run_step(model, gradients), values_of_all_ranks({key: x.cpu() for key, x in gradients.items()})
    for key, average in received.items():
        error = (average.double() - torch.stack([gradient[key].double() for gradient in every]).mean(0)).abs().max()
        if key == "parts.0.p2":
            assert not average.isfinite().all(), f"{name}: hides an overflow"
        elif average.dim() == 1:
            assert error <= 1e-6, f"{name}: a vector is off by up to {error:.3g}"
        else:
            assert error < torch.inf, f"{name}: {key} is not finite, where another parameter is not"
            assert error > 1e-6 or not compressor.claims.is_lossy, f"{name}: {key} is exact, so it is not compressed"


@law(
    "what is rounded at random is exact on average",
    "errors of rounding add up over the steps of a training, where they should cancel",
    _SHARDED_LAWS,
)
def unbiased(setup: Setup, name: str, compressor: ShardedCompressor) -> None:
    """Takes the same gradients in every step: rounding to the nearest makes the same error each time.

    Whether a compressor rounds at random is asked of its option ``stochastic_rounding``.
    """
    steps = run_steps(setup, compressor, repeat=True)
    exact = torch.stack(values_of_all_ranks(steps.sent)).mean(0)[0]
    first, mean = (steps.received[0] - exact).norm(), (steps.received.mean(0) - exact).norm()
    falls = bool(mean < 0.6 * first)  # with independent errors in 8 steps the ratio is 1 / sqrt(8) = 0.35
    rounding = getattr(compressor, "inner", compressor)
    is_expected = compressor.claims.keeps_residual or getattr(rounding, "stochastic_rounding", False)
    assert falls == is_expected, (
        f"{name}: off by {first:.3g} in the first step, by {mean:.3g} on average; the average must be closer if and"
        " only if the compressor keeps a residual, or has stochastic_rounding=True"
    )
