"""How FSDP2 lays out the gradients of a unit: a row for each rank, with the rank's shard of every parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


def shard_numel(shape: torch.Size, dim: int, num_shards: int) -> int:
    """Returns the number of elements in the largest shard of a parameter that is sharded in dimension ``dim``."""
    size = shape[dim]
    return -(-size // num_shards) * (shape.numel() // size) if size else 0


@dataclass(frozen=True)
class UnitLayout:
    """The layout of a unit's parameters in rows ``(W, s)``: concatenated, each shard zero-padded to the largest.

    Attributes:
        shapes: shape of each parameter without sharding.
        dims: dimension in which each parameter is sharded.
        num_shards: number of shards, ``W``.
    """

    shapes: tuple[torch.Size, ...]
    dims: tuple[int, ...]
    num_shards: int

    @cached_property
    def numels(self) -> list[int]:
        """Number of elements that each parameter has in a row."""
        return [shard_numel(*cut, self.num_shards) for cut in zip(self.shapes, self.dims, strict=True)]

    @property
    def numel(self) -> int:
        """Number of elements of a row, ``s``."""
        return sum(self.numels)

    def split(self, rows: Tensor) -> list[Tensor]:
        """Returns the part of ``rows`` ``(W, s)`` for each parameter, without padding and in the parameter's shape."""
        wholes = []
        for part, shape, dim in zip(rows.split(self.numels, 1), self.shapes, self.dims, strict=True):
            chunk = list(shape)
            chunk[dim] = -(-shape[dim] // self.num_shards)
            wholes.append(torch.cat([row.view(chunk) for row in part], dim).narrow(dim, 0, shape[dim]))
        return wholes

    def join(self, wholes: Sequence[Tensor]) -> Tensor:
        """Returns rows ``(W, s)`` from a tensor for each parameter; the inverse of `split`, with zeros as padding."""
        parts = []
        for whole, dim in zip(wholes, self.dims, strict=True):
            missing = list(whole.shape)
            missing[dim] = -whole.shape[dim] % self.num_shards
            filled = torch.cat([whole, whole.new_zeros(missing)], dim)
            parts.append(torch.stack([chunk.flatten() for chunk in filled.chunk(self.num_shards, dim)]))
        return torch.cat(parts, 1)
