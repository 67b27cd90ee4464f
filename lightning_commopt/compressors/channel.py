"""Collectives over one process group, with a count of their bytes; and a stand-in that sends nothing."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commopt.compat.torch import sparse_values


class Pending:
    """A running collective.

    Args:
        tensor: the output of the collective.
        works: handles that `wait` waits for.
        finish: computes the result from ``tensor``; None if ``tensor`` is the result.

    Attributes:
        is_followed: whether other collectives of the same bucket are still under way when this one has arrived.
    """

    def __init__(
        self, tensor: Tensor, works: Sequence[dist.Work | None], finish: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.is_followed = False
        self._tensor = tensor
        self._works = works
        self._finish = finish

    def wait(self) -> Tensor:
        """Returns the result.

        For CPU tensors it blocks until the collective is done. For CUDA tensors over NCCL it only makes the
        current stream wait.
        """
        for work in self._works:
            if work is not None:
                work.wait()
        return self._tensor if self._finish is None else self._finish(self._tensor)


class Channel:
    """The collectives that compressors may use, over one process group.

    Attributes:
        size: number of ranks in the group.
        rank: rank of this process in the group.
        within: channel over the ranks of this node; None if the group is not divided into nodes.
        across: channel over the ranks with this rank's local rank, one on each node; None if ``within`` is None.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        within: dist.ProcessGroup | None = None,
        across: dist.ProcessGroup | None = None,
    ) -> None:
        self._group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.within: Channel | None = None if within is None else Channel(within)
        self.across: Channel | None = None if across is None else Channel(across)
        self._sent: Counter[str] = Counter()  # shared with the lanes, whose bytes count here
        self._scratch: dict[str, Tensor] = {}
        self._lanes: tuple[Channel, Channel] | None = None
        self._backends = backends_of(group)
        self._global_ranks = dist.get_process_group_ranks(group)

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this rank has passed to collectives so far, in units of an all-reduce.

        Each half of an all-reduce (reduce-scatter or all-to-all, and all-gather) moves half as much as the whole, so
        its bytes count half. Bytes that stay within a node are counted by ``within`` only.
        """
        return self._sent["half_bytes"] // 2 + (self.across.bytes_sent if self.across is not None else 0)

    def lanes(self) -> tuple[Channel, Channel]:
        """Returns two channels over this group, each with its own scratch memory; their bytes are counted here.

        A compressor with two collectives under way uses one lane for each.
        """
        if self._lanes is None:
            self._lanes = self._lane(), self._lane()
        return self._lanes

    def scratch(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns uninitialized memory for a message; the next bucket gets the same memory under this name.

        On CPU, newly allocated memory would take as long as the arithmetic of a message, because the system clears it
        page by page.
        """
        if device.type != "cpu":  # torch's allocator reuses memory there
            return torch.empty(shape, dtype=dtype, device=device)
        num_bytes = math.prod(shape) * dtype.itemsize
        if name not in self._scratch or self._scratch[name].numel() < num_bytes:
            self._scratch[name] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return self._scratch[name][:num_bytes].view(dtype).view(shape)

    def all_reduce(self, tensor: Tensor) -> Pending:
        """Starts to sum ``tensor`` over the ranks, in place.

        Args:
            tensor: any shape, of a dtype that the group's backend sums; sparse only if the backend supports that.
        """
        self._sent["half_bytes"] += 2 * sparse_values(tensor).nbytes
        return Pending(tensor, [dist.all_reduce(tensor, group=self._group, async_op=True)])

    def reduce_scatter(self, message: Tensor) -> Pending:
        """Starts to sum ``message`` over the ranks; the result ``(s,)`` is the row of this rank.

        Args:
            message: ``(W, s)`` of a dtype that the group's backend sums, contiguous.
        """
        if self._is_gloo(message):  # some versions of torch have no reduce-scatter for gloo
            pending = self.all_to_all(message)
            return Pending(pending._tensor, pending._works, lambda received: received.sum(0))
        self._sent["half_bytes"] += message.nbytes
        row = message.new_empty(message.shape[1])
        return Pending(row, [dist.reduce_scatter_tensor(row, message, group=self._group, async_op=True)])

    def all_to_all(self, message: Tensor) -> Pending:
        """Starts to send row ``i`` of ``message`` to each rank ``i``; row ``i`` of the result is from rank ``i``.

        Args:
            message: ``(W, s)`` of any dtype, contiguous.

        Returns:
            The result is in scratch memory, which is valid until the next bucket.
        """
        self._sent["half_bytes"] += message.nbytes
        received = self.scratch("all_to_all", tuple(message.shape), message.dtype, message.device)
        if self._is_gloo(message) and not message.is_cuda:
            return Pending(received, self._swap(list(message), list(received)))
        work = dist.all_to_all_single(_as_bytes(received), _as_bytes(message), group=self._group, async_op=True)
        return Pending(received, [work])

    def all_gather(self, part: Tensor) -> Pending:
        """Starts to send ``part`` to all ranks; row ``i`` of the result ``(W, s)`` is from rank ``i``.

        Args:
            part: ``(s,)`` of any dtype, contiguous.

        Returns:
            The result is in scratch memory, which is valid until the next bucket.
        """
        gathered = self.scratch("all_gather", (self.size, part.numel()), part.dtype, part.device)
        self._sent["half_bytes"] += gathered.nbytes
        if self._is_gloo(part) and not part.is_cuda:
            return Pending(gathered, self._swap([part] * self.size, list(gathered)))
        work = dist.all_gather_into_tensor(_as_bytes(gathered), _as_bytes(part), group=self._group, async_op=True)
        return Pending(gathered, [work])

    def _is_gloo(self, tensor: Tensor) -> bool:
        return self._backends.get(tensor.device.type) == "gloo"

    def _lane(self) -> Channel:
        lane = copy.copy(self)
        lane._scratch = {}
        return lane

    def _swap(self, outgoing: list[Tensor], incoming: list[Tensor]) -> list[dist.Work | None]:
        """Sends to and receives from every rank at once.

        This differs from gloo's own all-to-all and all-gather in that all receives are posted before any send. There a
        rank may post its receive only after its own message, so that a link carries one direction at a time.
        """
        incoming[self.rank].copy_(outgoing[self.rank])
        works = []
        for distance in range(1, self.size):
            source = (self.rank - distance) % self.size
            works.append(dist.irecv(_as_bytes(incoming[source]), self._global_ranks[source], group=self._group))
        for distance in range(1, self.size):
            target = (self.rank + distance) % self.size
            works.append(dist.isend(_as_bytes(outgoing[target]), self._global_ranks[target], group=self._group))
        return works


class AloneChannel(Channel):
    """A stand-in that sends nothing, and computes as if all ranks had the same data as this one.

    Args:
        size: number of ranks.
        rank: rank of this process.
        within: stand-in for the ranks of this node; None if the ranks are not divided into nodes.
        across: stand-in for the ranks with this local rank, one on each node; None if ``within`` is None.

    Attributes:
        issued: the name of each collective, also of the lanes, and the bytes of its whole message.
    """

    def __init__(
        self, size: int, rank: int = 0, within: AloneChannel | None = None, across: AloneChannel | None = None
    ) -> None:
        self.issued: list[tuple[str, int]] = []
        self.size, self.rank, self.within, self.across = size, rank, within, across
        self._scratch, self._lanes = {}, None

    @classmethod
    def like(cls, channel: Channel) -> AloneChannel:
        """Returns a stand-in with the ranks of another channel."""
        within, across = (None if part is None else cls.like(part) for part in (channel.within, channel.across))
        return cls(channel.size, channel.rank, within, across)

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


def _as_bytes(tensor: Tensor) -> Tensor:
    """Returns a view of a contiguous tensor as uint8 ``(num_bytes,)``, which any backend can send."""
    return tensor.view(-1).view(torch.uint8)


def backends_of(group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """Returns the backend that a group has for each kind of device, such as ``{"cpu": "gloo", "cuda": "nccl"}``.

    ``dist.get_backend`` instead returns what the group was created with: a name, or pairs such as "cuda:nccl".
    """
    pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
    return {device: backend for device, _, backend in pairs}
