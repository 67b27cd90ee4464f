"""AloneChannel: a channel without peers, to run a compressor on one rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_commopt.compressors.channel import Pending


class AloneChannel:
    """Replaces a channel: sends nothing, as if the other ranks had sent what this one does.

    Args:
        channel: or what else has ``size``, ``rank``, ``within`` and ``across``.

    Attributes:
        issued: the name of each collective, and the bytes of its whole message.
    """

    def __init__(self, channel: Any) -> None:
        self.issued: list[tuple[str, int]] = []
        self.size, self.rank = channel.size, channel.rank
        self.within = None if channel.within is None else type(self)(channel.within)
        self.across = None if channel.across is None else type(self)(channel.across)

    def lanes(self) -> tuple[Any, Any]:
        return self, self

    def scratch(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

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
