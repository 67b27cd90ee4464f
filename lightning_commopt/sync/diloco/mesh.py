"""Mesh: collectives among some of the ranks, since a process group is of no use once one of its ranks has died."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commopt.compressors.channel import Channel, Pending

PIECE_BYTES = 2**24
"""Bytes in one message of `Mesh.send`, 16 MiB like a piece of a compressed bucket. Each may take ``patience_s``."""

# A group with a dead peer must not be freed while one of its threads still waits for that peer: the destructor would
# wait for the thread, and hold the GIL that the thread needs.
_never_freed: list[dist.ProcessGroupGloo] = []


class Mesh(Channel):
    """The collectives of compressors over new gloo connections among some ranks, the ``members``.

    ``dist.new_group`` requires that all ranks have created the same number of groups before, and a rank that has missed
    an exchange may have created fewer. If a member does not connect within ``timeout_s``, a RuntimeError is raised.
    """

    def __init__(
        self, store: dist.Store, rank: int, members: Sequence[int], *, timeout_s: float, sent: Counter[str]
    ) -> None:
        self.size, self.rank = len(members), members.index(rank)
        self.within = self.across = None
        self._sent, self._scratch, self._lanes = sent, {}, None
        self._backends = {"cpu": "gloo"}
        self._members = members
        gloo = dist.ProcessGroupGloo(store, self.rank, self.size, timedelta(seconds=timeout_s))
        _never_freed.append(gloo)
        self._gloo = cast(dist.ProcessGroup, gloo)  # torch does not annotate that it has the same collectives

    def all_reduce(self, tensor: Tensor) -> Pending:
        self._sent["half_bytes"] += 2 * tensor.nbytes
        return Pending(tensor, [self._gloo.allreduce([tensor])])

    def send(self, tensors: Iterable[Tensor], to: int, on_piece: Callable[[], None]) -> None:
        """Sends tensors on the host to rank ``to``; calls ``on_piece`` after each message."""
        index = self._members.index(to)
        for tensor in tensors:
            for piece in _pieces(tensor.contiguous()):
                self._gloo.send([piece], index, 0).wait()
                on_piece()

    def receive(self, like: Iterable[Tensor], source: int) -> list[Tensor]:
        """Receives what rank ``source`` sends, in contiguous tensors of the shapes and dtypes of ``like``."""
        index, received = self._members.index(source), []
        for tensor in like:
            received.append(torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"))
            for piece in _pieces(received[-1]):
                self._gloo.recv([piece], index, 0).wait()
        return received

    def _swap(self, outgoing: list[Tensor], incoming: list[Tensor]) -> list[dist.Work | None]:
        incoming[self.rank].copy_(outgoing[self.rank])
        others = [(self.rank + distance) % self.size for distance in range(1, self.size)]
        works: list[dist.Work | None] = [self._gloo.recv([_as_bytes(incoming[index])], index, 0) for index in others]
        return [*works, *(self._gloo.send([_as_bytes(outgoing[index])], index, 0) for index in others)]


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    return _as_bytes(tensor).split(PIECE_BYTES) if tensor.numel() else ()
