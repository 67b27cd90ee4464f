"""AloneChannel: a channel without peers, to run a compressor on one rank."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_commopt.compressors.channel import Channel, Pending


class AloneChannel(Channel):
    """Sends nothing, as if the other ranks had sent what this one does.

    Args:
        channel: or what else has ``size``, ``rank``, ``within`` and ``across``.

    Attributes:
        issued: the name of each collective, also of the lanes, and the bytes of its whole message.
    """

    def __init__(self, channel: Any) -> None:
        self.issued: list[tuple[str, int]] = []
        self.size, self.rank = channel.size, channel.rank
        self.within = None if channel.within is None else type(self)(channel.within)
        self.across = None if channel.across is None else type(self)(channel.across)
        self._scratch, self._lanes = {}, None

    def all_reduce(self, tensor: Tensor) -> Pending:
        self.issued.append(("all_reduce", tensor.nbytes))
        return Pending(tensor, [], lambda summed: summed.mul_(self.size))

    def reduce_scatter(self, message: Tensor) -> Pending:
        self.issued.append(("reduce_scatter", message.nbytes))
        return Pending(message[self.rank].clone(), [], lambda summed: summed.mul_(self.size))

    def all_to_all(self, message: Tensor) -> Pending:
        self.issued.append(("all_to_all", message.nbytes))
        return Pending(message[self.rank : self.rank + 1].repeat(self.size, 1), [])

    def all_gather(self, part: Tensor) -> Pending:
        self.issued.append(("all_gather", part.nbytes * self.size))
        return Pending(part.repeat(self.size, 1), [])
