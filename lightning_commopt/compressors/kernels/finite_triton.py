"""The operation of `finite` in Triton; what it does is defined there."""

# Triton's compiler reads annotations, and wants its constants in capitals.
# ruff: noqa: ANN001, ANN201, ANN202, N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_commopt.compressors.kernels.launch_triton import launch
from lightning_commopt.compressors.kernels.memory_triton import load

_BLOCK = 8192


def all_finite(values: Tensor) -> Tensor:
    """Returns whether ``values`` ``(n,)`` are finite, one flag for each block of them."""
    num_blocks = -(-values.numel() // _BLOCK)
    flags = torch.empty(num_blocks, dtype=torch.bool, device=values.device)
    if num_blocks:
        options = {"num_warps": 8, "enable_fp_fusion": False}
        launch(_find_bad, (num_blocks, 1, 1), values, flags, values.numel(), BLOCK=_BLOCK, **options)
    return flags


@triton.jit
def all_set(flags, num_flags):
    """Returns whether all flags are set, which are bools on the device."""
    is_bad = tl.zeros((128,), tl.int32)
    for first in range(0, num_flags, 128):
        at = first + tl.arange(0, 128)
        is_bad |= tl.where(tl.load(flags + at, at < num_flags, 1) == 0, 1, 0)
    return tl.max(is_bad, 0) == 0


@triton.jit(do_not_specialize=["numel"])
def _find_bad(values, flags, numel, BLOCK: tl.constexpr):
    """Writes whether this program's block is finite."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    elements = first + tl.arange(0, BLOCK)
    block = load(values + elements, elements < numel, first + BLOCK <= numel)
    if block.dtype != tl.float64:
        block = block.to(tl.float32)
    is_good = tl.abs(block) < float("inf")
    tl.store(flags + tl.program_id(0), tl.min(is_good.to(tl.int32), 0) != 0)
