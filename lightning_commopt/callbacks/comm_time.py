"""CommTimeMonitor: measures the communication of every step, for loggers, a file and a summary."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lightning_commopt.callbacks.all_ranks import AllRanks
from lightning_commopt.callbacks.fit_totals import FitTotals, print_summary
from lightning_commopt.callbacks.folders import check_dirpath, check_unshared, find_folder
from lightning_commopt.callbacks.publisher import CollectiveWatch, MetricPublisher, StepFiles, gathering_group
from lightning_commopt.callbacks.run_description import describe_hook, describe_rank
from lightning_commopt.callbacks.sharded_prediction import recorder_for
from lightning_commopt.callbacks.windows import PublishesWindows
from lightning_commopt.compat.lightning import batches_that_stepped, count_samples
from lightning_commopt.compat.loops import num_batches
from lightning_commopt.compat.spawned import notify_in_spawned_rank
from lightning_commopt.compat.wrapping import wrap_method
from lightning_commopt.measure.clock import clock_for
from lightning_commopt.measure.link.from_steps import NUM_TIMES
from lightning_commopt.measure.link.tracker import LinkTracker
from lightning_commopt.measure.recorder import StepRecorder
from lightning_commopt.measure.statistics import QUANTITIES, Steps
from lightning_commopt.measure.summary import DEFAULT_NUM_WARMUP_STEPS
from lightning_commopt.measure.verdict import Verdict
from lightning_commopt.plan import DiLoCoPlan
from lightning_commopt.strategy.base import plan_of
from lightning_commopt.strategy.sharding import ranks_per_batch
from lightning_commopt.sync.ddp.observed import observe, stop_observing
from lightning_commopt.text.formatting import count
from lightning_commopt.text.validation import check_choice, check_integer, check_switch, info, warn
from lightning_commopt.watch.own_errors import log_own_errors

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_LAST_WINDOW_LIMIT_S = 10.0  # longest wait at the end of a fit for the last steps of all ranks
_INTERRUPTED_LIMIT_S = 1.0  # the same after an exception, when other ranks may have ended already


class CommTimeMonitor(PublishesWindows):
    """Times every step and every bucket, and reports the cost of communication.

    Works with `CommOptDDP` and any of its plans, with Lightning's ``DDPStrategy`` and its hooks, and with one rank.
    With `CommOptDiLoCo` exchanges count as communication, each in the step that applies its result.
    With other strategies phases are timed, and collectives counted by phase: before torch 2.14 only FSDP2's, and
    Lightning's broadcast before every batch. Training is not affected, and does not wait for the device: on CUDA,
    events take the times.

    Every ``every_n_steps`` steps the ranks gather their measurements in one small message. Its statistics over steps
    and ranks are published a window later: to all loggers of the Trainer under ``comm_time/``, with the number of the
    window's last step, and in ``trainer.callback_metrics``, at the same step on all ranks, for ``ModelCheckpoint`` and
    ``EarlyStopping``. At the end of an epoch and before a validation the last window is published at once; before the
    first window, the steps so far. Until then a rank of `CommOptDiLoCo` that is ahead publishes later.
    ``docs/reference/metrics.md`` defines every key.

    Args:
        every_n_steps: optimizer steps in a window.
        num_warmup_steps: optimizer steps that the summary leaves out. Loggers get them.
        log: "default" for the twelve numbers in `LOGGED_BY_DEFAULT`, "all" for every one.
        dirpath: directory for its files; None for the logger's directory, else the Trainer's ``default_root_dir``.
        save_records: write ``comm_time/rank_0.jsonl``, ... and ``prediction.json``.
        fit_link_model: fit the link to the buckets of the last 200 steps with every window, for ``link_latency_s``,
            ``link_bandwidth`` and predictions. Without it predictions know the times of rank 0 alone.
        print_summary: print a table and a verdict at the end of a fit, also of an interrupted one.
        prog_bar: show ``exposed_share`` of the last window in Lightning's progress bar.

    Attributes:
        metrics: every number of the last window, without the prefix.
        summary: the same numbers over the whole fit, without its warm-up; empty until the fit has ended.
        verdict: what the whole fit shows, in words; None until it has ended. On rank 0 it includes predictions of other
            plans if the summary is printed or records are saved. For these, all ranks probe the link after the fit, for
            about a second per size, and rank 0 measures compressors.
        new_steps: windows of all ranks' steps that arrived since the last batch ended, usually none; for
            ``on_train_batch_end`` of a LightningModule, to update `lightning_commopt.metrics`.

    Raises:
        ValueError: an argument is out of range.
        MisconfigurationException: a fit begins with another monitor in the Trainer that saves records in ``dirpath``.
    """

    def __init__(
        self,
        *,
        every_n_steps: int = 50,
        num_warmup_steps: int = DEFAULT_NUM_WARMUP_STEPS,
        log: str = "default",
        dirpath: str | Path | None = None,
        save_records: bool = True,
        fit_link_model: bool = True,
        print_summary: bool = True,
        prog_bar: bool = False,
    ) -> None:
        check_integer("every_n_steps", every_n_steps, at_least=1)
        check_integer("num_warmup_steps", num_warmup_steps, at_least=0)
        check_choice("log", log, ("default", "all"))
        check_switch("save_records", save_records)
        check_switch("fit_link_model", fit_link_model)
        check_switch("print_summary", print_summary)
        check_switch("prog_bar", prog_bar)
        self._every_n_steps = every_n_steps
        self._num_warmup_steps = num_warmup_steps
        self._logs_all = log == "all"
        self._dirpath = check_dirpath(dirpath)
        self._save_records = save_records
        self._fit_link_model = fit_link_model
        self._print_summary = print_summary
        self._prog_bar = prog_bar
        self._recorder = None
        self._closing = contextlib.ExitStack()  # removes the observers from the strategy, its groups and the model
        self._reset(world_size=1)

    def _reset(self, world_size: int) -> None:
        self.metrics = {}
        self.summary: dict[str, float] = {}
        self.verdict: Verdict | None = None
        self.new_steps: tuple[Steps, ...] = ()
        self._windows, self._own_rows = [], []
        self._num_samples = self._last_step = 0
        self._plans = deque()
        self._taken_plan = None
        self._ranks_per_batch = 1
        self._totals = FitTotals(world_size, self._num_warmup_steps)
        self._all_ranks = AllRanks(None, (self._every_n_steps, len(QUANTITIES)))
        self._collectives: CollectiveWatch | None = None
        self._publisher = MetricPublisher(publishes_all=self._logs_all, prog_bar=self._prog_bar)
        self._link = self._files = self._prediction = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
            monitors = [callback for callback in callbacks if isinstance(callback, CommTimeMonitor)]
            check_unshared([monitor._dirpath for monitor in monitors if monitor._save_records], self)
            # An earlier fit may have left its observers, if another callback's `on_exception` raised before this one's.
            self._closing.close()
            self._reset(trainer.world_size)
            self._recorder = StepRecorder(clock_for(trainer.strategy.root_device))
            self._closing.callback(stop_observing, trainer.strategy, self._recorder)
            observe(trainer.strategy, self._recorder)
            notify_in_spawned_rank(self, trainer, pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._closing.close()
        self._recorder = self._collectives = None
        self._prediction = None  # it refers to the strategy, whose launcher cannot be copied
        self._all_ranks = AllRanks(None, (0, 0))  # without process groups, which cannot be copied

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._ranks_per_batch = ranks_per_batch(trainer.strategy)
        has_peers = trainer.world_size > 1 and dist.is_available() and dist.is_initialized()
        groups = gathering_group(trainer) if has_peers else None
        self._publisher.is_shared = groups is not None or trainer.world_size == 1
        assert self._recorder is not None
        self._recorder.reset()  # the steps of a LearningRateFinder before training are not part of the fit
        # No callback hook runs after a checkpoint, and none at all for a checkpoint with weights only.
        self._closing.callback(wrap_method(trainer, "save_checkpoint", self._recorder.call_in_pause))
        fit = token_hex(8)
        if has_peers:
            fit = trainer.strategy.broadcast(fit)
            self._collectives = CollectiveWatch(trainer, self._recorder)
            self._closing.callback(self._collectives.close)
            if self._print_summary or self._save_records:  # otherwise nobody would read predictions
                self._prediction = recorder_for(trainer, pl_module, self._num_warmup_steps)
                self._closing.callback(self._prediction.close)
        folder = find_folder(trainer, self._dirpath, self).absolute()  # the program may change its working directory
        has_trees = trainer.strategy.root_device.type == "cuda"
        # Times of DiLoCo's exchanges include the wait for the slowest worker, which a model of the link cannot
        # describe.
        has_model = self._fit_link_model and not isinstance(plan_of(trainer.strategy), DiLoCoPlan)
        self._link = LinkTracker(trainer.world_size, has_trees=has_trees) if has_model else None
        num_columns = len(QUANTITIES) + (NUM_TIMES if has_model else 0)
        self._all_ranks = AllRanks(groups, (self._every_n_steps, num_columns))
        if self._save_records and not getattr(trainer, "fast_dev_run", False):
            about = {"origin_unix_s": self._recorder.clock.origin_unix_s, "num_warmup_steps": self._num_warmup_steps}
            self._files = StepFiles(folder, {"fit": fit, **about, **describe_rank(trainer, pl_module)})

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_start(trainer, pl_module)
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._catch_up(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        self._catch_up(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        assert self._recorder is not None
        self._closing.close()
        while self._recorder.num_pending or not self._all_ranks.is_free:
            if not self._receive(trainer, _LAST_WINDOW_LIMIT_S):
                warn(
                    f"CommTimeMonitor: not all ranks have sent their last steps within {_LAST_WINDOW_LIMIT_S:g} s, so"
                    " the summary does not include these steps."
                )
                self._all_ranks.give_up()
            self._send(trainer)
        self.new_steps, self._windows = tuple(self._windows), []
        self._conclude(trainer, is_complete=True)
        if not self.summary and self._print_summary:
            info(
                f"CommTimeMonitor has no summary: the fit had {count(self._totals.num_gathered, 'step')}, and all of"
                f" them are warm-up (num_warmup_steps={self._num_warmup_steps})."
            )
        self._publisher.share(trainer, self.summary)
        self._all_ranks.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        try:
            with contextlib.suppress(RuntimeError):  # the device may have failed, and its events with it
                super().on_exception(trainer, pl_module, exception)
                self._receive(trainer, _INTERRUPTED_LIMIT_S)
                while self._recorder is not None and self._recorder.has(1):
                    self._own_rows += self._take(1)
            self._totals.add_own(self._own_rows)
            if self.verdict is None:
                self._conclude(trainer)
        except Exception as error:
            # An exception from here would keep Lightning from ending the strategy, which notifies the other ranks.
            info(
                f"CommTimeMonitor could not summarize the steps before the exception ({type(error).__name__}: {error})."
            )
        finally:
            self.teardown(trainer, pl_module, "fit")  # Lightning does not call it after an exception

    def _enter(self, phase: str | None) -> None:
        if self._recorder is not None:
            self._recorder.enter(phase)
        if self._prediction is not None and not self._prediction.is_over:
            self._prediction.enter(phase)
        if phase == "backward" and self._collectives is not None:
            self._collectives.update()  # a plan changes when a batch begins

    def _end_batch(self, trainer: Trainer, batch: Any, has_stepped: bool) -> None:
        if trainer.global_rank % self._ranks_per_batch == 0:
            self._num_samples += count_samples(batch) or 0
        if self._recorder is None:
            return
        if has_stepped:
            self._end_step(trainer, batches_that_stepped(trainer), self._num_samples)
            self._num_samples = 0
            # Between exchanges a rank of DiLoCo may be ahead, and must not wait here for the others.
            runs_ahead = isinstance(plan_of(trainer.strategy), DiLoCoPlan)
            self._send_windows(trainer, 0.0 if runs_ahead else math.inf)
        # If ranks may have different numbers of batches, a rank must not wait here: that would prevent the error about
        # different numbers at the end of the epoch.
        have_equal_batches = trainer.is_last_batch and num_batches(trainer) is not None
        if have_equal_batches or trainer.global_step == trainer.max_steps:
            self._catch_up(trainer)
        self.new_steps, self._windows = tuple(self._windows), []

    def _conclude(self, trainer: Trainer, *, is_complete: bool = False) -> None:
        about = describe_hook(trainer.strategy)
        # All ranks take part in the prediction, so it must come before any return.
        if is_complete and self._prediction is not None:
            sent = () if self._link is None else tuple(self._link.steps)
            with log_own_errors("The prediction of CommTimeMonitor"):
                about["forecasts"] = self._prediction.conclude(about["comm_hook"], self._files, sent)
        if (summary := self._totals.summary(**about)) is None:
            return
        self.summary = {**summary.metrics, **(self._link.metrics if self._link is not None else {})}
        if is_complete and self._link is not None and (reason := self._link.why_unknown):
            info(f"CommTimeMonitor: {reason}")
        self.verdict = summary.verdict
        if self._print_summary and trainer.is_global_zero:
            print_summary(summary, self._files, has_forecasts=bool(about.get("forecasts")))
