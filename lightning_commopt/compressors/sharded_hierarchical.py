"""Gradients of shards: full precision within a node, any compressor of shards across nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from lightning_commopt.compat.torch import foreach_copy_
from lightning_commopt.compressors.base import Claims, Rounds, State
from lightning_commopt.compressors.channel import Channel
from lightning_commopt.compressors.hierarchical import node_size
from lightning_commopt.compressors.registry import register_compressor
from lightning_commopt.compressors.shards import ShardedCompressor
from lightning_commopt.measure.recorder import issued_by
from lightning_commopt.text.validation import check_integer


@register_compressor("hierarchical")
@final
@dataclass(frozen=True, kw_only=True)
class ShardedHierarchical(ShardedCompressor):
    """Averages within each node without loss, and then with ``inner`` across nodes.

    A reduce-scatter within the node gives each rank its node's mean of all shards whose owners have its place in their
    nodes; ``inner`` averages those among the ranks that have this place. What crosses nodes falls by the ranks per node
    even without compression, and a residual is as much smaller. With one node only nothing is compressed or lost.

    Shapes: ``N`` nodes of ``P`` ranks, ``W = N * P``; rank ``n * P + p`` has the place ``p`` in node ``n``.

    Attributes:
        inner: the compressor across nodes.
        ranks_per_node: ``P``, consecutive ranks; None for as many as the launcher started on each.

    Raises:
        ValueError: ``inner`` is no compressor of shards, or one of these; or ``ranks_per_node`` is below 1.

    Source: as in `Hierarchical`, up to the all-gather that shards do not need.
    """

    inner: ShardedCompressor
    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.inner, ShardedCompressor) or isinstance(self.inner, ShardedHierarchical):
            raise ValueError(
                f"inner must be 'bf16', 'int8' or 'int4', or a mapping with such a name, got {self.inner!r}"
            )
        if self.ranks_per_node is not None:
            check_integer("ranks_per_node", self.ranks_per_node, at_least=1)

    @property
    def claims(self) -> Claims:
        return self.inner.claims

    def init(self, numel: int, world_size: int, device: torch.device, seed: int = 0) -> State:
        """Returns the state of ``inner``; the place of this rank is -1 until the first round."""
        state = self.inner.init(numel, self._num_nodes(world_size), device, seed)
        return {**state, "place": torch.tensor(-1, device="cpu")}

    def rounds(self, columns: list[Tensor], means: list[Tensor], state: State, channel: Channel) -> Rounds:
        """Runs a reduce-scatter within the node, and the rounds of ``inner`` across nodes."""
        within, across = channel.within, channel.across
        assert within is not None
        assert across is not None
        state["place"].fill_(within.rank)
        widths, shape = [part.shape[1] for part in columns], (across.size, within.size)
        message = within.scratch("message", (*shape[::-1], sum(widths)), columns[0].dtype, columns[0].device)
        foreach_copy_(message.split(widths, 2), [part.unflatten(0, shape).transpose(0, 1) for part in columns])
        given = state.pop("given", None)
        if given is not None:
            message.add_(given.unflatten(0, shape).transpose(0, 1))
        with issued_by("uncompressed reduce-scatter within nodes"):
            pending = within.reduce_scatter(message.view(within.size, -1).mul_(1 / within.size))
        of_node = (yield pending).view(across.size, -1)
        if across.size == 1:
            foreach_copy_(means, of_node[0].split(widths))
        else:
            yield from self.inner.rounds(list(of_node.split(widths, 1)), means, state, across)

    def message_bytes(self, numel: int, world_size: int) -> int:
        """Returns the bytes that cross nodes."""
        num_nodes = self._num_nodes(world_size)
        return self.inner.message_bytes(numel, num_nodes) if num_nodes > 1 else 0

    def residual(self, state: State, numel: int, world_size: int) -> Tensor | None:
        """Returns the residual of ``inner``, as a mean over all ranks counts it, and what `set_residual` was given."""
        kept = self.inner.residual(state, numel, self._num_nodes(world_size))
        if kept is None:
            return None
        residual = kept.new_zeros(world_size, numel)
        if state["place"] >= 0:
            ranks_per_node = world_size // len(kept)
            residual[int(state["place"]) :: ranks_per_node] = kept * ranks_per_node
        return residual.add_(state["given"]) if "given" in state else residual

    def set_residual(self, state: State, residual: Tensor) -> None:
        """Replaces the residual; what it has in rows of other places is averaged within the node in the next step."""
        self.inner.set_residual(state, residual.new_zeros(self._num_nodes(len(residual)), residual.shape[1]))
        state["given"] = residual

    def on_nodes(self, numbers_of_shards: Collection[int], ranks_per_node: int) -> ShardedHierarchical:
        """Returns the same with ``ranks_per_node`` as the launcher started, if it is not set; for shards of all units.

        Raises:
            ValueError: nodes of that many ranks cannot be made of the ranks that have shards of one unit.
        """
        size = node_size(self.ranks_per_node, ranks_per_node, numbers_of_shards, "shards")
        return dataclasses.replace(self, ranks_per_node=size)

    def _num_nodes(self, world_size: int) -> int:
        assert self.ranks_per_node is not None, "on_nodes has not been called"
        return world_size // self.ranks_per_node
