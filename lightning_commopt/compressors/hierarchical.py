"""Averages in full precision within a node, and with any compressor across nodes."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import final

import torch
from torch import Tensor

from lightning_commopt.compat.torch import foreach_copy_
from lightning_commopt.compressors.base import Compressor, Layout, Rounds, State
from lightning_commopt.compressors.channel import Channel
from lightning_commopt.compressors.registry import register_compressor
from lightning_commopt.compressors.wrappers import Wrapper
from lightning_commopt.text.validation import check_integer, warn_once


@register_compressor("hierarchical")
@final
@dataclass(frozen=True, kw_only=True)
class Hierarchical(Wrapper):
    """Averages within each node without loss, and with ``inner`` across nodes.

    A reduce-scatter within the node gives each rank a part of the bucket; ``inner`` averages this part over the ranks
    with the same place in their nodes; an all-gather within the node collects the parts. Even without compression the
    traffic across nodes falls by the number of ranks per node. With a single node nothing is compressed or lost.

    This differs from the hierarchical all-reduce of Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 4.1,
    in: 1. A compressor averages across nodes, where they send uncompressed sums. 2. Parts begin and end between rows
    of matrices, so that ``inner`` sees matrices; the parts are therefore only about equal in size.

    Attributes:
        inner: the compressor across nodes.
        ranks_per_node: number of consecutive ranks on each node; None for the number that the launcher has started.

    Raises:
        ValueError: ``inner`` is not a compressor or has a `Hierarchical`, or ``ranks_per_node`` is below 1.
    """

    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if is_hierarchical(self.inner):
            raise ValueError(
                "inner of 'hierarchical' averages across nodes, so it must not be or contain another 'hierarchical',"
                f" got {self.inner!r}"
            )
        if self.ranks_per_node is not None:
            check_integer("ranks_per_node", self.ranks_per_node, at_least=1)

    def init(self, layout: Layout, device: torch.device, step: int = 0) -> State:
        """Returns the step only; `rounds` adds the state of ``inner``, since the channel knows this rank's part."""
        return {"step": step}

    def rounds(
        self, flat: Tensor, layout: Layout, state: State, channel: Channel, residual: Tensor | None = None
    ) -> Rounds:
        """Runs a reduce-scatter within the node, the rounds of ``inner``, and an all-gather within the node."""
        within, across = channel.within, channel.across
        assert within is not None
        assert across is not None
        if residual is not None:
            flat.add_(residual)
        parts = shards(layout, within.size)
        start, own_layout = parts[within.rank]
        if "inner" not in state:
            state["rank_in_node"], state["ranks_per_node"] = within.rank, within.size
            state["inner"] = self.inner.init(own_layout, flat.device, state["step"])
        state["step"] += 1

        in_bucket = [flat[begin : begin + part.numel] for begin, part in parts]
        sizes = [part.numel for _, part in parts]
        message = within.scratch("message", (within.size, max(sizes)), flat.dtype, flat.device)
        message[:, min(sizes) :].zero_()  # the padding of shorter parts is sent too
        foreach_copy_([row[:size] for row, size in zip(message, sizes, strict=True)], in_bucket)
        row = yield within.reduce_scatter(message.mul_(1 / within.size))
        own = row[: own_layout.numel]
        dropped = None if residual is None else torch.zeros_like(own)
        if across.size > 1 and own.numel():  # a small bucket leaves some ranks without a part
            yield from self.inner.rounds(own, own_layout, state["inner"], across, dropped)
            if dropped is not None:
                self.inner.residual(own_layout, state["inner"], dropped)
        gathered = yield within.all_gather(row)
        foreach_copy_(in_bucket, [row[:size] for row, size in zip(gathered, sizes, strict=True)])
        if residual is not None and dropped is not None:
            finite = flat.isfinite().all()
            residual.masked_fill_(finite, 0)
            # The mean over a node divides this residual by the ranks per node, and no other rank has a residual for it.
            part_residual = dropped.mul_(within.size).masked_fill_(~finite, 0)
            residual[start : start + own_layout.numel].add_(part_residual)

    def why_idle(self, layout: Layout) -> str | None:
        """Returns None, since fewer bytes cross nodes even if ``inner`` compresses nothing."""
        return None

    def wire_bytes(self, layout: Layout, world_size: int) -> int:
        """Returns the bytes that the rank with the largest part sends across nodes."""
        if self.ranks_per_node is None:
            raise ValueError(
                "'hierarchical' needs ranks_per_node here: outside of training there is no launcher to take it from"
            )
        num_nodes = world_size // self.ranks_per_node
        parts = shards(layout, self.ranks_per_node) if num_nodes > 1 else ()
        return max((self.inner.wire_bytes(part, num_nodes) for _, part in parts), default=0)

    def residual(self, layout: Layout, state: State, given: Tensor | None = None) -> Tensor | None:
        """Returns the ``given`` residual, else that of ``inner`` times the ranks per node.

        Only one rank of a node has the residual of a part, so the factor makes the mean over all ranks right.
        """
        if given is not None or "inner" not in state:
            return given
        start, part = shards(layout, state["ranks_per_node"])[state["rank_in_node"]]
        part_residual = self.inner.residual(part, state["inner"])
        if part_residual is None:
            return None
        residual = part_residual.new_zeros(layout.numel)
        residual[start : start + part.numel] = part_residual * state["ranks_per_node"]
        return residual


def is_hierarchical(compressor: object) -> bool:
    """Returns whether a compressor is a `Hierarchical`, or has one anywhere in its composition."""
    while isinstance(compressor, Compressor) and not isinstance(compressor, Hierarchical):
        compressor = getattr(compressor, "inner", None)
    return isinstance(compressor, Hierarchical)


def place_on_nodes(compressor: Compressor, world_size: int, ranks_per_node: int) -> tuple[Compressor, int | None]:
    """Sets ``ranks_per_node`` of a `Hierarchical`, anywhere in the composition, to the launcher's if it is None.

    Returns the compressor and the ranks per node, which are None without a `Hierarchical`.

    Raises:
        ValueError: the number of ranks per node does not divide the number of ranks.
    """
    if isinstance(compressor, Hierarchical):
        size = node_size(compressor.ranks_per_node, ranks_per_node, [world_size], "ranks")
        return dataclasses.replace(compressor, ranks_per_node=size), size
    inner = getattr(compressor, "inner", None)
    if not isinstance(inner, Compressor):
        return compressor, None
    placed, inner_size = place_on_nodes(inner, world_size, ranks_per_node)
    if inner_size is None:
        return compressor, None
    return dataclasses.replace(compressor, inner=placed), inner_size  # type: ignore[type-var]


def node_size(requested: int | None, launched: int, numbers: Collection[int], unit: str) -> int:
    """Returns the number of ranks per node. Warns once if the division into nodes has no effect.

    Args:
        requested: the user's number; None for ``launched``.
        launched: number of ranks that the launcher has started on each node.
        numbers: numbers that it must divide.
        unit: what ``numbers`` count, such as "ranks", for messages.

    Raises:
        ValueError: it does not divide one of the ``numbers``.
    """
    size = requested or launched
    if indivisible := [number for number in numbers if number % size]:
        source = "" if requested else " (the number of ranks that the launcher has started on this node)"
        raise ValueError(f"ranks_per_node must divide the number of {unit}, {indivisible[0]}, got {size}{source}")
    if set(numbers) == {size}:
        warn_once(f"comm_hook: 'hierarchical' compresses nothing here: all {unit} are on one node.")
    elif size == 1:
        warn_once(
            "comm_hook: 'hierarchical' has no effect here: each node has one rank, so its 'inner' does everything."
        )
    return size


@lru_cache(maxsize=1024)
def shards(layout: Layout, num: int) -> tuple[tuple[int, Layout], ...]:
    """Cuts a bucket between matrix rows into ``num`` parts of about equal size; returns their starts and layouts."""
    cuts = [0, *(_nearest_row(layout, layout.numel * i // num) for i in range(1, num)), layout.numel]
    return tuple((start, _between(layout, start, end)) for start, end in pairwise(cuts))


def _nearest_row(layout: Layout, element: int) -> int:
    """Returns the first element of the matrix row that begins nearest to an element."""
    if element >= layout.numel:
        return layout.numel
    index = bisect_right(layout.offsets, element) - 1
    k = max(1, layout.matrix_sides[index][1])
    offset = layout.offsets[index]
    return offset + round((element - offset) / k) * k


def _between(layout: Layout, start: int, end: int) -> Layout:
    """Returns the layout of the part of a bucket from ``start`` to ``end``, both of which are between rows."""
    shapes: list[torch.Size] = []
    strides: list[tuple[int, ...]] = []
    for offset, numel, (_, k), shape, stride in zip(
        layout.offsets, layout.numels, layout.matrix_sides, layout.shapes, layout.strides, strict=True
    ):
        size = min(end, offset + numel) - max(start, offset)
        if size > 0:
            whole = size == numel
            shapes.append(shape if whole else torch.Size((size // k, k)))
            strides.append(stride if whole else (k, 1))
    return Layout(tuple(shapes), tuple(strides), layout.dtype)
