"""Division as float32 rounds it, for kernels in Triton; its own flushes subnormal numbers in some versions."""

# Triton's compiler reads annotations, and wants its constants in capitals.
# ruff: noqa: ANN001, ANN201, N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def inverse_of(x, SHAPE: tl.constexpr):
    """Returns ``1 / x`` rounded as float32 rounds: an estimate, and two steps of Newton's method in float64.

    ``tl.div_rn`` flushes subnormal numbers in some versions of Triton, and a division in float64 spills registers.
    """
    estimate = 1.0 / x
    wide, one, inverse = x.to(tl.float64), tl.full(SHAPE, 1.0, tl.float64), estimate.to(tl.float64)
    for _ in tl.static_range(2):
        inverse = tl.fma(tl.fma(-wide, inverse, one), inverse, inverse)
    return tl.where(x < float("inf"), inverse.to(tl.float32), estimate)


@triton.jit
def over_ranks(x, WORLD_SIZE: tl.constexpr, SHAPE: tl.constexpr):
    """Returns ``x / WORLD_SIZE`` rounded as float32 rounds: a product with the inverse, corrected in float64."""
    wide, inverse = x.to(tl.float64), tl.full(SHAPE, 1 / WORLD_SIZE, tl.float64)
    quotient = wide * inverse
    rest = tl.fma(-quotient, tl.full(SHAPE, WORLD_SIZE, tl.float64), wide)
    return tl.where(x < float("inf"), tl.fma(rest, inverse, quotient).to(tl.float32), x)
