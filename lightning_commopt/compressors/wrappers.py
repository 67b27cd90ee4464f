"""Compressors around compressors: what is lost is sent later, and a late start."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from lightning_commopt.compressors.all_reduce import UNCOMPRESSED
from lightning_commopt.compressors.base import Compressor, Layout, Rounds, State
from lightning_commopt.compressors.kernels.chunks import wide_dtype
from lightning_commopt.compressors.registry import compressor_name, register_compressor
from lightning_commopt.text.validation import check_choice, check_integer, check_switch

if TYPE_CHECKING:
    from lightning_commopt.compressors.channel import Channel


@dataclass(frozen=True, kw_only=True)
class Wrapper(Compressor):
    """A compressor around another one, as lossy as that is.

    Attributes:
        inner: what it wraps; its state is ``state["inner"]``.

    Raises:
        ValueError: ``inner`` is not a compressor.
    """

    inner: Compressor

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Compressor):
            raise ValueError(f"inner must be a compressor, got {self.inner!r}")

    @property
    def is_lossy(self) -> bool:
        return self.inner.is_lossy

    @property
    def error_bound(self) -> float | None:
        return self.inner.error_bound

    @property
    def untracked_error(self) -> float:
        return self.inner.untracked_error

    @property
    def has_c_kernels(self) -> bool:
        return self.inner.has_c_kernels

    @property
    def keeps_residual(self) -> bool:
        return self.inner.keeps_residual

    def wire_bytes(self, layout: Layout, world_size: int) -> int:
        return self.inner.wire_bytes(layout, world_size)


def _residual_owner(compressor: Compressor) -> Compressor:
    """Returns the part of a composition that keeps the residual."""
    while isinstance(compressor, Wrapper) and not isinstance(compressor, ErrorFeedback):
        compressor = compressor.inner
    return compressor


@register_compressor("error_feedback")
@final
@dataclass(frozen=True, kw_only=True)
class ErrorFeedback(Wrapper):
    """Adds what ``inner`` dropped in the last step to what it sends in this one.

    Where the average of a bucket, or of a piece of it, is not finite, the residual stays as it was, on every rank: a
    gradient scaler skips the step, and overflowed values are discarded. The residual is in the units of the
    gradients it came from; when a gradient scaler changes its scale, the residual of one step is added at the old
    scale. Where DDP discards an average, because no rank used the parameter in that step
    (``find_unused_parameters``), what was sent of its residual is lost.

    Attributes:
        inner: the lossy compressor.
        residual_dtype: "float32", or "bfloat16" for half the memory; what that rounds off is lost.

    Raises:
        ValueError: ``inner`` is not a compressor, or ``residual_dtype`` is neither.

    Source: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019,
    algorithm 2, before the optimizer instead of after it (as in PowerSGD's algorithm 2).
    """

    residual_dtype: str = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("residual_dtype", self.residual_dtype, ("float32", "bfloat16"))
        if self.inner.keeps_residual:
            its_owner = _residual_owner(self.inner)
            name, is_option = compressor_name(its_owner), hasattr(its_owner, "error_feedback")
            raise ValueError(
                f"'error_feedback' cannot be around {name!r}, which keeps a residual of its own:"
                f" {f'give {name!r} error_feedback=False, or' if is_option else 'use one of the two:'} leave out the"
                " outer 'error_feedback'"
            )

    @property
    def keeps_residual(self) -> bool:
        return True

    @property
    def untracked_error(self) -> float:
        """That of ``inner``, and what the dtype of the residual rounds off."""
        rounding = 0.0 if self.residual_dtype == "float32" else torch.finfo(torch.bfloat16).eps / 2
        return self.inner.untracked_error + rounding

    def init(self, layout: Layout, device: torch.device, step: int = 0) -> State:
        dtype = wide_dtype(layout.dtype) if self.residual_dtype == "float32" else torch.bfloat16
        residual = torch.zeros(layout.numel, dtype=dtype, device=device)
        return {"residual": residual, "inner": self.inner.init(layout, device, step)}

    def rounds(
        self, flat: Tensor, layout: Layout, state: State, channel: Channel, residual: Tensor | None = None
    ) -> Rounds:
        """Runs the rounds of ``inner`` with the residual; one from outside is sent along."""
        if residual is not None:
            state["residual"].add_(residual)
            residual.zero_()
        yield from self.inner.rounds(flat, layout, state["inner"], channel, state["residual"])

    def residual(self, layout: Layout, state: State) -> Tensor | None:
        self.inner.flush(layout, state["inner"], state["residual"])
        return state["residual"]

    def add_residual(self, layout: Layout, state: State, residual: Tensor) -> bool:
        state["residual"].add_(residual)
        return True


@register_compressor("after_steps")
@final
@dataclass(frozen=True, kw_only=True)
class AfterSteps(Wrapper):
    """Averages without compression in the first ``start_step`` steps, then as ``inner`` does.

    Attributes:
        inner: the compressor that takes over.
        start_step: the first step in which it compresses, counted from 0.

    Raises:
        ValueError: ``inner`` is not a compressor, or ``start_step`` is negative.
    """

    start_step: int

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

    def flush(self, layout: Layout, state: State, residual: Tensor) -> None:
        self.inner.flush(layout, state["inner"], residual)

    def residual(self, layout: Layout, state: State) -> Tensor | None:
        return self.inner.residual(layout, state["inner"])

    def add_residual(self, layout: Layout, state: State, residual: Tensor) -> bool:
        return self.inner.add_residual(layout, state["inner"], residual)


def with_feedback(inner: Compressor, error_feedback: bool, residual_dtype: str) -> Compressor:
    """Returns ``inner`` in `ErrorFeedback`, or as it is where no ``error_feedback`` is wanted.

    Raises:
        ValueError: ``error_feedback`` is not a boolean, or ``residual_dtype`` is out of range.
    """
    check_switch("error_feedback", error_feedback)
    return ErrorFeedback(inner=inner, residual_dtype=residual_dtype) if error_feedback else inner


class Preset(Compressor):
    """Delegates to the compressor built from its settings."""

    def __post_init__(self) -> None:
        self.compressor  # noqa: B018 - its parts check their settings

    @abstractmethod
    def _build(self) -> Compressor:
        """Returns the algorithm in its wrappers."""

    def _settings_for(self, part: type[Compressor]) -> dict[str, Any]:
        """Returns the values of all settings of ``part``, each of which this compressor has under the same name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(part)}  # type: ignore[arg-type]

    @cached_property
    def compressor(self) -> Compressor:
        """The compressor built from these settings."""
        return self._build()

    @property
    def is_lossy(self) -> bool:
        return self.compressor.is_lossy

    @property
    def error_bound(self) -> float | None:
        return self.compressor.error_bound

    @property
    def untracked_error(self) -> float:
        return self.compressor.untracked_error

    @property
    def has_c_kernels(self) -> bool:
        return self.compressor.has_c_kernels

    @property
    def keeps_residual(self) -> bool:
        return self.compressor.keeps_residual

    def init(self, layout: Layout, device: torch.device, step: int = 0) -> State:
        return self.compressor.init(layout, device, step)

    def rounds(
        self, flat: Tensor, layout: Layout, state: State, channel: Channel, residual: Tensor | None = None
    ) -> Rounds:
        return (yield from self.compressor.rounds(flat, layout, state, channel, residual))

    def flush(self, layout: Layout, state: State, residual: Tensor) -> None:
        self.compressor.flush(layout, state, residual)

    def wire_bytes(self, layout: Layout, world_size: int) -> int:
        """Returns what is sent once the compression has started."""
        return self.compressor.wire_bytes(layout, world_size)

    def residual(self, layout: Layout, state: State) -> Tensor | None:
        return self.compressor.residual(layout, state)

    def add_residual(self, layout: Layout, state: State, residual: Tensor) -> bool:
        return self.compressor.add_residual(layout, state, residual)
