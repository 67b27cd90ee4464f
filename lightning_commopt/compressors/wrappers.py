"""Compressors around compressors: what is lost is sent later, a late start, a size threshold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from lightning_commopt.compressors.all_reduce import AllReduce
from lightning_commopt.compressors.base import Averaged, Compressor, Layout, Rounds, State
from lightning_commopt.compressors.settings import check_integer

if TYPE_CHECKING:
    from lightning_commopt.channel import Channel

_UNCOMPRESSED = AllReduce()


def _check_inner(inner: Compressor) -> None:
    if not isinstance(inner, Compressor):
        raise ValueError(f"inner must be a compressor, got {inner!r}")


@final
@dataclass(frozen=True, kw_only=True)
class ErrorFeedback(Compressor):
    """Adds what ``inner`` dropped in the last step to what it sends in this one.

    A step whose average is not finite leaves the residual as it was, on every rank: a gradient scaler skips the
    step, and nothing of it remains. The residual is in the units of the gradients it came from; when a gradient
    scaler changes its scale, the residual of one step is added at the old scale. Where DDP discards an average,
    because no rank used the parameter in that step (``find_unused_parameters``), what was sent of its residual is lost.

    Attributes:
        inner: the lossy compressor.

    Raises:
        ValueError: ``inner`` is not a compressor.

    Source: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019,
    algorithm 2, before the optimizer instead of after it (as in PowerSGD's algorithm 2).
    """

    inner: Compressor

    def __post_init__(self) -> None:
        _check_inner(self.inner)

    def init(self, layout: Layout, device: torch.device, step: int = 0) -> State:
        """Returns a residual of zero and the state of ``inner``."""
        residual = torch.zeros(layout.numel, dtype=layout.dtype, device=device)
        return {"residual": residual, "inner": self.inner.init(layout, device, step)}

    def rounds(self, flat: Tensor, layout: Layout, state: State, channel: Channel) -> Rounds:
        """Runs the rounds of ``inner`` on the gradients plus the residual."""
        residual = state["residual"]
        corrected = flat + residual
        averaged = yield from self.inner.rounds(corrected, layout, state["inner"], channel)
        kept = averaged.mean.isfinite().all()  # the same on every rank, as the mean is
        if averaged.own is None:
            state["residual"] = torch.where(kept, torch.zeros_like(residual), residual)
            return Averaged(averaged.mean, lambda: flat + residual)
        share = averaged.own()
        state["residual"] = torch.where(kept, corrected.sub_(share), residual)
        return Averaged(averaged.mean, lambda: share)

    def wire_bytes(self, layout: Layout, world_size: int) -> int:
        """Returns what ``inner`` sends."""
        return self.inner.wire_bytes(layout, world_size)

    def residual(self, layout: Layout, state: State) -> Tensor | None:
        """Returns the residual."""
        return state["residual"]

    def take_over(self, layout: Layout, state: State, owed: Tensor) -> bool:
        """Adds what is owed to the residual."""
        state["residual"].add_(owed)
        return True


@final
@dataclass(frozen=True, kw_only=True)
class AfterSteps(Compressor):
    """Averages without compression in the first ``start_step`` exchanges, then as ``inner`` does.

    Attributes:
        inner: the compressor that takes over.
        start_step: the first exchange that it makes, counted from 0.

    Raises:
        ValueError: ``inner`` is not a compressor, or ``start_step`` is negative.
    """

    inner: Compressor
    start_step: int

    def __post_init__(self) -> None:
        _check_inner(self.inner)
        check_integer("start_step", self.start_step, at_least=0)

    def init(self, layout: Layout, device: torch.device, step: int = 0) -> State:
        """Returns the count of exchanges and the state of ``inner``."""
        return {"step": step, "inner": self.inner.init(layout, device, step)}

    def rounds(self, flat: Tensor, layout: Layout, state: State, channel: Channel) -> Rounds:
        """Runs either the uncompressed round or those of ``inner``."""
        started = state["step"] >= self.start_step
        state["step"] += 1
        if started:
            return (yield from self.inner.rounds(flat, layout, state["inner"], channel))
        return (yield from _UNCOMPRESSED.rounds(flat, layout, {}, channel))

    def wire_bytes(self, layout: Layout, world_size: int) -> int:
        """Returns what ``inner`` sends."""
        return self.inner.wire_bytes(layout, world_size)

    def residual(self, layout: Layout, state: State) -> Tensor | None:
        """Returns the residual of ``inner``."""
        return self.inner.residual(layout, state["inner"])

    def take_over(self, layout: Layout, state: State, owed: Tensor) -> bool:
        """Adds what is owed to the residual of ``inner``."""
        return self.inner.take_over(layout, state["inner"], owed)


@final
@dataclass(frozen=True, kw_only=True)
class BySize(Compressor):
    """Compresses only the gradients of at least ``min_numel`` elements; the others are averaged as they are.

    Attributes:
        inner: the compressor for the large ones.
        min_numel: elements that make a gradient large.

    Raises:
        ValueError: ``inner`` is not a compressor, or ``min_numel`` is below 1.
    """

    inner: Compressor
    min_numel: int

    def __post_init__(self) -> None:
        _check_inner(self.inner)
        check_integer("min_numel", self.min_numel, at_least=1)

    def init(self, layout: Layout, device: torch.device, step: int = 0) -> State:
        """Returns the state of ``inner`` for the large gradients."""
        return {"inner": self.inner.init(layout.select(self._is_large(layout)), device, step)}

    def rounds(self, flat: Tensor, layout: Layout, state: State, channel: Channel) -> Rounds:
        """Runs the rounds of ``inner`` on the large gradients, then one for the small."""
        is_large = self._is_large(layout)
        if all(is_large):
            return (yield from self.inner.rounds(flat, layout, state["inner"], channel))
        own_of_large = large_mean = None
        if any(is_large):
            large = _gather(flat, layout, is_large)
            large_mean, own_of_large = yield from self.inner.rounds(
                large, layout.select(is_large), state["inner"], channel
            )
        small = _gather(flat, layout, [not yes for yes in is_large])
        small_mean = yield channel.all_reduce(small * (1 / channel.size))
        mean = _scatter(layout, is_large, large_mean, small_mean)
        if own_of_large is None:
            return Averaged(mean, own=None)
        return Averaged(mean, lambda: _scatter(layout, is_large, own_of_large(), small))

    def wire_bytes(self, layout: Layout, world_size: int) -> int:
        """Returns what ``inner`` sends for the large gradients and the bytes of the small ones."""
        is_large = self._is_large(layout)
        sent = self.inner.wire_bytes(layout.select(is_large), world_size) if any(is_large) else 0
        return sent + _UNCOMPRESSED.wire_bytes(layout.select([not yes for yes in is_large]), world_size)

    def residual(self, layout: Layout, state: State) -> Tensor | None:
        """Returns the residual of ``inner``, zero at the small gradients."""
        is_large = self._is_large(layout)
        of_large = self.inner.residual(layout.select(is_large), state["inner"])
        if of_large is None:
            return None
        nothing = of_large.new_zeros(layout.select([not yes for yes in is_large]).numel)
        return _scatter(layout, is_large, of_large, nothing)

    def take_over(self, layout: Layout, state: State, owed: Tensor) -> bool:
        """Adds what is owed for the large gradients to the residual of ``inner``."""
        is_large = self._is_large(layout)
        return self.inner.take_over(layout.select(is_large), state["inner"], _gather(owed, layout, is_large))

    def _is_large(self, layout: Layout) -> list[bool]:
        return [numel >= self.min_numel for numel in layout.numels]


def _gather(flat: Tensor, layout: Layout, mask: list[bool]) -> Tensor:
    """Returns the selected gradients of a bucket, one behind the other; a copy."""
    return torch.cat([flat[:0], *(part for part, yes in zip(flat.split(layout.numels), mask, strict=True) if yes)])


def _scatter(layout: Layout, mask: list[bool], selected: Tensor | None, others: Tensor) -> Tensor:
    """Returns ``(n,)`` the bucket whose selected gradients, and the others, these are."""
    of_selected = iter(selected.split(layout.select(mask).numels) if selected is not None else ())
    of_others = iter(others.split(layout.select([not yes for yes in mask]).numels))
    return torch.cat([next(of_selected if yes else of_others) for yes in mask])
