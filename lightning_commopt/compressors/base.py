"""What a compressor is: it averages one flat gradient bucket over ranks, perhaps lossily.

Shapes: ``n`` elements in a bucket, ``W`` ranks. Sizes on the wire are in bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lightning_commopt.compressors.channel import Channel, Pending

PIECE_NUMEL = 2**22
"""Elements in a piece: few enough that a large bucket has several, and so many that a collective's latency does not
count. A thread that waited for one shares its core with backward, and may get it milliseconds later."""

State = dict[str, Any]
"""Tensors, ints and lists or dicts of them: what a checkpoint can hold."""


@dataclass(frozen=True)
class Layout:
    """What a bucket holds: the shapes of its gradients, in order, their strides within it, and their dtype.

    Strides matter: DDP lays a gradient out as its parameter is (channels last, transposed).
    """

    shapes: tuple[torch.Size, ...]
    strides: tuple[tuple[int, ...], ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, parameters: Sequence[Tensor], dtype: torch.dtype) -> Layout:
        """Returns the layout of DDP's bucket for these parameters."""
        if not dtype.is_complex:
            parameters = [as_real(x) for x in parameters]
        return cls(tuple(x.shape for x in parameters), tuple(_bucket_stride(x) for x in parameters), dtype)

    def select(self, mask: Sequence[bool]) -> Layout:
        """Returns the layout of only those gradients for which ``mask`` is true."""
        shapes = tuple(shape for shape, yes in zip(self.shapes, mask, strict=True) if yes)
        return Layout(shapes, tuple(stride for stride, yes in zip(self.strides, mask, strict=True) if yes), self.dtype)

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """Elements of each gradient."""
        return tuple(shape.numel() for shape in self.shapes)

    @cached_property
    def numel(self) -> int:
        """Elements of the whole bucket, ``n``."""
        return sum(self.numels)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each gradient begins in the bucket."""
        return tuple(accumulate(self.numels, initial=0))[:-1]

    @cached_property
    def matrix_sides(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of each gradient as a matrix: its outermost dimension in memory by all the others.

        So that every matrix is a contiguous part of the bucket, whatever its strides. A convolution's kernel is
        output channels by the rest, also in the channels-last format. ``(numel, 1)`` below two dimensions.
        """
        sides = []
        for shape, stride, numel in zip(self.shapes, self.strides, self.numels, strict=True):
            outermost = max(range(len(shape)), key=lambda dim: (shape[dim] > 1, stride[dim]), default=0)
            rows = shape[outermost] if len(shape) > 1 and numel else numel
            sides.append((rows, numel // rows if rows else 1))
        return tuple(sides)

    def split(self, flat: Tensor) -> list[Tensor]:
        """Returns one view of ``flat`` ``(n,)`` for each gradient, in its shape."""
        parts = zip(flat.split(self.numels), self.shapes, self.strides, strict=True)
        return [part.as_strided(shape, stride) for part, shape, stride in parts]


def as_real(x: Tensor) -> Tensor:
    """Returns a complex tensor as pairs of real numbers, ``(..., 2)``, as DDP has it in buckets; others as they are."""
    return torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x


def _bucket_stride(x: Tensor) -> tuple[int, ...]:
    """Returns the strides of ``x`` if it fills its memory without gaps or overlap, else those of a contiguous one."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        if stride != expected:
            return torch.empty(x.shape, device="meta").stride()
        expected *= size
    return x.stride()


Rounds = Generator[Pending, Tensor, None]


def finish(rounds: Rounds, pending: Pending | None = None) -> None:
    """Drives the rounds of a compressor to their end, from their first collective or from one that is under way."""
    with suppress(StopIteration):
        pending = next(rounds) if pending is None else pending
        while True:
            pending = rounds.send(pending.wait())


def in_pieces(
    flat: Tensor,
    residual: Tensor | None,
    channel: Channel,
    multiple: int,
    rounds: Callable[[Tensor, Tensor | None, Channel], Rounds],
) -> Rounds:
    """Runs the rounds of one piece of a bucket after another, two pieces at a time.

    While one piece is on the wire, the next one is computed. For compressors that treat every piece as they treat the
    whole: ``rounds`` gets the gradients of a piece, their residual, and a channel. All pieces but the last have a
    ``multiple`` of elements. All ranks start the same collectives in the same order. On CUDA a bucket stays whole:
    there whole buckets overlap, on two streams.
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


@dataclass(frozen=True, kw_only=True)
class Claims:
    """What a compressor's class knows about it. Others ask for this, instead of keeping lists of compressors.

    The laws (``commopt selftest``, and the tests) hold it to the first four.

    Attributes:
        is_lossy: the average can differ from that of a plain all-reduce by more than rounding in the same dtype.
        error_bound: the error of one average stays below this: its 2-norm over that of the exact average. It is about
            independent, normally distributed gradients of two to four ranks, and no residual. 1.0 is the error of
            sending nothing. Lossy compressors must declare it.
        untracked_error: what neither the averages nor the residual hold stays below this, in the unit of
            ``error_bound``, a step. The default has room for rounding in float32.
        keeps_residual: its state holds a residual: what a step left out, and a later one sends.
        has_c_kernels: its arithmetic has a C form for CPU, which is compiled when gradient sync is set up.
        is_part: made to stand inside another compressor: no strategy is named after it.
        is_recommended: predictions try it, and summaries recommend it where it would be faster.
    """

    is_lossy: bool = True
    error_bound: float | None = None
    untracked_error: float = 1e-5
    keeps_residual: bool = False
    has_c_kernels: bool = False
    is_part: bool = False
    is_recommended: bool = False


class Compressor(ABC):
    """Settings of one way to average a bucket; what changes from step to step lives in its state.

    Concrete compressors are frozen dataclasses, compared by value, and final: to change one, wrap it. Those with fast
    kernels also have ``reference(shares, layout, state)``, in a few lines of plain torch: the average of ``shares``
    ``(W, n)``, gradients plus residuals, and what was sent of each. The laws compare the two.
    """

    @property
    def claims(self) -> Claims:
        """What others need to know of it. ``claims = Claims(error_bound=0.9)`` in the class will do."""
        return Claims()

    def init(self, layout: Layout, device: torch.device, step: int = 0) -> State:
        """Returns the state for one bucket, equal on every rank; empty unless a compressor overrides this.

        Args:
            layout: what the bucket holds.
            device: where its gradients are.
            step: steps that were made before this one, under whatever layout.
        """
        return {}

    @abstractmethod
    def rounds(
        self, flat: Tensor, layout: Layout, state: State, channel: Channel, residual: Tensor | None = None
    ) -> Rounds:
        """Replaces gradients by their average over the ranks; yields one collective at a time, receives its result.

        Every rank must yield the same collectives in the same order, whatever its gradients are. Afterwards all
        ranks hold the same bits, as far as their processors and libraries compute alike.

        Args:
            flat: ``(n,)`` this rank's gradients; holds the average afterwards.
            layout: what ``flat`` holds.
            state: from `init`; updated in place.
            channel: collectives over the ranks.
            residual: ``(n,)`` what earlier steps left out of this rank's share; may have another floating-point
                dtype. It is added to the gradients, and then holds, completed by the method `residual`, what this step
                in turn left out: nothing, if the state keeps a residual itself. As before, up to rounding, where the
                average is not finite. None to drop what is left out.
        """

    def why_idle(self, layout: Layout) -> str | None:
        """Returns why it sends all of such a bucket as it is, in a few words; None if it does not.

        Compressors for which that depends on the bucket override this.
        """
        return None

    @abstractmethod
    def wire_bytes(self, layout: Layout, world_size: int) -> int:
        """Returns the bytes that `rounds` hands to its channel in one call, once it compresses."""

    def residual(self, layout: Layout, state: State, given: Tensor | None = None) -> Tensor | None:
        """Returns ``(n,)`` what this rank has not sent yet; None if it is not kept.

        A compressor that defers its residual update to the next step, or that keeps a residual in its state, overrides
        this.

        Args:
            layout: what the bucket holds.
            state: from the last `rounds`; updated in place.
            given: the residual that `rounds` was given, completed in place; None for the one in the state.
        """
        return given
