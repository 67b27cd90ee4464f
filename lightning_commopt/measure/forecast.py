"""Forecast: what another setting would make of a step, as predictions write it and verdicts read it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lightning_commopt.measure.runs.files import PREDICTION_FILE


class Forecast(NamedTuple):
    """The predicted step with another setting."""

    setting: str  # to write, such as ``comm_hook="int8"``
    is_lossy: bool  # whether it changes gradients
    error_bound: float  # of one average, see `Claims`
    step_s: float  # predicted, for as many samples as a step has now
    low_s: float  # of the 95 % interval
    high_s: float  # of it
    note: str = ""  # what else changes; empty if nothing does

    def speedup_text(self, step_s: float) -> str:
        """Returns how many times as fast it is as a step that takes ``step_s``.

        >>> Forecast('comm_hook="int8"', True, 0.02, 0.5, 0.4, 0.625).speedup_text(1.0)
        '2.00 (1.60 to 2.50) times as fast'
        """
        return f"{step_s / self.step_s:.2f} ({step_s / self.high_s:.2f} to {step_s / self.low_s:.2f}) times as fast"


def read_forecasts(run_dir: Path) -> Sequence[Forecast]:
    """Returns those of a run; none if its fit has not ended.

    Raises:
        ValueError: the file holds something else.
    """
    path = run_dir / PREDICTION_FILE
    if not path.exists():
        return ()
    try:
        return [Forecast(*one) for one in json.loads(path.read_bytes())["forecasts"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from None
