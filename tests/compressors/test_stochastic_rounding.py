"""The random numbers of stochastic rounding differ between units, ranks and steps."""

from itertools import product

import torch

from lightning_commopt.compressors.base import Layout, finish
from lightning_commopt.compressors.channel import AloneChannel
from lightning_commopt.compressors.sharded import ShardedInt8, uniform_noise
from lightning_commopt.compressors.shards import FromShards, first_seed
from support.default_dtype import default_dtype

# Values at which fields of fewer bits would run into each other
_UNITS = (0, 1, 127, 128, 255, 256, 65_535)
_RANKS = (0, 1, 255, 256, 257, 32_768, 65_535)
_STEPS = (0, 1, 65_535, 65_536, 2**24, 2**31 - 1)


def test_no_two_seeds_are_equal() -> None:
    """If it fails, two ranks round with the same numbers: their errors add up instead of averaging out."""
    seeds = [first_seed(unit, rank) + step for unit, rank, step in product(_UNITS, _RANKS, _STEPS)]
    assert len(set(seeds)) == len(seeds)
    state = ShardedInt8(stochastic_rounding=True).init(64, 2, torch.device("cpu"), max(seeds))
    assert int(state["seed"]) == max(seeds)


def test_no_two_seeds_give_the_same_numbers() -> None:
    """If it fails, a generator that looks at a part of its seed makes ranks or steps alike."""
    like = torch.empty(64, device="cpu")
    seeds = [first_seed(unit, rank) + step for unit, rank, step in product(_UNITS, _RANKS, _STEPS)]
    drawn = {tuple(uniform_noise(like, seed).tolist()) for seed in seeds}
    assert len(drawn) == len(seeds)
    torch.testing.assert_close(uniform_noise(like, 7), uniform_noise(like, 7), rtol=0, atol=0)


def test_the_default_dtype_changes_nothing() -> None:
    """If it fails, programs whose default are 16 bits round down too often, and residuals lose digits."""
    like, feedback = torch.empty(64, device="cpu"), ShardedInt8(error_feedback=True)
    state = feedback.init(64, 2, like.device)
    given = uniform_noise(torch.empty(2, 64, device="cpu"), 3)
    feedback.set_residual(state, given)
    expected = uniform_noise(like, 7), feedback.residual(state, 64, 2)
    with default_dtype(torch.bfloat16):
        found = uniform_noise(like, 7), feedback.residual(state, 64, 2)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_the_numbers_are_uniform_and_independent() -> None:
    like = torch.empty(100_000, device="cpu")
    places = ((0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0), (0, 256, 0))
    noise = torch.stack([uniform_noise(like, first_seed(unit, rank) + step) for unit, rank, step in places]).double()
    assert noise.min() >= 0
    assert noise.max() < 1
    torch.testing.assert_close(noise.mean(1), torch.full((6,), 0.5).double(), rtol=0, atol=0.005)
    torch.testing.assert_close(noise.var(1), torch.full((6,), 1 / 12).double(), rtol=0, atol=0.002)
    correlation = torch.corrcoef(noise) - torch.eye(6)
    assert correlation.abs().max() < 0.02


def test_rounding_is_exact_in_the_mean_of_steps() -> None:
    compressor = ShardedInt8(stochastic_rounding=True)
    state = compressor.init(256, 1, torch.device("cpu"), first_seed(3, 300) + 65_500)
    rows = torch.randn(1, 256, generator=torch.Generator().manual_seed(0))
    total = torch.zeros_like(rows)
    for _ in range(400):
        rounded = rows.clone()
        compressor._before_rounding(rounded, state)
        total += rounded
    scale = rows.abs().max() / 127
    assert ((total / 400 - rows).abs() / scale).max() < 0.15  # six times the error of a mean of 400


def test_a_bucket_that_is_laid_out_anew_does_not_repeat_numbers() -> None:
    """If it fails, the step after DDP has rebuilt its buckets rounds with the numbers of the first one."""
    compressor = FromShards(shards=ShardedInt8(stochastic_rounding=True))
    layout = Layout.of([torch.empty(40)], torch.float32)
    state = compressor.init(layout, torch.device("cpu"), step=7)
    finish(compressor.rounds(torch.ones(40), layout, state, AloneChannel(2, rank=1)))
    assert int(state["shards"]["seed"]) == first_seed(0, 1) + 8
