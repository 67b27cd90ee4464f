"""The operation of `finite` in Triton; what it does is defined there."""

# Triton's compiler reads annotations, and wants its constants in capitals.
# ruff: noqa: ANN001, ANN202, N803
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
    """Returns whether all ``values`` ``(n,)`` are finite: 0-dim bool."""
    finite = torch.ones((), dtype=torch.bool, device=values.device)
    if values.numel():
        grid, options = (-(-values.numel() // _BLOCK), 1, 1), {"num_warps": 8, "enable_fp_fusion": False}
        launch(_find_bad, grid, values, finite.view(torch.uint8), values.numel(), BLOCK=_BLOCK, **options)
    return finite


@triton.jit(do_not_specialize=["numel"])
def _find_bad(values, finite, numel, BLOCK: tl.constexpr):
    """Clears ``finite`` if this program's block holds a bad value; all that write to it write the same."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    elements = first + tl.arange(0, BLOCK)
    block = load(values + elements, elements < numel, first + BLOCK <= numel)
    if block.dtype != tl.float64:
        block = block.to(tl.float32)
    is_good = tl.abs(block) < float("inf")
    if tl.min(is_good.to(tl.int32), 0) == 0:
        tl.store(finite, 0)
