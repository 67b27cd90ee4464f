"""The contents of messages, and checks of results.

Every rank has its own integers, small enough for exact sums in every dtype, with a prime period: an element at the
wrong offset is noticed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_PERIOD = 1021
_NUM_VALUES = 3
_CHUNK = 4096 * _PERIOD


def fill(part: Tensor, rank: int, offset: int = 0) -> None:
    """Fills ``part`` ``(n,)`` with a rank's numbers from ``offset`` in its message on."""
    table = _table(rank, offset).to(part.device, part.dtype)
    for chunk in part.split(_CHUNK):
        whole = len(chunk) // _PERIOD * _PERIOD
        chunk[:whole].view(-1, _PERIOD).copy_(table)
        chunk[whole:].copy_(table[: len(chunk) - whole])


def num_wrong(part: Tensor, ranks: Sequence[int], redop: str = "sum", offset: int = 0) -> int:
    """Returns how many elements of ``part`` ``(n,)`` differ from the ranks' numbers, reduced, from ``offset`` on."""
    tables = torch.stack([_table(rank, offset) for rank in ranks])
    reduced = tables.sum(0) if redop == "sum" else tables.amin(0) if redop == "min" else tables.amax(0)
    expected = reduced.to(part.dtype).to(part.device)
    wrong = 0
    for chunk in part.split(_CHUNK):
        whole = len(chunk) // _PERIOD * _PERIOD
        wrong += int((chunk[:whole].view(-1, _PERIOD) != expected).sum())
        wrong += int((chunk[whole:] != expected[: len(chunk) - whole]).sum())
    return wrong


def _table(rank: int, offset: int) -> Tensor:
    """Returns one period ``(1021,)`` of a rank's numbers."""
    index = (torch.arange(_PERIOD) + offset) % _PERIOD
    return (index * index + index // 7 + rank * (index % 2 + 1)) % _NUM_VALUES
