"""What messages are filled with, and what must come of it.

Every rank has its own whole numbers, small enough for exact sums in every dtype, with a period that no power of two
divides: an element at the wrong place shows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_PERIOD = 1021
_NUM_VALUES = 3
_CHUNK = 4096 * _PERIOD


def fill(part: Tensor, rank: int, offset: int = 0) -> None:
    """Fills ``part`` ``(n,)`` with the numbers of a rank.

    Args:
        part: contiguous.
        rank: whose numbers.
        offset: of the first element in that rank's message.
    """
    table = _table(rank, offset).to(part.device, part.dtype)
    for chunk in part.split(_CHUNK):
        whole = len(chunk) // _PERIOD * _PERIOD
        chunk[:whole].view(-1, _PERIOD).copy_(table)
        chunk[whole:].copy_(table[: len(chunk) - whole])


def num_wrong(part: Tensor, ranks: Sequence[int], redop: str = "sum", offset: int = 0) -> int:
    """Returns how many elements differ from the numbers of ranks, reduced.

    Args:
        part: ``(n,)`` the result.
        ranks: whose numbers; one for what is not reduced.
        redop: "sum", "min" or "max".
        offset: of the first element in the ranks' messages.
    """
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
