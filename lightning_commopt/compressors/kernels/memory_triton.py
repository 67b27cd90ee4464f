"""Reads and writes of tiles: the last one of a bucket with a mask, all others in wide accesses, whatever their number.

A mask that depends on a size which Triton does not know to be a multiple of 16 makes every access a narrow one.
"""

# Triton's compiler reads annotations.
# ruff: noqa: ANN001, ANN201
# mypy: allow-untyped-defs, allow-untyped-decorators, disable-error-code="import-untyped"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load(pointers, inside, is_whole):
    """Returns what is ``inside``, which is all of the tile if it ``is_whole``; zeros for the rest."""
    if is_whole:  # noqa: SIM108
        values = tl.load(pointers)
    else:
        values = tl.load(pointers, inside, 0)
    return values


@triton.jit
def store(pointers, values, inside, is_whole):
    """Writes what is ``inside``, which is all of the tile if it ``is_whole``."""
    if is_whole:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, inside)
