"""Averages shards in full precision within a node, and with any compressor of shards across nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, final

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
    """Averages within each node without loss, and with ``inner`` across nodes.

    A reduce-scatter within the node gives each rank the mean over its node of all shards whose owners have its place in
    their nodes; ``inner`` averages these among the ranks with this place. Even without compression the traffic across
    nodes and the residual shrink by the number of ranks per node. With a single node nothing is compressed or lost.

    Shapes: ``N`` nodes of ``P`` ranks, ``W = N * P``; rank ``n * P + p`` has the place ``p`` in node ``n``.

    Attributes:
        inner: the compressor across nodes.
        ranks_per_node: ``P``, the number of consecutive ranks on each node; None for the number that the launcher has
            started.

    Raises:
        ValueError: ``inner`` is not a compressor of shards or is hierarchical itself, or ``ranks_per_node`` is below 1.

    Source: see `Hierarchical`; shards need no all-gather.
    """

    needs_nodes: ClassVar[bool] = True
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
        """Returns the state of ``inner`` and the place of this rank, which is -1 until the first call of `rounds`."""
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
        node_means = (yield pending).view(across.size, -1)
        if across.size == 1:
            foreach_copy_(means, node_means[0].split(widths))
        else:
            yield from self.inner.rounds(list(node_means.split(widths, 1)), means, state, across)

    def message_bytes(self, numel: int, world_size: int) -> int:
        """Returns the bytes that cross nodes."""
        num_nodes = self._num_nodes(world_size)
        return self.inner.message_bytes(numel, num_nodes) if num_nodes > 1 else 0

    def residual(self, state: State, numel: int, world_size: int) -> Tensor | None:
        """Returns the residual from `set_residual` plus that of ``inner`` times the ranks per node.

        Only one rank of a node has a given part of ``inner``'s residual, so the factor makes the mean over ranks right.
        """
        inner_residual = self.inner.residual(state, numel, self._num_nodes(world_size))
        if inner_residual is None:
            return None
        residual = inner_residual.new_zeros(world_size, numel)
        if state["place"] >= 0:
            ranks_per_node = world_size // len(inner_residual)
            residual[int(state["place"]) :: ranks_per_node] = inner_residual * ranks_per_node
        return residual.add_(state["given"]) if "given" in state else residual

    def set_residual(self, state: State, residual: Tensor) -> None:
        """Replaces the residual; the next step averages it within the node before ``inner`` sees it."""
        self.inner.set_residual(state, residual.new_zeros(self._num_nodes(len(residual)), residual.shape[1]))
        state["given"] = residual

    def on_nodes(self, numbers_of_shards: Collection[int], ranks_per_node: int) -> ShardedHierarchical:
        """Returns this compressor with ``ranks_per_node``, for units with these numbers of shards; see `node_size`.

        Raises:
            ValueError: the number of ranks per node does not divide one of the numbers of shards.
        """
        size = node_size(self.ranks_per_node, ranks_per_node, numbers_of_shards, "shards")
        return dataclasses.replace(self, ranks_per_node=size)

    def _num_nodes(self, world_size: int) -> int:
        assert self.ranks_per_node is not None, "on_nodes has not been called"
        return world_size // self.ranks_per_node
