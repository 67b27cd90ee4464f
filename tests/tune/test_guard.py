"""The guard of lossy plans: silent with averages as every compressor makes them, not with worse ones."""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.compressors import Compressor
from lightning_commopt.compressors.catalog import example_compressors
from lightning_commopt.testing.places import CPU
from lightning_commopt.testing.steps import LargeNet, Setup, send
from lightning_commopt.tune import guard as guard_module
from lightning_commopt.tune.guard import Guard, error_limit
from support.cross_section import sampled
from support.warm_ranks import run_ranks

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


@pytest.mark.parametrize(("factor", "every"), sampled([(0.0, 1), (2.0, 1), (2.0, 20)], by_default=[(2.0, 20)]))
def test_averages_that_are_far_off_are_found(factor: float, every: int) -> None:
    """If it fails, training goes on with averages that have nothing to do with the gradients."""
    for found in run_ranks(_look, 0, factor, every):
        assert all(share > 1 for share in found.values()), found
        assert not any(map(math.isnan, found.values()))


def _exact_model() -> tuple[DistributedDataParallel, Guard]:
    """Returns a model with a bucket for each of three layers, and its guard."""
    layers = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    model, group = DistributedDataParallel(layers, bucket_cap_mb=0.0001), dist.group.WORLD
    assert group is not None
    return model, Guard(lambda: model, group)


def _error_of_accumulated(spoilt: Collection[int], factor: float, num_steps: int = 29) -> float:
    """Returns the guard's error with steps of two batches, in some of which averages are multiplied by a factor.

    With an infinite factor all gradients overflow.
    """
    model, guard = _exact_model()
    for step in range(num_steps):
        guard.begin_step()
        if 4 <= step % 30 < 24:  # between the windows of a look
            continue
        model.zero_grad()
        scale = factor if math.isinf(factor) and step in spoilt else 1.0
        for is_last in (False, True):
            with nullcontext() if is_last else model.no_sync():
                (scale * model(torch.randn(4, 8)).square().sum()).backward()
                for parameter in model.parameters() if step in spoilt and is_last else ():
                    assert parameter.grad is not None
                    parameter.grad *= factor
                guard.end_backward()
    return guard.error


def _looks() -> tuple[list[float], list[float], int]:
    """Returns errors that the guard must find small, those that it must find, and the number of buckets."""
    torch.manual_seed(dist.get_rank())
    fine: list[tuple[Collection[int], float]] = [((), 1.0), (range(4), 2.0), (range(24, 28), 2.0), ((1, 25), math.inf)]
    small = [_error_of_accumulated(*case) for case in fine]
    large = [_error_of_accumulated(range(29), math.nan)]
    with patch.object(guard_module, "EVERY_STEPS", 30):
        large.append(_error_of_accumulated(range(30, 59), 2.0, num_steps=59))
    assert math.isnan(_error_of_accumulated(range(29), math.inf))  # each step overflows
    model, guard = _exact_model()
    for _ in range(2):
        model(torch.randn(4, 8)).sum().backward()  # DDP lays out its buckets
    chosen: set[int] = set()
    for _ in range(3):
        guard._choose_bucket()
        chosen.update(map(id, guard._bucket))
    return small, large, len(chosen)


def test_accumulated_batches_and_each_bucket_are_looked_at() -> None:
    """If it fails, accumulation, an overflow or an outlier ends a good plan, or NaN and other buckets are overlooked.

    A plan that was good in one look may be bad in the next one.
    """
    for small, large, num_chosen in run_ranks(_looks, world_size=3):
        assert all(error < 1e-6 for error in small)
        assert large == [math.inf, pytest.approx(1.0)]
        assert num_chosen == 3


def _compared_places() -> tuple[list[int], int]:
    """Returns which elements of a bucket with an embedding are compared, and the bucket's size."""
    layers = nn.Sequential(nn.Embedding(99, 301, sparse=True), nn.Linear(301, 7), nn.Linear(7, 5))
    model, group = DistributedDataParallel(layers), dist.group.WORLD
    assert group is not None
    guard = Guard(lambda: model, group)
    for _ in range(29):
        guard.begin_step()
        model.zero_grad()
        model(torch.arange(4)).sum().backward()
        guard.end_backward()
    assert guard.error < 1e-6
    places, start = list[int](), 0
    for parameter, place in zip(guard._bucket, guard._places, strict=True):
        places += range(start, start + parameter.numel())[place]
        start += parameter.numel()
    return places, start


def test_a_sample_of_a_bucket_is_compared() -> None:
    """If it fails, each look sends megabytes, small parameters stand for a bucket, or a sparse gradient ends a fit."""
    for places, size in run_ranks(_compared_places):
        assert places == [*range(0, size, 4)]
