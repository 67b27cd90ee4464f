"""Compressors around compressors: error feedback, a late start, and presets of both."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, final

import torch
from torch import Tensor

from lightning_commopt.compressors.all_reduce import UNCOMPRESSED
from lightning_commopt.compressors.base import Claims, Compressor, Layout, Rounds, State
from lightning_commopt.compressors.channel import Channel
from lightning_commopt.compressors.kernels.elementwise import wide_dtype
from lightning_commopt.compressors.registry import EXAMPLE, compressor_name, register_compressor
from lightning_commopt.text.validation import check_choice, check_integer, check_switch, warn_once

_RESIDUAL_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class Wrapper(Compressor):
    """A compressor around another one, with the claims of that one.

    Attributes:
        inner: the compressor that it wraps, whose state is ``state["inner"]``.

    Raises:
        ValueError: ``inner`` is not a compressor.
    """

    inner: Compressor = field(metadata={EXAMPLE: "bf16"})

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Compressor):
            raise ValueError(f"inner must be a compressor, got {self.inner!r}")

    @property
    def claims(self) -> Claims:
        return self.inner.claims

    def why_idle(self, layout: Layout) -> str | None:
        return self.inner.why_idle(layout)

    def wire_bytes(self, layout: Layout, world_size: int) -> int:
        return self.inner.wire_bytes(layout, world_size)

    def residual(self, layout: Layout, state: State, given: Tensor | None = None) -> Tensor | None:
        return self.inner.residual(layout, state["inner"], given)


@register_compressor("error_feedback")
@final
@dataclass(frozen=True, kw_only=True)
class ErrorFeedback(Wrapper):
    """Adds what ``inner`` left out in one step, the residual, to the gradients of the next step.

    If the average of a bucket, or of a piece of it, is not finite, the residual stays as it was on every rank, since a
    gradient scaler skips such a step. The residual has the scale of the gradients that it came from: when a gradient
    scaler changes its scale, the residual of one step is added at the old scale. With ``find_unused_parameters`` DDP
    discards the average of a parameter that no rank has used in a step, and the residual that was sent is lost.

    This differs from algorithm 2 of Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression
    Schemes", ICML 2019, in that gradients are compressed before the optimizer step, as in PowerSGD's algorithm 2, and
    not the optimizer's update after it.

    Attributes:
        inner: the lossy compressor.
        residual_dtype: "float32", or "bfloat16", which takes half the memory and loses what it rounds off.

    Raises:
        ValueError: ``inner`` is not a compressor, or keeps a residual already; or ``residual_dtype`` is another value.
    """

    residual_dtype: str = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("residual_dtype", self.residual_dtype, _RESIDUAL_DTYPES)
        if self.inner.claims.keeps_residual:
            owner = self.inner
            while isinstance(owner, Wrapper) and not isinstance(owner, ErrorFeedback):
                owner = owner.inner
            name, is_option = compressor_name(owner), hasattr(owner, "error_feedback")
            raise ValueError(
                f"'error_feedback' cannot wrap {name!r}, which keeps a residual itself:"
                f" {f'set error_feedback=False in {name!r}, or' if is_option else 'use only one of the two:'} leave out"
                " the outer 'error_feedback'"
            )

    @property
    def claims(self) -> Claims:
        """The claims of ``inner``, with a residual; a residual in bfloat16 adds a rounding error."""
        rounding = 0.0 if self.residual_dtype == "float32" else torch.finfo(torch.bfloat16).eps / 2
        claims = self.inner.claims
        return replace(claims, keeps_residual=True, untracked_error=claims.untracked_error + rounding)

    def init(self, layout: Layout, device: torch.device, step: int = 0) -> State:
        dtype = wide_dtype(layout.dtype) if self.residual_dtype == "float32" else torch.bfloat16
        residual = torch.zeros(layout.numel, dtype=dtype, device=device)
        return {"residual": residual, "inner": self.inner.init(layout, device, step)}

    def rounds(
        self, flat: Tensor, layout: Layout, state: State, channel: Channel, residual: Tensor | None = None
    ) -> Rounds:
        """Runs the rounds of ``inner`` with the residual, to which a given one is added."""
        if residual is not None:
            state["residual"].add_(residual)
            residual.zero_()
        yield from self.inner.rounds(flat, layout, state["inner"], channel, state["residual"])

    def residual(self, layout: Layout, state: State, given: Tensor | None = None) -> Tensor | None:
        return self.inner.residual(layout, state["inner"], state["residual"])


@register_compressor("after_steps")
@final
@dataclass(frozen=True, kw_only=True)
class AfterSteps(Wrapper):
    """Averages without compression in the first ``start_step`` steps, and then with ``inner``.

    Attributes:
        inner: the compressor that takes over.
        start_step: the first step in which it compresses, counted from 0.

    Raises:
        ValueError: ``inner`` is not a compressor, or ``start_step`` is negative.
    """

    start_step: int = field(metadata={EXAMPLE: 2})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("start_step", self.start_step, at_least=0)

    def init(self, layout: Layout, device: torch.device, step: int = 0) -> State:
        return {"step": step, "inner": self.inner.init(layout, device, step)}

    def rounds(
        self, flat: Tensor, layout: Layout, state: State, channel: Channel, residual: Tensor | None = None
    ) -> Rounds:
        started = state["step"] >= self.start_step
        state["step"] += 1
        if started:
            yield from self.inner.rounds(flat, layout, state["inner"], channel, residual)
        else:
            yield from UNCOMPRESSED.rounds(flat, layout, {}, channel, residual)


class Preset(Compressor):
    """An algorithm within `ErrorFeedback`, and within `AfterSteps` if it has a ``start_step``.

    Concrete presets have the settings of their algorithm as fields, and the following.

    Attributes:
        algorithm: class of the compressor inside.
        error_feedback: whether a later step sends what a step left out.
        residual_dtype: dtype of what a later step sends, "float32" or "bfloat16".
        start_step: number of uncompressed steps at the start; not all presets have it.

    Raises:
        ValueError: a setting is out of range.
    """

    algorithm: ClassVar[type[Compressor]]
    error_feedback: bool
    residual_dtype: str

    def __post_init__(self) -> None:
        self.compressor  # noqa: B018 - creating its parts checks their settings

    @cached_property
    def compressor(self) -> Compressor:
        """The algorithm in its wrappers."""
        settings = {field.name for field in dataclasses.fields(self.algorithm)}  # type: ignore[arg-type]
        inner = self.algorithm(**{name: getattr(self, name) for name in settings})
        check_switch("error_feedback", self.error_feedback)
        if self.error_feedback:
            inner = ErrorFeedback(inner=inner, residual_dtype=self.residual_dtype)
        elif self.residual_dtype != ErrorFeedback.residual_dtype:
            check_choice("residual_dtype", self.residual_dtype, _RESIDUAL_DTYPES)
            warn_once(f"residual_dtype={self.residual_dtype!r} has no effect with error_feedback=False")
        return AfterSteps(inner=inner, start_step=self.start_step) if hasattr(self, "start_step") else inner

    @property
    def claims(self) -> Claims:
        return replace(self.compressor.claims, is_part=False)

    def init(self, layout: Layout, device: torch.device, step: int = 0) -> State:
        return self.compressor.init(layout, device, step)

    def rounds(
        self, flat: Tensor, layout: Layout, state: State, channel: Channel, residual: Tensor | None = None
    ) -> Rounds:
        return (yield from self.compressor.rounds(flat, layout, state, channel, residual))

    def why_idle(self, layout: Layout) -> str | None:
        return self.compressor.why_idle(layout)

    def wire_bytes(self, layout: Layout, world_size: int) -> int:
        return self.compressor.wire_bytes(layout, world_size)

    def residual(self, layout: Layout, state: State, given: Tensor | None = None) -> Tensor | None:
        return self.compressor.residual(layout, state, given)


def start_step_of(compressor: Compressor | None) -> int:
    """Returns ``start_step`` of the outermost compressor that has one; 0 if none has."""
    while compressor is not None and not hasattr(compressor, "start_step"):
        compressor = getattr(compressor, "inner", None)
    return getattr(compressor, "start_step", 0)
