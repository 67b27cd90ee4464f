"""Publishes the metrics of `CommTimeMonitor` to loggers and ``trainer.callback_metrics``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

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
