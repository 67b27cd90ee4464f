"""Laws that hold for every compressor of sharded gradients: ``commopt selftest`` and the tests check them.

Steps are without training: any gradients one likes go through FSDP2 and a compressor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_commopt.commands.selftest import laws
from lightning_commopt.commands.selftest.checks import CPU, NotChecked, TestDevices, check
from lightning_commopt.commands.selftest.steps import Setup, flatten, of_all_ranks, run_steps
from lightning_commopt.compressors import ShardedBf16, ShardedCompressor, ShardedHierarchical, ShardedInt4, ShardedInt8
from lightning_commopt.compressors.catalog import ready_shards
from lightning_commopt.plan import OptionError
from lightning_commopt.sharded_plan import check_available
from lightning_commopt.sync.fsdp2.gradients import ShardedSync


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
class ShardedSetup(Setup):
    """How a model is sharded; ``options`` are those of ``fully_shard``."""

    place: TestDevices = CPU
    net: Callable[[], nn.Module] = new_model
    num_replicas: int = 1  # of each shard; above 1 this is HSDP
    has_even_parts: ClassVar[bool] = True  # FSDP2 pads its shards

    def examples(self) -> dict[str, Any]:
        """Returns compressors with all options that change what they compute; nodes of one or two ranks, as can be."""
        num_shards = dist.get_world_size() // self.num_replicas
        ranks_per_node = 2 if num_shards > 2 and num_shards % 2 == 0 else 1
        int8, int4, feedback = ShardedInt8, ShardedInt4, ShardedInt8(error_feedback=True, block_size=64)
        found = [
            *(ShardedBf16(), int8(), int8(stochastic_rounding=True), feedback, int4(), int4(error_feedback=True)),
            ShardedHierarchical(inner=feedback, ranks_per_node=ranks_per_node),
            *ready_shards().values(),
        ]
        return {str(compressor): compressor for compressor in found}

    def wrap(self, compressor: Any, module: nn.Module | None = None, **fsdp: Any) -> tuple[Any, Any]:
        """Returns a model, each of whose parts is a unit, synchronized by a compressor; and its gradient sync."""
        num_ranks = dist.get_world_size()
        shape = (num_ranks,) if self.num_replicas == 1 else (self.num_replicas, num_ranks // self.num_replicas)
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
        model: Any = (module or self.net()).to(self.device)
        for part in (*model.parts, model):
            fully_shard(part, mesh=mesh, **self.options, **fsdp)
        sync = ShardedSync(compressor)
        sync.attach(model)
        return model, sync

    def run_step(self, model: Any, sync: Any, gradients: Mapping[str, Tensor]) -> Tensor:
        return flatten(run_step(model, gradients))

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


SHARDED_LAWS: dict[str, laws.Law] = {}


def _law(name: str) -> Callable[[laws.Law], laws.Law]:
    def add(holds: laws.Law) -> laws.Law:
        check(f"FSDP2: {name}")(lambda place: laws.check_examples(holds, _setup_for(place)))
        SHARDED_LAWS[name] = holds
        return holds

    return add


def _setup_for(place: TestDevices) -> ShardedSetup:
    try:
        check_available()
    except OptionError as error:
        raise NotChecked(str(error)) from error
    if place.device_type == "cuda" and "nccl" not in place.backend:
        raise NotChecked("FSDP2 on CUDA needs NCCL")
    return ShardedSetup(place=place)


for _name, _holds in laws.LAWS.items():
    if _holds in (laws.averages, laws.bytes_as_declared, laws.overflow, laws.tiny, laws.resume):
        _law(_name)(_holds)


@_law("matrices are compressed, vectors are not, and an infinite number stays in its block")
def only_matrices(setup: Setup, name: str, compressor: ShardedCompressor) -> None:
    """If it fails, biases and norms lose precision, or an overflow of one parameter is one of all."""
    gradients = setup.gradients(0)
    if dist.get_rank() == 0:
        gradients["parts.0.p2"][5, 7] = torch.inf
    model, _ = setup.wrap(compressor)
    received, every = run_step(model, gradients), of_all_ranks({key: x.cpu() for key, x in gradients.items()})
    for key, average in received.items():
        error = (average.double() - torch.stack([each[key].double() for each in every]).mean(0)).abs().max()
        if key == "parts.0.p2":
            assert not average.isfinite().all(), f"{name}: hides an overflow"
        elif average.dim() == 1:
            assert error <= 1e-6, f"{name}: a vector is off by up to {error:.3g}"
        else:
            assert 1e-6 < error < torch.inf, f"{name}: {key} is off by up to {error:.3g}"


@_law("what is rounded at random is exact in the mean")
def unbiased(setup: Setup, name: str, compressor: ShardedCompressor) -> None:
    """Of the same gradients in every step; rounding to the nearest makes the same error each time."""
    steps = run_steps(setup, compressor, repeat=True)
    exact = torch.stack(of_all_ranks(steps.sent)).mean(0)[0]
    one, mean = (steps.received[0] - exact).norm(), (steps.received.mean(0) - exact).norm()
    falls = bool(mean < 0.6 * one)  # of independent errors of 8 steps it is 0.35
    rounding = getattr(compressor, "inner", compressor)
    is_expected = compressor.claims.keeps_residual or getattr(rounding, "stochastic_rounding", False)
    assert falls == is_expected, f"{name}: off by {one:.3g} in a step, by {mean:.3g} in the mean of all"
