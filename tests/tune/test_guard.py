"""The guard of lossy plans: silent with averages as every compressor makes them, not with worse ones."""

from __future__ import annotations

import math
import random

import pytest
import torch.distributed as dist

from lightning_commopt.compressors import Compressor
from lightning_commopt.compressors.catalog import example_compressors
from lightning_commopt.testing.places import CPU
from lightning_commopt.testing.steps import LargeNet, Setup, send
from lightning_commopt.tune.guard import Guard, error_limit
from support.cross_section import sampled
from support.ranks import run_ranks

_NUM_STEPS = 40  # a look takes 28


def _error(compressor: Compressor, seed: int, factor: float) -> float:
    """Returns the guard's error over its limit, if averages are multiplied by a factor."""
    setup = Setup(place=CPU, net=LargeNet)
    model, sync = setup.wrap(compressor, bucket_cap_mb=1)
    group = dist.group.WORLD
    assert group is not None
    guard = Guard(lambda: model, group)
    schedule = random.Random(seed)
    scales = {key: 10 ** schedule.uniform(-5, 0) for key, _ in model.module.named_parameters()}
    for step in range(_NUM_STEPS):
        size = 10 ** schedule.uniform(-1, 1) * (100 if schedule.random() < 0.05 else 1)
        gradients = {key: size * scales[key] * x for key, x in setup.gradients(step).items()}
        guard.begin_step()
        send(model, gradients)
        sync.end_backward(ends_static_graph=False)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad *= factor
        guard.end_backward()
    sync.detach()
    return guard.error / error_limit(compressor)


def _look(seed: int, factor: float, every: int = 1) -> dict[str, float]:
    """Returns the error over its limit, by compressor, for every n-th of them.

    Where a compressor may be off by much, such as with low rank, a factor other than 1 is 40 times as far from 1.
    """
    lossy = {name: compressor for name, compressor in example_compressors().items() if compressor.claims.is_lossy}
    found = {}
    for name, compressor in [*lossy.items()][::every]:
        bound = compressor.claims.error_bound
        distance = (factor - 1) * (40 if bound is not None and bound > 0.5 else 1)
        found[name] = _error(compressor, seed, 1 + distance)
    return found


@pytest.mark.parametrize(("seed", "every"), sampled([(0, 1), (1, 1), (2, 1), (0, 10)], by_default=[(0, 10)]))
def test_healthy_averages_pass(seed: int, every: int) -> None:
    """If it fails, a lossy plan that trains well is taken back: parameters of all sizes, and steps of all sizes."""
    for found in run_ranks(_look, seed, 1.0, every):
        assert all(0 < share < 1 for share in found.values()), found


@pytest.mark.parametrize(("factor", "every"), sampled([(0.0, 1), (2.0, 1), (2.0, 10)], by_default=[(2.0, 10)]))
def test_averages_that_are_far_off_are_found(factor: float, every: int) -> None:
    """If it fails, training goes on with averages that have nothing to do with the gradients."""
    for found in run_ranks(_look, 0, factor, every):
        assert all(share > 1 for share in found.values()), found
        assert not any(map(math.isnan, found.values()))
