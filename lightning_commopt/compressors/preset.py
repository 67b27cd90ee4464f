"""Compressors composed of others, under one name and with one set of settings."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_commopt.compressors.base import Compressor, Layout, Rounds, State
from lightning_commopt.compressors.wrappers import ErrorFeedback
from lightning_commopt.text.validation import check_switch

if TYPE_CHECKING:
    from lightning_commopt.compressors.channel import Channel


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
