"""Laws that hold for every compressor of sharded gradients: ``commopt selftest`` and the tests check them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from lightning_commopt.commands.selftest.checks import NotChecked, check
from lightning_commopt.commands.selftest.gradients import flatten
from lightning_commopt.commands.selftest.places import TestDevices
from lightning_commopt.commands.selftest.sharded_steps import (
    ShardedSetup,
    gradients_of,
    run_step,
    run_steps,
)
from lightning_commopt.commands.selftest.steps import of_all_ranks
from lightning_commopt.compressors.sharded import ShardedBf16, ShardedCompressor, ShardedInt4, ShardedInt8
from lightning_commopt.compressors.sharded_hierarchical import ShardedHierarchical
from lightning_commopt.plan import OptionError
from lightning_commopt.sync.sharded import check_available

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
    of_vectors = (steps.received - exact)[:, ~steps.is_compressed].abs().max().item()
    assert of_vectors <= 1e-6, f"{compressor}: vectors are off by up to {of_vectors:.3g}"
    matrices = exact[:, steps.is_compressed]
    errors = (steps.received - exact)[:, steps.is_compressed].norm(dim=1) / matrices.norm(dim=1)
    worst = errors[: 1 if claims.keeps_residual else len(errors)].max().item()
    assert claims.error_bound is not None
    assert 0 < worst < claims.error_bound, f"{compressor}: an average is off by {worst:.3g}"
    assert bool(residual.abs().max() > 1e-4) == claims.keeps_residual, f"{compressor}: its claims are {claims}"
    if claims.keeps_residual:
        lost = ((steps.received.sum(0) + residual - exact.sum(0)).norm() / exact.norm(dim=1).sum()).item()
        assert lost < claims.untracked_error, f"{compressor}: {lost:.3g} of the gradients is lost"


@_law("bytes on the wire are those that a compressor declares")
def bytes_as_declared(setup: ShardedSetup, compressor: ShardedCompressor) -> None:
    """If it fails, a compressor sends more than it says, or matrices travel uncompressed."""
    steps = run_steps(setup, compressor)
    counts = of_all_ranks(steps.bytes_per_step)
    assert counts == [steps.declared_bytes] * len(counts), f"{compressor}: {counts}, declared {steps.declared_bytes}"


@_law("a step that overflows does not poison the next ones")
def overflow(setup: ShardedSetup, compressor: ShardedCompressor) -> None:
    """Infinity and NaN on one rank only; the owner of the shard receives them, and residuals do not keep them."""
    model, sync = setup.shard(compressor)
    assert sync is not None
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
        assert sync is not None
        for step in range(5):
            if step == stops_at:
                saved = sync.state()
                model, sync = setup.shard(compressor)
                assert sync is not None
                sync.restore(saved)
            received = run_step(model, gradients_of(step, dist.get_rank()))
        outcomes.append(flatten(received))
    assert torch.equal(*outcomes), f"{compressor}: resumed averages differ"
