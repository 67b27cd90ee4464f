"""A CUDA profiler that captures whole optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from lightning_commopt.callbacks.phases import batch_follows
from lightning_commopt.callbacks.speed import StepClock
from lightning_commopt.compat.lightning import (
    Callback,
    MisconfigurationException,
    batches_that_stepped,
    will_accumulate,
)
from lightning_commopt.text.validation import check_integer, info, warn, warn_once

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class ProfiledWindow(StepClock):
    """A captured range of whole steps from ``start_step`` on, timed on this rank.

    The time includes waiting for data, and validation within the range.
    """

    def __init__(self, start_step: int) -> None:
        super().__init__()
        self.start_step = start_step

    def __str__(self) -> str:
        samples = "" if self.samples_per_s is None else f", {self.samples_per_s:.5g} samples/s"
        last = self.start_step + self.num_steps - 1
        return f"steps {self.start_step} to {last} took {self.seconds:.4g} s: {self.steps_per_s:.4g} steps/s{samples}"


class CUDAProfilerWindow(Callback):
    """Starts and stops the CUDA profiler around optimizer steps, for ``nsys profile --capture-range=cudaProfilerApi``.

    A window begins when the previous step, validation or epoch has ended, before the wait for the first batch, and ends
    with its last step. With accumulation it includes all batches of its steps. All ranks time the window, and
    synchronize the device only at its beginning and end. In a fit that resumes in the middle of an epoch, a window that
    begins with the first batch excludes the wait for it.

    By default ``nsys`` ends the training with the first window: ``--capture-range-end=stop`` lets it continue, and
    ``--capture-range-end=repeat`` creates a report of every window.

    If a fit begins after the first step of a window, as a resumed one may, the window is skipped with a warning.
    Without CUDA nothing is profiled or timed; a warning is printed once.

    Args:
        start_step: first optimizer step of the window, counted from 0 as loggers do, or of several windows.
        num_steps: optimizer steps in each window.
        ranks: ranks that profile; None for all.

    Attributes:
        results: the windows of the last fit, in chronological order.

    Raises:
        ValueError: a value is out of range, or windows overlap.
    """

    def __init__(
        self, start_step: int | Sequence[int] = 10, num_steps: int = 3, ranks: Sequence[int] | None = None
    ) -> None:
        check_integer("num_steps", num_steps, at_least=1)
        self._num_steps = num_steps
        self._start_steps = _check_starts(start_step, num_steps)
        self._ranks = None if ranks is None else _check_ranks(ranks)
        self._started_or_skipped: set[int] = set()  # first steps of windows
        self.results: list[ProfiledWindow] = []
        self._open: ProfiledWindow | None = None
        self._is_active = False
        self._profiles = False
        self._has_checked = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        unknown = [rank for rank in self._ranks or () if rank >= trainer.world_size]
        if unknown:
            raise MisconfigurationException(
                f"ranks must be below the number of ranks, {trainer.world_size}, got {', '.join(map(str, unknown))}"
            )
        self._stop(trainer)
        self.results = []
        self._has_checked = False
        self._profiles = self._ranks is None or trainer.global_rank in self._ranks
        self._is_active = _uses_cuda(trainer)
        if not self._is_active:
            warn_once("CUDAProfilerWindow has no effect: this training uses no CUDA device.")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # While an epoch is resumed, Lightning has not yet corrected its count of steps.
        if not trainer.fit_loop.epoch_loop.restarting:
            self._check_starts(trainer)
            self._start(trainer, batches_that_stepped(trainer))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._check_starts(trainer)
        self._start(trainer, batches_that_stepped(trainer))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._is_active:
            return
        step = _steps_after_batch(trainer)
        if self._open is not None:
            self._open.count_batch(trainer, batch, has_stepped=step > self._open.start_step + self._open.num_steps)
            if self._open.num_steps == self._num_steps:
                self._stop(trainer)
        if step in self._start_steps and batch_follows(trainer):
            self._start(trainer, step)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking and batch_follows(trainer):
            self._start(trainer, _steps_after_batch(trainer))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop(trainer)
        never = [start for start in self._start_steps if start not in self._started_or_skipped]
        if self._is_active and never:
            warn(
                f"start_step: training ended after {batches_that_stepped(trainer)} steps, so the CUDA profiler was not"
                f" started at step {', '.join(map(str, never))}."
            )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._open is not None:
            # Unlike `_stop`, this must not wait for the device, which may have failed.
            self._open = None
            self._stop_profiler()

    def _check_starts(self, trainer: Trainer) -> None:
        if self._has_checked or not self._is_active:
            return
        self._has_checked = True
        step = batches_that_stepped(trainer)
        self._started_or_skipped = {start for start in self._started_or_skipped if start < step}
        passed = [start for start in self._start_steps if start < step and start not in self._started_or_skipped]
        if passed:
            self._started_or_skipped.update(passed)
            warn(
                f"start_step: this training begins at step {step}, so the CUDA profiler is not started at step"
                f" {', '.join(map(str, passed))}."
            )

    def _start(self, trainer: Trainer, step: int) -> None:
        if not self._is_active or self._open is not None or step not in self._start_steps:
            return
        torch.cuda.synchronize(trainer.strategy.root_device)
        if self._profiles:
            torch.cuda.cudart().cudaProfilerStart()
        self._started_or_skipped.add(step)
        self._open = ProfiledWindow(step)
        self._open.start_clock()

    def _stop(self, trainer: Trainer) -> None:
        if self._open is None:
            return
        torch.cuda.synchronize(trainer.strategy.root_device)
        window, self._open = self._open, None
        window.stop_clock()
        self._stop_profiler()
        if window.num_steps:
            self.results.append(window)
            info(f"CUDA profiler: {window}")

    def _stop_profiler(self) -> None:
        if self._profiles:
            torch.cuda.cudart().cudaProfilerStop()


def _uses_cuda(trainer: Trainer) -> bool:
    return trainer.strategy.root_device.type == "cuda"


def _steps_after_batch(trainer: Trainer) -> int:
    """Returns the loggers' step number including the batch that ends, which Lightning counts only after validation."""
    return batches_that_stepped(trainer) + (not will_accumulate(trainer))


def _check_starts(start_step: int | Sequence[int], num_steps: int) -> tuple[int, ...]:
    is_several = isinstance(start_step, Sequence) and not isinstance(start_step, str)
    starts: list[Any] = list(start_step) if is_several else [start_step]  # type: ignore[arg-type]
    for start in starts:
        check_integer("start_step", start, at_least=0)
    if not starts:
        raise ValueError(f"start_step must name at least one step, got {start_step!r}")
    starts.sort()
    for first, second in pairwise(starts):
        if second - first < num_steps:
            raise ValueError(
                f"start_step: windows must not overlap, so their first steps must be at least num_steps={num_steps}"
                f" apart, got {first} and {second}"
            )
    return tuple(map(int, starts))


def _check_ranks(ranks: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(ranks, Sequence) or isinstance(ranks, str) or not ranks:
        raise ValueError(f"ranks must be a list of at least one rank, or None for all, got {ranks!r}")
    for rank in ranks:
        check_integer("ranks", rank, at_least=0)
    return tuple(map(int, ranks))
