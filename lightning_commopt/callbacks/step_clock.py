"""Counts steps, samples and seconds of a fit, for callbacks that report a speed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from lightning_commopt.callbacks.phases import samples_in

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class StepClock:
    """Counts batches while it runs. The caller synchronizes the device before starting and stopping it.

    Attributes:
        num_steps: optimizer steps. Several optimizers that step in one batch make one step.
        num_samples: of all ranks, assuming as many on each; None if the size of batches is unknown.
        seconds: of running, with waiting for data.
    """

    def __init__(self) -> None:
        self.reset_clock()

    def reset_clock(self) -> None:
        self.num_steps = 0
        self.num_samples: int | None = 0
        self.seconds = 0.0
        self._started: float | None = None

    @property
    def is_running(self) -> bool:
        return self._started is not None

    @property
    def steps_per_s(self) -> float | None:
        """Optimizer steps in a second; None before the first."""
        return self.num_steps / self.seconds if self.num_steps else None

    @property
    def samples_per_s(self) -> float | None:
        """Samples in a second, over all ranks; None before the first step."""
        return self.num_samples / self.seconds if self.num_steps and self.num_samples is not None else None

    def start_clock(self) -> None:
        self._started = time.perf_counter()

    def stop_clock(self) -> None:
        assert self._started is not None
        self.seconds += time.perf_counter() - self._started
        self._started = None

    def count_batch(self, trainer: Trainer, batch: Any, *, has_stepped: bool) -> None:
        """Counts the samples of a batch, and the step if the batch ended one."""
        num_samples = samples_in(trainer, batch)
        if self.num_samples is not None:
            self.num_samples = None if num_samples is None else self.num_samples + num_samples * trainer.world_size
        self.num_steps += has_stepped
