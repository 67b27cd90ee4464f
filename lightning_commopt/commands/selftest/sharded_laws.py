"""Laws that hold for every compressor of sharded gradients: ``commopt selftest`` and the tests check them.

Steps are without training: any gradients one likes go through FSDP2 and a compressor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_commopt.commands.selftest.checks import NotChecked, TestDevices, check
from lightning_commopt.commands.selftest.steps import (
    NUM_STEPS,
    Steps,
    check_residual,
    flatten,
    of_all_ranks,
    random_gradients,
)
from lightning_commopt.compressors.sharded import ShardedBf16, ShardedCompressor, ShardedInt4, ShardedInt8
from lightning_commopt.compressors.sharded_hierarchical import ShardedHierarchical
from lightning_commopt.plan import OptionError
from lightning_commopt.sync.sharded import ShardedSync, check_available


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
    """How a model is sharded."""

    device_type: str = "cpu"  # "cpu" or "cuda"
    num_replicas: int = 1  # of each shard; above 1 this is HSDP
    fsdp: Mapping[str, Any] = field(default_factory=dict)  # options of ``fully_shard``

    def shard(self, compressor: ShardedCompressor) -> tuple[Unit, ShardedSync]:
        """Returns a model, each of whose parts is a unit, synchronized by a compressor."""
        num_ranks = dist.get_world_size()
        shape = (num_ranks,) if self.num_replicas == 1 else (self.num_replicas, num_ranks // self.num_replicas)
        mesh = init_device_mesh(self.device_type, shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
        model = new_model().to(self.device_type)
        for module in (*model.parts, model):
            fully_shard(module, mesh=mesh, **self.fsdp)
        sync = ShardedSync(compressor)
        sync.attach(model)
        return model, sync


def gradients_of(step: int, rank: int) -> dict[str, Tensor]:
    """Returns the gradients of `random_gradients` for this model."""
    return random_gradients(step, rank, net=new_model)


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


def run_steps(setup: ShardedSetup, compressor: ShardedCompressor, *, repeat: bool = False) -> Steps:
    """Makes `NUM_STEPS` steps; with ``repeat`` the gradients of all are the same."""
    model, sync = setup.shard(compressor)
    sent, received = [], []
    for step in range(NUM_STEPS):
        gradients = gradients_of(0 if repeat else step, dist.get_rank())
        sent.append(flatten(gradients))
        received.append(flatten(run_step(model, gradients)))
    kept = sync.residuals()
    residual = flatten({name: kept.get(name, torch.zeros(p.shape)) for name, p in new_model().named_parameters()})
    declared = declared_bytes(model, compressor, dist.get_world_size() // setup.num_replicas)
    return Steps(torch.stack(sent), torch.stack(received), residual, sync.wire_bytes / NUM_STEPS, declared)


def declared_bytes(model: Unit, compressor: ShardedCompressor, num_shards: int) -> int:
    """Returns the bytes of one step, as a `Channel` counts them, from shapes alone."""
    total = 0
    for unit in (*model.parts, model):
        rows = [(-(-p.shape[0] // num_shards) * p.shape[1:].numel(), p.dim()) for p in unit.parameters(recurse=False)]
        total += compressor.message_bytes(sum(numel for numel, dim in rows if dim > 1), num_shards)
        total += 4 * num_shards * sum(numel for numel, dim in rows if dim == 1)
    return total // 2


ShardedLaw = Callable[[ShardedSetup, ShardedCompressor], None]
"""Runs on every rank. Raises an AssertionError that says what is wrong, after the last collective."""

SHARDED_LAWS: dict[str, ShardedLaw] = {}


def sharded_examples(num_shards: int) -> list[ShardedCompressor]:
    """Returns compressors with all options that change what they compute; nodes of one or two ranks, as can be."""
    int8, int4, ranks_per_node = ShardedInt8, ShardedInt4, 2 if num_shards > 2 and num_shards % 2 == 0 else 1
    feedback = int8(error_feedback=True, block_size=64)
    return [
        *(ShardedBf16(), int8(), int8(stochastic_rounding=True), feedback, int4(), int4(error_feedback=True)),
        ShardedHierarchical(inner=feedback, ranks_per_node=ranks_per_node),
    ]


def _law(name: str) -> Callable[[ShardedLaw], ShardedLaw]:
    def add(holds: ShardedLaw) -> ShardedLaw:
        @check(f"FSDP2: {name}")
        def check_examples(place: TestDevices) -> str:
            _check_place(place)
            examples = sharded_examples(dist.get_world_size())
            for compressor in examples:
                holds(ShardedSetup(device_type=place.device_type), compressor)
            return f"{len(examples)} compressors"

        SHARDED_LAWS[name] = holds
        return holds

    return add


def _check_place(place: TestDevices) -> None:
    try:
        check_available()
    except OptionError as error:
        raise NotChecked(str(error)) from error
    if place.device_type == "cuda" and "nccl" not in place.backend:
        raise NotChecked("FSDP2 on CUDA needs NCCL")


@_law("averages are those in float64, within each compressor's error")
def averages(setup: ShardedSetup, compressor: ShardedCompressor) -> None:
    """Holds a compressor to its claims, and vectors to rounding in float32."""
    steps, claims = run_steps(setup, compressor), compressor.claims
    exact = torch.stack(of_all_ranks(steps.sent)).mean(0)
    residual = torch.stack(of_all_ranks(steps.residual)).mean(0)
    is_matrix = {name: torch.full(p.shape, p.dim() > 1) for name, p in new_model().named_parameters()}
    is_compressed = flatten(is_matrix).bool()
    of_vectors = (steps.received - exact)[:, ~is_compressed].abs().max().item()
    assert of_vectors <= 1e-6, f"{compressor}: vectors are off by up to {of_vectors:.3g}"
    errors = (steps.received - exact)[:, is_compressed].norm(dim=1) / exact[:, is_compressed].norm(dim=1)
    worst = errors[: 1 if claims.keeps_residual else len(errors)].max().item()
    assert claims.error_bound is not None
    assert 0 < worst < claims.error_bound, f"{compressor}: an average is off by {worst:.3g}"
    check_residual(str(compressor), steps.received, exact, residual, claims)


@_law("bytes on the wire are those that a compressor declares")
def bytes_as_declared(setup: ShardedSetup, compressor: ShardedCompressor) -> None:
    """If it fails, a compressor sends more than it declares, or matrices travel uncompressed."""
    steps = run_steps(setup, compressor)
    counts = of_all_ranks(steps.bytes_per_step)
    assert counts == [steps.declared_bytes] * len(counts), f"{compressor}: {counts}, declared {steps.declared_bytes}"


@_law("a step that overflows does not poison the next ones")
def overflow(setup: ShardedSetup, compressor: ShardedCompressor) -> None:
    """Infinity and NaN on one rank only; the owner of the shard receives them, and residuals do not keep them."""
    model, sync = setup.shard(compressor)
    rank, problems = dist.get_rank(), []
    for step, bad in enumerate((0.0, float("inf"), 0.0, float("nan"), 0.0)):
        gradients = gradients_of(step, rank)
        if rank == 0:
            gradients["parts.0.p2"][5, 7] += bad
        received = run_step(model, gradients)
        is_finite = bool(received["parts.0.p2"].isfinite().all())
        if is_finite != (bad == 0.0) or not received["p0"].isfinite().all():
            problems.append(f"step {step} with {bad}")
    assert all(bool(x.isfinite().all()) for x in sync.residuals().values()), f"{compressor}: a residual is not finite"
    assert not problems, f"{compressor}: {problems}"


@_law("what is rounded at random is exact in the mean")
def unbiased(setup: ShardedSetup, compressor: ShardedCompressor) -> None:
    """Of the same gradients in every step; rounding to the nearest makes the same error each time."""
    steps = run_steps(setup, compressor, repeat=True)
    exact = torch.stack(of_all_ranks(steps.sent)).mean(0)[0]
    one, mean = (steps.received[0] - exact).norm(), (steps.received.mean(0) - exact).norm()
    falls = bool(mean < 0.6 * one)  # of independent errors of 8 steps it is 0.35
    rounding = getattr(compressor, "inner", compressor)
    is_expected = compressor.claims.keeps_residual or getattr(rounding, "stochastic_rounding", False)
    assert falls == is_expected, f"{compressor}: off by {one:.3g} in a step, by {mean:.3g} in the mean of all"


@_law("resuming with a saved state gives the same bits")
def resume(setup: ShardedSetup, compressor: ShardedCompressor) -> None:
    """Five steps at once, and five with a new sync in between that gets the state of the first."""
    outcomes = []
    for stops_at in (None, 3):
        model, sync = setup.shard(compressor)
        for step in range(5):
            if step == stops_at:
                saved = sync.state()
                model, sync = setup.shard(compressor)
                sync.restore(saved)
            received = run_step(model, gradients_of(step, dist.get_rank()))
        outcomes.append(flatten(received))
    assert torch.equal(*outcomes), f"{compressor}: resumed averages differ"
