"""The interface of compressors of shards, for FSDP2, where each rank receives only the mean of its own shard.

Shapes: ``W`` ranks; a shard has ``s`` elements, the concatenated columns of one or several parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from torch import Tensor

from lightning_commopt.compressors.base import Claims, Compressor, Layout, Rounds, State
from lightning_commopt.compressors.channel import Channel


def first_seed(unit: int, rank: int) -> int:
    """Returns the seed of a unit on a rank in the first step; each step adds 1.

    Seeds differ as long as there are at most 65,536 units, 65,536 ranks and 2^31 steps.
    """
    return (unit << 47) + (rank << 31)


class ShardedCompressor(ABC):
    """Settings of one way to average shards, a frozen dataclass. What changes from step to step is in a separate state.

    `CommOptModelParallel` compresses FSDP2's reduce-scatters with it. With ``CommOptDDP`` a bucket is cut into a shard
    per rank, and the means of the shards are gathered uncompressed; see `FromShards`.

    Attributes:
        needs_nodes: whether its channels must have parts within and across nodes, which only FSDP2's have.
    """

    needs_nodes: ClassVar[bool] = False

    @property
    @abstractmethod
    def claims(self) -> Claims:
        """What the compressor declares about itself; its errors are those of means over two to four ranks."""

    def init(self, numel: int, world_size: int, device: torch.device, seed: int = 0) -> State:
        """Returns the first state for the gradients of one unit.

        Args:
            numel: number of elements of a shard, ``s``.
            world_size: number of ranks, ``W``.
            device: device of the gradients.
            seed: seed of random numbers, from `first_seed`.
        """
        return {}

    @abstractmethod
    def rounds(self, columns: list[Tensor], means: list[Tensor], state: State, channel: Channel) -> Rounds:
        """Averages this rank's shard over the ranks; yields one collective, receives its result.

        Args:
            columns: ``(W, s_i)`` each, with ``s`` columns in all. They are this rank's gradients; row ``r`` belongs to
                the shard of rank ``r``. Not changed.
            means: ``(s_i,)`` each; overwritten by the mean over the ranks of the row of this rank.
            state: state from `init`; updated in place.
            channel: collectives over the ranks.
        """

    @abstractmethod
    def message_bytes(self, numel: int, world_size: int) -> int:
        """Returns the bytes that a rank passes to the collective, for shards of ``numel`` elements."""

    def residual(self, state: State, numel: int, world_size: int) -> Tensor | None:
        """Returns ``(W, s)`` float32, what this rank has not sent yet; None if it keeps no residual."""
        return None

    def set_residual(self, state: State, residual: Tensor) -> None:
        """Replaces the residual, ``(W, s)`` float32, in a state that has one."""
        raise AssertionError(f"{type(self).__name__} keeps no residual")


@final
@dataclass(frozen=True, kw_only=True)
class FromShards(Compressor):
    """Adapts a compressor of shards to buckets: each rank averages a shard, and all gather the uncompressed means.

    What ``shards`` rounds off is lost, unless it keeps a residual itself. A bucket is padded with zeros to a
    multiple of ``W``.

    Attributes:
        shards: the compressor of shards.

    Raises:
        ValueError: ``shards`` needs nodes.
    """

    shards: ShardedCompressor

    def __post_init__(self) -> None:
        if self.shards.needs_nodes:
            name = type(self.shards).__name__
            raise ValueError(f"{name} is for FSDP2 only: with DDP write {{'name': 'hierarchical', 'inner': ...}}")

    @property
    def claims(self) -> Claims:
        """The claims of ``shards``; without a residual in its state, everything that a step leaves out is untracked."""
        claims = self.shards.claims
        if claims.keeps_residual or claims.error_bound is None:
            return claims
        return replace(claims, untracked_error=max(claims.untracked_error, claims.error_bound))

    def init(self, layout: Layout, device: torch.device, step: int = 0) -> State:
        """Returns the step only; `rounds` adds the state of ``shards``, since the channel knows the ranks."""
        return {"step": step}

    def rounds(
        self, flat: Tensor, layout: Layout, state: State, channel: Channel, residual: Tensor | None = None
    ) -> Rounds:
        """Runs the round of ``shards``, and gathers the means. A ``residual`` is added first, and becomes zero."""
        num_ranks, numel = channel.size, _shard_numel(flat.numel(), channel.size)
        if "shards" not in state:
            seed = first_seed(0, channel.rank) + state["step"]
            state["shards"], state["num_ranks"] = self.shards.init(numel, num_ranks, flat.device, seed), num_ranks
        state["step"] += 1
        if residual is not None:
            flat.add_(residual)
        # A compressor of shards takes its memory from the same channel, so these names must differ from its names.
        rows = channel.scratch("FromShards.rows", (num_ranks * numel,), flat.dtype, flat.device)
        rows[: flat.numel()] = flat
        rows[flat.numel() :] = 0
        mean = channel.scratch("FromShards.mean", (numel,), flat.dtype, flat.device)
        yield from self.shards.rounds([rows.view(num_ranks, numel)], [mean], state["shards"], channel)
        gathered = yield channel.all_gather(mean)
        flat.copy_(gathered.view(-1)[: flat.numel()])
        if residual is not None:  # it is kept for the next step if the average is not finite
            residual.masked_fill_(flat.isfinite().all(), 0)

    def wire_bytes(self, layout: Layout, world_size: int) -> int:
        """Returns half the bytes of both collectives, since each is half an all-reduce."""
        numel = _shard_numel(layout.numel, world_size)
        return (self.shards.message_bytes(numel, world_size) + world_size * numel * layout.dtype.itemsize) // 2

    def residual(self, layout: Layout, state: State, given: Tensor | None = None) -> Tensor | None:
        if given is not None or "shards" not in state:
            return given
        num_ranks = state["num_ranks"]
        rows = self.shards.residual(state["shards"], _shard_numel(layout.numel, num_ranks), num_ranks)
        return None if rows is None else rows.reshape(-1)[: layout.numel]


def _shard_numel(numel: int, world_size: int) -> int:
    return -(-numel // world_size)
