"""Cast: dtypes of what is sent and summed."""

import pytest
import torch

from lightning_commopt.compressors import Compressor, Layout
from lightning_commopt.compressors.base import finish
from lightning_commopt.compressors.channel import AloneChannel
from support.every_compressor import BF16, BF16_IN_FLOAT32


@pytest.mark.parametrize("compressor", [BF16, BF16_IN_FLOAT32])
def test_gradients_of_16_bits_keep_their_dtype(compressor: Compressor) -> None:
    """If it fails, gradients in float16 lose three more digits of their mantissa, and send no byte less."""
    flat = 1 + torch.arange(64.0).half() / 1024
    expected, layout = flat.clone(), Layout.of([flat], torch.float16)
    finish(compressor.rounds(flat, layout, {}, AloneChannel(2)))
    assert torch.equal(flat[:32], expected[:32])  # all that this rank receives, where it owns a half


def test_sums_are_rounded_once_and_their_owner_keeps_what_all_have_lost() -> None:
    """If it fails, accumulate='float32' sums in 16 bits, or a residual has one rank's part of what rounding lost."""
    given = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    flat, residual, layout = given.clone(), torch.zeros(1000), Layout.of([given], torch.float32)
    finish(BF16_IN_FLOAT32.rounds(flat, layout, {}, AloneChannel(7), residual))
    sums = (given / 7).bfloat16().float() * 7
    rounded, own = sums.bfloat16().float(), slice(143)
    assert torch.equal(flat[own], rounded[own])
    torch.testing.assert_close(residual[own], (given - sums + 7 * (sums - rounded))[own], rtol=0, atol=1e-6)
