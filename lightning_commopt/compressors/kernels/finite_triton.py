"""The operation of `finite` in Triton; what it does is defined there."""

# Triton's compiler reads annotations, and wants its constants in capitals.
# ruff: noqa: ANN001, ANN202, N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 8192


def all_finite(values: Tensor) -> Tensor:
    """Returns whether all ``values`` ``(n,)`` are finite: 0-dim bool."""
    finite = torch.ones((), dtype=torch.bool, device=values.device)
    if values.numel():
        with torch.cuda.device_of(values):
            grid = (triton.cdiv(values.numel(), _BLOCK),)
            _find_bad[grid](
                values, values.numel(), finite.view(torch.uint8), BLOCK=_BLOCK, num_warps=8, enable_fp_fusion=False
            )
    return finite


@triton.jit
def _find_bad(values, numel, finite, BLOCK: tl.constexpr):
    """Clears ``finite`` if this program's block holds a bad value; all that write to it write the same."""
    elements = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    block = tl.load(values + elements, elements < numel, 0)
    if block.dtype != tl.float64:
        block = block.to(tl.float32)
    is_good = tl.abs(block) < float("inf")
    if tl.min(is_good.to(tl.int32), 0) == 0:
        tl.store(finite, 0)
