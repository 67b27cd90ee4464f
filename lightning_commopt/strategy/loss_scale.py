"""The scale of the loss, where gradients are scaled for float16: ranks that train on their own agree on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def loss_scale(precision: object) -> float:
    """Returns the scale of a precision plugin's gradient scaler; 0 without one."""
    scaler = getattr(precision, "scaler", None)
    return 0.0 if scaler is None else float(scaler.get_scale())


def agree_on_loss_scale(precision: object, scales: Sequence[float]) -> None:
    """Sets this rank's gradient scaler to the smallest scale of all, since steps may be skipped on some only."""
    scaler: Any = getattr(precision, "scaler", None)
    if scaler is not None and min(scales) != max(scales):
        scaler.update(min(scales))
