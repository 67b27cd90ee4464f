"""The loss scale of float16 training, on which ranks that train independently agree in their exchanges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def loss_scale(precision: object) -> float:
    """Returns the scale of a precision plugin's gradient scaler; 0 without one."""
    scaler = getattr(precision, "scaler", None)
    return 0.0 if scaler is None else float(scaler.get_scale())


def agree_on_loss_scale(precision: object, scales: Sequence[float]) -> None:
    """Sets this rank's gradient scaler to the smallest scale of all ranks.

    Scales drift apart because a rank that skips a step for infinite gradients lowers its scale by itself.
    """
    scaler: Any = getattr(precision, "scaler", None)
    if scaler is not None and min(scales) != max(scales):
        scaler.update(min(scales))
