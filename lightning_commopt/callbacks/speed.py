"""SpeedMonitor: optimizer steps, samples and bytes on the wire per second or step of a fit, without its warm-up."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.callbacks.steps import StepWatch
from lightning_commopt.compat.lightning import Callback, comm_hook_of, count_samples, is_lightnings_ddp
from lightning_commopt.strategy.sharding import ranks_per_batch
from lightning_commopt.sync.ddp.buckets import gradient_bytes
from lightning_commopt.text.validation import check_integer

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class StepClock:
    """Counts batches while it runs. The caller synchronizes the device before starting and stopping it.

    Attributes:
        num_steps: number of optimizer steps, see `StepWatch`; several in one batch make one step.
        num_samples: number of samples of all ranks, assuming the same number on each; samples of ranks with the same
            batches count once. None if the size of batches is unknown.
        seconds: time for which the clock has run, including waits for data; while it runs, up to the end of the last
            batch.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_samples: int | None = 0
        self.seconds = 0.0
        self._started: float | None = None

    @property
    def is_running(self) -> bool:
        return self._started is not None

    @property
    def steps_per_s(self) -> float | None:
        """Optimizer steps per second; None before the first step."""
        return self.num_steps / self.seconds if self.num_steps else None

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second, over all ranks; None before the first step, or if the size of batches is unknown."""
        return self.num_samples / self.seconds if self.num_steps and self.num_samples is not None else None

    def start_clock(self) -> None:
        self._started = time.perf_counter()

    def stop_clock(self) -> None:
        self._add_seconds()
        self._started = None

    def _add_seconds(self) -> None:
        assert self._started is not None
        now = time.perf_counter()
        self.seconds += now - self._started
        self._started = now

    def count_batch(self, trainer: Trainer, batch: Any, *, has_stepped: bool) -> None:
        """Counts the samples of a batch, its time, and the step if the batch ended one."""
        self._add_seconds()
        num_samples = count_samples(batch)
        if self.num_samples is not None:
            num_batches = trainer.world_size // ranks_per_batch(trainer.strategy)
            self.num_samples = None if num_samples is None else self.num_samples + num_samples * num_batches
        self.num_steps += has_stepped


class SpeedMonitor(StepClock, Callback):
    """Times the steps of a fit on this rank's clock.

    The clock runs from the start of the first batch after the warm-up to the end of the last batch, and pauses in
    validation and between epochs. The device is synchronized only when the clock starts or stops, so that the host may
    run ahead as it does without this callback; until it stops, the rates are those of the host. The time of a batch
    that an exception ends is not counted.

    Args:
        num_warmup_steps: optimizer steps that are not timed.

    Attributes:
        num_steps: timed optimizer steps; see `StepClock` for ``seconds``, ``steps_per_s`` and ``samples_per_s``.
        wire_bytes_per_step: payload that this rank passed to collectives for gradients. If the strategy does not count
            it, this is the size of the gradients if DDP all-reduces them unchanged, else None.

    Raises:
        ValueError: ``num_warmup_steps`` is not an integer of at least 0.
    """

    def __init__(self, *, num_warmup_steps: int = 10) -> None:
        check_integer("num_warmup_steps", num_warmup_steps, at_least=0)
        self._num_warmup_steps = num_warmup_steps
        self._steps: StepWatch | None = None  # None outside of training
        self._reset()

    def _reset(self) -> None:
        StepClock.__init__(self)
        self._wire_bytes: float | None = 0
        self._sync_bytes: int | None = None
        self._num_warmed_up = 0
        self._last_count: int | None = None  # the strategy's wire bytes when they were last added

    @property
    def wire_bytes_per_step(self) -> float | None:
        """Bytes that one rank passes to collectives in a step; None if unknown."""
        return self._wire_bytes / self.num_steps if self.num_steps and self._wire_bytes is not None else None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            # An earlier fit may have left its hooks, if another callback's `on_exception` raised before this one's.
            self._close_steps()
            self._reset()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps = StepWatch(trainer)
        # They are counted now, because toggle_optimizer may later freeze parameters that stay in DDP's buckets.
        self._sync_bytes = _sync_bytes_of_ddp(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._steps is not None:
            self._steps.begin_batch()
        if not self.is_running and self._num_warmed_up >= self._num_warmup_steps:
            _synchronize(pl_module)
            self._last_count = getattr(trainer.strategy, "wire_bytes", None)
            self.start_clock()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        """Counts each gradient sync: a step has several with LBFGS, or if several optimizers take turns in it."""
        if self.is_running and self._wire_bytes is not None and self._last_count is None:
            num_bytes, model = self._sync_bytes, trainer.strategy.model
            if getattr(model, "require_backward_grad_sync", True):
                self._wire_bytes = None if num_bytes is None else self._wire_bytes + num_bytes

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        has_stepped = self._steps is not None and self._steps.end_batch(trainer)
        if not self.is_running:
            self._num_warmed_up += has_stepped
            return
        self.count_batch(trainer, batch, has_stepped=has_stepped)
        self._add_wire_bytes(trainer)

    def _add_wire_bytes(self, trainer: Trainer) -> None:
        if self._last_count is not None and self._wire_bytes is not None:
            num_bytes: int = trainer.strategy.wire_bytes  # type: ignore[attr-defined]
            self._wire_bytes += num_bytes - self._last_count
            self._last_count = num_bytes

    def _stop(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._steps is not None:
            self._steps.pause()
        if not self.is_running:
            return
        _synchronize(pl_module)
        self.stop_clock()
        self._add_wire_bytes(trainer)

    # The method is not named after one of these hooks because `HangMonitor` reports the name of the function in which a
    # rank waits.
    on_validation_start = on_train_epoch_end = _stop

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop(trainer, pl_module)
        self._close_steps()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stops the clock without waiting for the device, which may have failed."""
        self._started = None
        self._close_steps()

    def _close_steps(self) -> None:
        if self._steps is not None:
            self._steps.close()
            self._steps = None


def _synchronize(module: LightningModule) -> None:
    if module.device.type != "cpu":
        torch.accelerator.synchronize(module.device)


def _sync_bytes_of_ddp(trainer: Trainer) -> int | None:
    """Returns the bytes that one gradient sync of Lightning's own DDP passes to collectives; None if unknown."""
    if trainer.world_size == 1:
        return 0
    strategy, model = trainer.strategy, trainer.strategy.model
    is_plain = is_lightnings_ddp(strategy) and comm_hook_of(strategy) is None
    if not is_plain or not isinstance(model, DistributedDataParallel):
        return None
    return gradient_bytes(model)
