"""The interface of compressors, which average one flat gradient bucket over ranks, perhaps lossily.

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
"""Number of elements in a piece, 16 MiB of float32. It must be small enough for a large bucket to have several pieces.
But a thread that has waited for a piece shares its core with backward, and may get the core only milliseconds later, so
the time of a piece must be long compared with that."""

State = dict[str, Any]
"""Tensors, ints, and lists or dicts of them, which a checkpoint can hold."""


@dataclass(frozen=True)
class Layout:
    """The shapes of the gradients in a bucket, in order, their strides within it, and their dtype.

    Strides matter, because DDP lays out a gradient like its parameter, which may be channels-last or transposed.
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
        """Returns the layout of the gradients for which ``mask`` is true."""
        shapes = tuple(shape for shape, is_selected in zip(self.shapes, mask, strict=True) if is_selected)
        return Layout(
            shapes,
            tuple(stride for stride, is_selected in zip(self.strides, mask, strict=True) if is_selected),
            self.dtype,
        )

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """Number of elements of each gradient."""
        return tuple(shape.numel() for shape in self.shapes)

    @cached_property
    def numel(self) -> int:
        """Number of elements of the whole bucket, ``n``."""
        return sum(self.numels)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First element of each gradient in the bucket."""
        return tuple(accumulate(self.numels, initial=0))[:-1]

    @cached_property
    def matrix_sides(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of each gradient as a matrix: its outermost dimension in memory by all the others.

        So every matrix is a contiguous part of the bucket, whatever its strides. The kernel of a convolution has its
        output channels as rows, also in the channels-last format. Gradients of one dimension are ``(numel, 1)``.
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
    """Returns a complex tensor as pairs of real numbers, ``(..., 2)``, as in DDP's buckets; others unchanged."""
    return torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x


def _bucket_stride(x: Tensor) -> tuple[int, ...]:
    """Returns the strides of ``x`` if it fills its memory without gaps or overlap, else contiguous strides."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        if stride != expected:
            return torch.empty(x.shape, device="meta").stride()
        expected *= size
    return x.stride()


Rounds = Generator[Pending, Tensor, None]


def finish(rounds: Rounds, pending: Pending | None = None) -> None:
    """Runs the rounds of a compressor to their end, from the start or from a ``pending`` collective."""
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
    """Runs the rounds of a bucket piece by piece, so that one piece is computed while another is on the wire.

    Compressors may use it only if their result for a piece does not depend on the rest of the bucket. On CUDA a bucket
    stays whole, since there whole buckets overlap on two streams.

    Args:
        flat: ``(n,)`` the gradients of the bucket.
        residual: ``(n,)`` their residual, or None.
        channel: collectives over the ranks; two pieces at a time use its two lanes.
        multiple: each piece except the last has a multiple of this number of elements.
        rounds: creates the rounds of a piece from its gradients, its residual and a channel. All ranks must start the
            same collectives in the same order.
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
    """What a compressor's class declares about it, so that other code needs no lists of compressors.

    The laws, which ``commopt selftest`` and the tests run, verify the first four by measurement.

    Attributes:
        is_lossy: whether the average can differ from a plain all-reduce's by more than rounding in the same dtype.
        error_bound: upper bound of the relative error of one average in the 2-norm, for independent, normally
            distributed gradients of two to four ranks and no residual. Sending nothing would have the error 1.0. Lossy
            compressors must declare it.
        untracked_error: upper bound of what a step loses, that is, of what is neither in the average nor in the
            residual; relative like ``error_bound``. The default is about 100 times the epsilon of float32, to leave
            room for rounding.
        keeps_residual: whether the state holds a residual, which is what a step left out and a later step sends.
        has_c_kernels: whether it has C kernels for CPU, which are compiled when gradient sync is set up.
        is_part: whether it is meant to be used inside another compressor; then no strategy is registered for it.
        is_recommended: whether predictions try it, and summaries recommend it if it would be faster.
    """

    is_lossy: bool = True
    error_bound: float | None = None
    untracked_error: float = 1e-5
    keeps_residual: bool = False
    has_c_kernels: bool = False
    is_part: bool = False
    is_recommended: bool = False


class Compressor(ABC):
    """Settings of one way to average a bucket. What changes from step to step is in a separate state.

    Concrete compressors are frozen dataclasses that are compared by value, and final; to change one, wrap it. If a
    compressor has fast kernels, it also has ``reference(shares, layout, state)``, a few lines of plain torch that
    return the average of ``shares`` ``(W, n)``, which are gradients plus residuals, and what each rank has sent. The
    laws compare the two.
    """

    @property
    def claims(self) -> Claims:
        """What the compressor declares about itself; a class attribute ``claims = Claims(error_bound=0.9)`` will do."""
        return Claims()

    def init(self, layout: Layout, device: torch.device, step: int = 0) -> State:
        """Returns the first state for one bucket, equal on every rank. It is empty unless a compressor overrides this.

        Args:
            layout: layout of the bucket.
            device: device of its gradients.
            step: number of earlier steps, also in buckets of another layout.
        """
        return {}

    @abstractmethod
    def rounds(
        self, flat: Tensor, layout: Layout, state: State, channel: Channel, residual: Tensor | None = None
    ) -> Rounds:
        """Replaces gradients by their average over the ranks; yields one collective at a time, receives its result.

        Every rank must yield the same collectives in the same order, whatever its gradients are. Afterwards all
        ranks hold the same bits, provided that their processors, libraries and numbers of threads are the same.

        Args:
            flat: ``(n,)`` this rank's gradients; overwritten by the average.
            layout: layout of ``flat``.
            state: state from `init`; updated in place.
            channel: collectives over the ranks.
            residual: ``(n,)`` what earlier steps left out of this rank's share, of any floating-point dtype; updated
                in place. It is added to the gradients. Afterwards, once the method `residual` has completed it, it
                holds what this step left out, or zeros if the state keeps a residual itself. If the average is not
                finite, it stays as it was, up to rounding. None drops what is left out.
        """

    def why_idle(self, layout: Layout) -> str | None:
        """Returns in a few words why nothing in such a bucket would be compressed; None if something would be.

        Compressors that leave some buckets uncompressed override this.
        """
        return None

    @abstractmethod
    def wire_bytes(self, layout: Layout, world_size: int) -> int:
        """Returns the bytes that one call of `rounds` passes to its channel, as `Channel.bytes_sent` counts them.

        It assumes that compression has started; see `AfterSteps`.
        """

    def residual(self, layout: Layout, state: State, given: Tensor | None = None) -> Tensor | None:
        """Returns ``(n,)`` what this rank has not sent yet; None if it keeps no residual.

        Compressors that defer their residual update to the next step, or that keep a residual in their state, override
        this.

        Args:
            layout: layout of the bucket.
            state: state after the last `rounds`; updated in place.
            given: the residual that was passed to `rounds`, completed in place; None for the residual in the state.
        """
        return given
