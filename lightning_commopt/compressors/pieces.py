"""A bucket averaged piece by piece: while one piece is on the wire, the next one is computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from torch import Tensor

from lightning_commopt.compressors.base import Rounds
from lightning_commopt.compressors.channel import Channel, Pending

PIECE_NUMEL = 2**22
"""Elements in a piece: few enough that a large bucket has several, and so many that a collective's latency does not
count. A thread that waited for one shares its core with backward, and may get it milliseconds later."""


def in_pieces(
    flat: Tensor,
    residual: Tensor | None,
    channel: Channel,
    multiple: int,
    rounds: Callable[[Tensor, Tensor | None, Channel], Rounds],
) -> Rounds:
    """Runs the rounds of one piece after another, two pieces at a time.

    For compressors that treat every piece as they treat the whole. All ranks start the same collectives in the same
    order. On CUDA a bucket stays whole: there whole buckets overlap, on two streams.

    Args:
        flat: ``(n,)`` this rank's gradients.
        residual: ``(n,)`` this rank's, or None.
        channel: collectives over the ranks.
        multiple: of elements, which all pieces but the last have.
        rounds: of one piece, given its gradients, their residual, and a channel.
    """
    piece_numel = max(1, PIECE_NUMEL // multiple) * multiple
    if flat.is_cuda or flat.numel() <= piece_numel:
        yield from rounds(flat, residual, channel)
        return
    pieces = iter([slice(start, start + piece_numel) for start in range(0, flat.numel(), piece_numel)])
    under_way: deque[tuple[Channel, Rounds, Pending]] = deque()

    def start_next(lane: Channel) -> None:
        if (piece := next(pieces, None)) is not None:
            started = rounds(flat[piece], None if residual is None else residual[piece], lane)
            under_way.append((lane, started, next(started)))

    for lane in channel.lanes():
        start_next(lane)
    while under_way:
        lane, started, pending = under_way.popleft()
        pending.is_followed = bool(under_way)
        arrived = yield pending
        try:
            under_way.append((lane, started, started.send(arrived)))
        except StopIteration:
            start_next(lane)
