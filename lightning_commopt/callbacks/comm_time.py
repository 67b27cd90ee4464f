"""CommTimeMonitor: what every step spends on communication, in the logger, in a file and in words."""

from __future__ import annotations

import contextlib
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from rich.console import Console

from lightning_commopt.callbacks.phases import FollowsPhases, samples_in, step_of_loggers
from lightning_commopt.collectives.groups import group_beside
from lightning_commopt.compressors.registry import compressor_name
from lightning_commopt.ddp.observed import ShowsExchanges, observe, stop_observing
from lightning_commopt.measure.all_ranks import AllRanks
from lightning_commopt.measure.clock import clock_for
from lightning_commopt.measure.files import StepWriter, rank_file
from lightning_commopt.measure.recorder import RecordedStep, StepRecorder
from lightning_commopt.measure.statistics import QUANTITIES, StepStatistics, row
from lightning_commopt.measure.summary_table import summary_table
from lightning_commopt.measure.verdict import Verdict, verdict
from lightning_commopt.strategy.base import FollowsPlan
from lightning_commopt.validation import check_integer, check_switch, warn

PREFIX = "comm_time/"
_LAST_WINDOW_LIMIT_S = 10.0


class CommTimeMonitor(FollowsPhases):
    """Times every step and every bucket, and says what communication costs.

    Works with `CommOptDDP` and any of its plans, with Lightning's ``DDPStrategy`` and its hooks, and with one rank. On
    other strategies only the phases of a step are timed. Nothing that is trained changes, and the device is never
    waited for before the end of the fit: on CUDA times are those of events, read when the device has passed them.

    Every ``every_n_steps`` steps the ranks gather what they measured in one small message that nobody waits for. Its
    statistics over steps and ranks go to all loggers of the Trainer, under ``comm_time/``, when they have come: at the
    step at which the window ended. ``docs/comm_time.md`` defines every key.

    Args:
        every_n_steps: optimizer steps in a window.
        num_warmup_steps: optimizer steps that the summary of the fit leaves out. Loggers get them.
        dirpath: where ``comm_time/rank_0.jsonl``, ... go; None for the logger's directory, else the Trainer's
            ``default_root_dir``.
        save_records: write every step of every rank to those files.
        print_summary: print a table and a verdict at the end of a fit.

    Attributes:
        metrics: of the last window, as logged but without the prefix.
        summary: the same over the whole fit, without its warm-up; empty until there is any.
        verdict: on the whole fit; None until it has ended.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        *,
        every_n_steps: int = 50,
        num_warmup_steps: int = 10,
        dirpath: str | Path | None = None,
        save_records: bool = True,
        print_summary: bool = True,
    ) -> None:
        check_integer("every_n_steps", every_n_steps, at_least=1)
        check_integer("num_warmup_steps", num_warmup_steps, at_least=0)
        check_switch("save_records", save_records)
        check_switch("print_summary", print_summary)
        self._every_n_steps = every_n_steps
        self._num_warmup_steps = num_warmup_steps
        self._dirpath = dirpath
        self._save_records = save_records
        self._print_summary = print_summary
        self._recorder: StepRecorder | None = None
        self._reset()

    def _reset(self) -> None:
        self.metrics: dict[str, float] = {}
        self.summary: dict[str, float] = {}
        self.verdict: Verdict | None = None
        self._num_samples = 0
        self._num_gathered = 0
        self._last_step_sent = 0
        self._num_buckets = 0
        self._of_window = StepStatistics()
        self._of_fit = StepStatistics()
        self._all_ranks: AllRanks | None = None
        self._writer: StepWriter | None = None
        self._failed_loggers: list[Logger] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begins to watch the exchanges, before the strategy wraps the model."""
        if stage == "fit":
            self._recorder = StepRecorder(clock_for(trainer.strategy.root_device))
            observe(trainer.strategy, self._recorder)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Watches no more."""
        if self._recorder is not None:
            stop_observing(trainer.strategy, self._recorder)
            self._recorder = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins anew."""
        super().on_train_start(trainer, pl_module)
        self._reset()
        has_peers = trainer.world_size > 1 and dist.is_available() and dist.is_initialized()
        shape = (self._every_n_steps, len(QUANTITIES))
        self._all_ranks = AllRanks(_group_beside() if has_peers else None, shape)
        # All ranks must ask for log_dir, which is broadcast.
        folder = trainer.log_dir or trainer.default_root_dir if self._dirpath is None else self._dirpath
        if self._save_records and not getattr(trainer, "fast_dev_run", False):
            assert self._recorder is not None
            header = _header(trainer) | {"origin_unix_s": self._recorder.origin_unix_s}
            self._writer = StepWriter(rank_file(folder, trainer.global_rank), header)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gathers what is left, and prints what the fit has cost."""
        super().on_train_end(trainer, pl_module)
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize(trainer.strategy.root_device)
        assert self._recorder is not None
        while self._recorder.num_pending or (self._all_ranks is not None and not self._all_ranks.is_free):
            if not self._receive(trainer, _LAST_WINDOW_LIMIT_S):
                warn(
                    f"CommTimeMonitor: not all ranks have sent their last steps within {_LAST_WINDOW_LIMIT_S:g} s; the"
                    " summary is without them."
                )
                break
            self._send(min(self._every_n_steps, self._recorder.num_pending))
        self._conclude(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Saves the records of this rank that are there."""
        super().on_exception(trainer, pl_module, exception)
        self._all_ranks = None
        with contextlib.suppress(RuntimeError):  # the device may be what failed
            while self._recorder is not None and self._recorder.has(1):
                self._send(1)
        self.teardown(trainer, pl_module, "fit")  # which Lightning does not call then

    def _enter(self, phase: str | None) -> None:
        if self._recorder is not None:
            self._recorder.enter(phase)

    def _start_batch(self, trainer: Trainer, batch_idx: int) -> None:
        pass

    def _end_batch(self, trainer: Trainer, batch: Any, has_stepped: bool) -> None:
        self._num_samples += samples_in(batch) or 0
        if not has_stepped or self._recorder is None:
            return
        self._recorder.end_step(step_of_loggers(trainer), self._num_samples)
        self._num_samples = 0
        self._receive(trainer)
        if self._all_ranks is not None and self._all_ranks.is_free and self._recorder.has(self._every_n_steps):
            self._send(self._every_n_steps)

    def _send(self, num_steps: int) -> None:
        """Saves the oldest steps, and sends them to all ranks."""
        assert self._recorder is not None
        steps = self._recorder.take(num_steps)
        if not steps:
            return
        self._num_buckets = len(steps[-1].layout)
        self._save(steps)
        if self._all_ranks is not None:
            self._last_step_sent = steps[-1].record.step
            self._all_ranks.send(torch.tensor([row(step.record) for step in steps], dtype=torch.float64))

    def _save(self, steps: list[RecordedStep]) -> None:
        if self._writer is None:
            return
        try:
            for layout, group in groupby(steps, lambda step: step.layout):
                self._writer.write([step.record for step in group], layout)
        except OSError as error:
            self._writer = None
            message = f"CommTimeMonitor: the steps cannot be saved any more ({error}); training goes on."
            warn(message, on_every_rank=True)

    def _receive(self, trainer: Trainer, limit_s: float = 0.0) -> bool:
        """Logs a window that has come; returns false if one is under way still."""
        if self._all_ranks is None or self._all_ranks.is_free:
            return True
        try:
            values = self._all_ranks.take(limit_s)
        except RuntimeError as error:
            self._all_ranks = None
            warn(f"CommTimeMonitor: the ranks' times cannot be gathered any more ({error}).", on_every_rank=True)
            return True
        if values is None:
            return False
        if values.shape[1]:
            self._publish(trainer, values)
        return True

    def _publish(self, trainer: Trainer, values: torch.Tensor) -> None:
        self._of_window = StepStatistics()
        self._of_window.update(values.numpy())
        self.metrics = self._of_window.compute()
        num_warmup = max(0, self._num_warmup_steps - self._num_gathered)
        self._num_gathered += values.shape[1]
        if values.shape[1] > num_warmup:
            self._of_fit.update(values[:, num_warmup:].numpy())
        named = {PREFIX + name: value for name, value in self.metrics.items()}
        for logger in trainer.loggers:
            if logger in self._failed_loggers:
                continue
            try:
                logger.log_metrics(named, step=self._last_step_sent)
            except Exception as error:
                self._failed_loggers.append(logger)
                warn(
                    f"CommTimeMonitor: {type(logger).__name__} cannot take the times ({type(error).__name__}: {error});"
                    " it gets no more of them, and training goes on."
                )

    def _conclude(self, trainer: Trainer) -> None:
        if self._num_gathered <= self._num_warmup_steps:
            if self._print_summary:
                rank_zero_info(
                    f"CommTimeMonitor: no summary, as the fit had {self._num_gathered} steps"
                    f" and num_warmup_steps={self._num_warmup_steps} are left out."
                )
            return
        self.summary = self._of_fit.compute()
        self.verdict = verdict(
            self.summary,
            world_size=trainer.world_size,
            num_buckets=self._num_buckets,
            comm_hook=_comm_hook(trainer.strategy),
        )
        if self._print_summary and trainer.is_global_zero:
            Console().print(summary_table(self.summary, self.verdict))


def _group_beside() -> dist.ProcessGroup | None:
    """Returns a gloo group of all ranks; None, with a warning, where they cannot reach each other over gloo."""
    try:
        return group_beside()
    except RuntimeError as error:
        warn(
            f"CommTimeMonitor: the ranks cannot be gathered over gloo ({error}), so each logs its own times; perhaps"
            " GLOO_SOCKET_IFNAME must name the network device.",
            on_every_rank=True,
        )
        return None


def _header(trainer: Trainer) -> dict[str, Any]:
    """Returns what the first line of a file says of the rank."""
    strategy = trainer.strategy
    device = strategy.root_device
    return {
        "rank": trainer.global_rank,
        "world_size": trainer.world_size,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "backend": dist.get_backend() if dist.is_available() and dist.is_initialized() else None,
        "strategy": type(strategy).__name__,
        "comm_hook": _comm_hook(strategy),
    }


def _comm_hook(strategy: Strategy) -> str:
    """Returns the name of what averages the gradients."""
    if isinstance(strategy, FollowsPlan) and strategy.plan.comm_hook is not None:
        return compressor_name(strategy.plan.comm_hook)
    if isinstance(strategy, ShowsExchanges) and not isinstance(strategy, FollowsPlan):
        return type(strategy).__name__
    hook = getattr(strategy, "_ddp_comm_hook", None)
    return "none" if hook is None else str(getattr(hook, "__name__", type(hook).__name__))
