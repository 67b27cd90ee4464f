"""Where the numbers of `CommTimeMonitor` go: loggers, ``trainer.callback_metrics`` and files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_commopt.cost.basis import Basis
from lightning_commopt.measure.files import StepWriter, rank_file
from lightning_commopt.measure.forecast import Forecast
from lightning_commopt.measure.link.model import LinkModel
from lightning_commopt.measure.recorder import RecordedStep
from lightning_commopt.measure.runs.files import LINK_MODEL_FILE
from lightning_commopt.text.validation import warn

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.loggers import Logger

PREFIX = "comm_time/"

LOGGED_BY_DEFAULT = (
    *("step_s", "data_s", "comm_s", "exposed_s", "exposed_share", "exposed_wait_s"),
    *("wire_bytes", "bus_bandwidth", "link_latency_s", "link_bandwidth", "samples_per_s", "straggler_rank"),
)
"""The metrics for loggers with ``log="default"``."""


class MetricPublisher:
    """Publishes metrics under ``comm_time/``.

    Args:
        publishes_all: publish every metric, else those in `LOGGED_BY_DEFAULT`.
        is_shared: whether all ranks have the same metrics; callbacks get no others.
    """

    def __init__(self, *, publishes_all: bool, is_shared: bool) -> None:
        self._publishes_all = publishes_all
        self._is_shared = is_shared
        self._failed_loggers: list[Logger] = []

    def share(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Puts metrics into ``trainer.callback_metrics``."""
        if self._is_shared:
            prefixed = self._with_prefix(metrics)
            trainer.callback_metrics.update(
                {name: torch.tensor(value, device="cpu") for name, value in prefixed.items()}
            )

    def log(self, trainer: Trainer, metrics: Mapping[str, float], step: int) -> None:
        """Logs metrics with all loggers; one that fails is not used again."""
        for logger in trainer.loggers:
            if logger in self._failed_loggers:
                continue
            try:
                logger.log_metrics(self._with_prefix(metrics), step=step)
            except Exception as error:
                self._failed_loggers.append(logger)
                warn(
                    f"CommTimeMonitor: {type(logger).__name__} failed to log ({type(error).__name__}: {error});"
                    " it gets no further metrics, and training goes on."
                )

    def _with_prefix(self, metrics: Mapping[str, float]) -> dict[str, float]:
        return {
            PREFIX + name: value for name, value in metrics.items() if self._publishes_all or name in LOGGED_BY_DEFAULT
        }


class StepFiles:
    """Writes this rank's steps, and on rank 0 the link model. After a failure it warns and stops writing that file."""

    def __init__(self, folder: str | Path, header: Mapping[str, Any]) -> None:
        self._folder = Path(folder)
        self._writer = StepWriter(rank_file(folder, header["rank"]), header)
        self._saves_model = header["rank"] == 0
        self._failed: set[str] = set()

    def save_steps(self, steps: Sequence[RecordedStep]) -> None:
        for layout, group in groupby(steps, lambda step: step.layout):
            self._save("steps", partial(self._writer.write, [step.record for step in group], layout))

    def save_model(self, model: LinkModel) -> None:
        """Replaces the model."""
        if self._saves_model:
            self._save("link model", partial(model.save, self._folder / LINK_MODEL_FILE))

    def save_basis(self, basis: Basis, forecasts: Sequence[Forecast]) -> None:
        """Writes what predictions of other plans need, and what they gave."""
        self._save("prediction", partial(basis.save, self._folder, forecasts))

    def _save(self, what: str, save: Callable[[], None]) -> None:
        if what in self._failed:
            return
        try:
            save()
        except (OSError, ValueError) as error:  # a compressor without a name cannot be written
            self._failed.add(what)
            about = f"CommTimeMonitor: saving the {what} failed and stops ({error}); training goes on."
            warn(about, on_every_rank=True)
