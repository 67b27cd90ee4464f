"""The groups of ranks of cases, and the memory that cases share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commopt.commands.bench.cases import has_nodes
from lightning_commopt.compressors.channel import Channel
from lightning_commopt.sync.groups import borrow_groups


@dataclass(frozen=True)
class Ranks:
    """The ranks of a case: their group, their global ranks, and the index of this rank among them."""

    group: dist.ProcessGroup
    members: tuple[int, ...]
    index: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Ranks:
        return cls(group, tuple(dist.get_process_group_ranks(group)), dist.get_rank(group))

    @property
    def size(self) -> int:
        return len(self.members)

    def member(self, index: int) -> int:
        """Returns the global rank at ``index`` modulo their number."""
        return self.members[index % self.size]


def ranks_by_scope(ranks_per_node: int) -> tuple[dict[str, Ranks], Channel]:
    """Returns the ranks of each scope, and a channel over all ranks. All ranks must call it."""
    world = dist.group.WORLD
    assert isinstance(world, dist.ProcessGroup)
    world_size = dist.get_world_size()
    if not has_nodes(world_size, ranks_per_node):
        return {"all": Ranks.of(world)}, Channel(world)
    borrowed = borrow_groups(world, ranks_per_node=ranks_per_node)
    within, across = borrowed.within, borrowed.across
    assert within is not None
    assert across is not None
    scopes = {"all": Ranks.of(world), "node": Ranks.of(within), "across": Ranks.of(across)}
    return scopes, Channel(world, within, across)


class Memory:
    """Two buffers of ``num_bytes`` that all cases share, allocated and touched once."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._buffers = [torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]

    def views(self, dtype: torch.dtype, numel: int) -> tuple[Tensor, Tensor]:
        """Returns the beginning of both buffers, ``(numel,)`` each."""
        first, second = (buffer[: numel * dtype.itemsize].view(dtype) for buffer in self._buffers)
        return first, second
