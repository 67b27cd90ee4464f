"""Validations after some time, as with ``val_check_interval="00:15:00"``; see `lightning_commopt.compat`.

Lightning 2.6 and later let each rank's own clock decide on them. This module wraps ``on_advance_end`` of the epoch
loop, and reads ``_val_check_time_interval`` and sets ``_last_val_time`` of the Trainer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning_commopt.compat.wrapping import wrap_method

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def decide_on_time(trainer: Trainer, decide: Callable[[bool], bool]) -> Callable[[], None]:
    """Makes a function decide on validations after some time; returns a function that undoes it.

    Args:
        trainer: a Trainer that is about to fit.
        decide: called after each batch of a Trainer that validates after some time, with whether that time is over on
            this rank's clock; returns whether to validate.
    """
    values: Any = trainer  # Lightning 2.5 has none of them

    def on_advance_end(inner: Callable[..., None], *args: Any) -> None:
        interval_s = getattr(trainer, "_val_check_time_interval", None)
        if interval_s is None:
            inner(*args)
            return
        last = values._last_val_time
        decided = values._last_val_time = -math.inf if decide(time.monotonic() - last >= interval_s) else math.inf
        try:
            inner(*args)
        finally:
            if values._last_val_time == decided:  # there was no validation
                values._last_val_time = last

    return wrap_method(trainer.fit_loop.epoch_loop, "on_advance_end", on_advance_end)
