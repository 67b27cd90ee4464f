"""The guard of lossy plans: silent with averages as every compressor makes them, not with worse ones."""

from __future__ import annotations

import math
import random

import pytest
import torch.distributed as dist

from lightning_commopt.commands.selftest.checks import TestDevices
from lightning_commopt.commands.selftest.steps import LargeNet, Setup, send
from lightning_commopt.compressors.catalog import example_compressors
from lightning_commopt.tune.guard import Guard, error_limit
from support.cross_section import sampled
from support.ranks import run_ranks

_NUM_STEPS = 40  # a look takes 28


def _look(seed: int, factor: float) -> dict[str, float]:
    """Returns the guard's error over its limit, by compressor, if averages are multiplied by a factor."""
    found = {}
    for name, compressor in example_compressors().items():
        if compressor is None or not compressor.claims.is_lossy:
            continue
        setup = Setup(place=TestDevices(name="CPU", device_type="cpu", backend="gloo"), net=LargeNet)
        model, sync = setup.wrap(compressor, bucket_cap_mb=1)
        guard = Guard(lambda model=model: model, dist.group.WORLD)
        schedule = random.Random(seed)
        scales = {key: 10 ** schedule.uniform(-5, 0) for key, _ in model.module.named_parameters()}
        for step in range(_NUM_STEPS):
            size = 10 ** schedule.uniform(-1, 1) * (100 if schedule.random() < 0.05 else 1)
            gradients = {key: size * scales[key] * x for key, x in setup.gradients(step).items()}
            guard.begin_step()
            send(model, gradients)
            sync.end_backward(ends_static_graph=False)
            for parameter in model.parameters():
                parameter.grad.mul_(factor)
            guard.end_backward()
        found[name] = guard.error / error_limit(compressor)
        sync.detach()
    return found


@pytest.mark.parametrize("seed", sampled(range(20), by_default=[0]))
def test_healthy_averages_pass(seed: int) -> None:
    """If it fails, a lossy plan that trains well is taken back: parameters of all sizes, and steps of all sizes."""
    for found in run_ranks(_look, seed, 1.0):
        assert all(0 < share < 1 for share in found.values()), found


def test_averages_that_are_far_off_are_found() -> None:
    """If it fails, training goes on with averages that have nothing to do with the gradients."""
    for found in run_ranks(_look, 0, -9.0):
        assert all(share > 1 for share in found.values()), found
        assert not any(map(math.isnan, found.values()))
