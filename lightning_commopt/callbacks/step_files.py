"""Writes the files of `CommTimeMonitor`; a disk that fails does not end training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from lightning_commopt.cost.basis import Basis
from lightning_commopt.measure.files import StepWriter, rank_file
from lightning_commopt.measure.forecast import Forecast
from lightning_commopt.measure.link.model import LinkModel
from lightning_commopt.measure.recorder import RecordedStep
from lightning_commopt.measure.runs.files import LINK_MODEL_FILE
from lightning_commopt.text.validation import warn


class StepFiles:
    """Writes this rank's steps, and on rank 0 the link model. After a failure it warns and stops writing that file.

    Args:
        folder: the run's directory.
        header: of the rank; see `StepWriter`.
    """

    def __init__(self, folder: str | Path, header: Mapping[str, Any]) -> None:
        self._folder = Path(folder)
        self._writer: StepWriter | None = StepWriter(rank_file(folder, header["rank"]), header)
        self._model_path = Path(folder) / LINK_MODEL_FILE if header["rank"] == 0 else None

    def save_steps(self, steps: Sequence[RecordedStep]) -> None:
        if self._writer is None:
            return
        try:
            for layout, group in groupby(steps, lambda step: step.layout):
                self._writer.write([step.record for step in group], layout)
        except OSError as error:
            self._writer = None
            _warn("steps", error)

    def save_model(self, model: LinkModel) -> None:
        """Replaces the model."""
        if self._model_path is None:
            return
        try:
            model.save(self._model_path)
        except OSError as error:
            self._model_path = None
            _warn("link model", error)

    def save_basis(self, basis: Basis, forecasts: Sequence[Forecast]) -> None:
        """Writes what predictions of other plans need, and what they gave."""
        try:
            basis.save(self._folder, forecasts)
        except (OSError, ValueError) as error:  # a compressor without a name cannot be written
            _warn("prediction", error)


def _warn(what: str, error: Exception) -> None:
    warn(f"CommTimeMonitor: saving the {what} failed and stops ({error}); training goes on.", on_every_rank=True)
