"""HangMonitor: reports which rank the others wait for, in what, and why."""

from __future__ import annotations

import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lightning_commopt.callbacks.folders import check_dirpath, find_folder
from lightning_commopt.callbacks.phases import PhaseCallback
from lightning_commopt.compat.hooks import handles_sigterm
from lightning_commopt.compat.sigterm import report_lost_broadcasts, run_whatever_handlers_raise
from lightning_commopt.compat.spawned import notify_in_spawned_rank
from lightning_commopt.compat.torch import FLIGHT_RECORDER_ON, flight_records, turn_on_flight_recorder
from lightning_commopt.plan import DiLoCoPlan
from lightning_commopt.strategy.base import plan_of
from lightning_commopt.sync.ddp.buckets import bucket_names
from lightning_commopt.sync.groups import let_gloo_finish_at_exit
from lightning_commopt.text.validation import check_choice, check_positive, info, warn, warn_once
from lightning_commopt.watch.hangs import marks as kinds
from lightning_commopt.watch.hangs.rank_side import WatchedRank
from lightning_commopt.watch.own_errors import log_own_errors

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

# Maximum number of batches after which the names of buckets are looked up. DDP rebuilds its buckets after the first or
# the second step, or never.
_MAX_LOOKUPS = 10
_PHASES = {
    "data": kinds.DATA,
    "forward": kinds.FORWARD,
    "backward": kinds.BACKWARD,
    "optimizer": kinds.OPTIMIZER,
    "other": kinds.CALLBACKS,
}
_STAGES = {"fit": "validation", "validate": "validation", "test": "test", "predict": "predict"}


class HangMonitor(PhaseCallback):
    """Reports a hang: which rank the others wait for, in what, and what to try.

    A watcher process beside every rank observes it through shared memory and the kernel, even if the rank is stopped,
    killed, or stuck outside of Python. The watchers communicate over TCP. After ``after_s`` without progress, one of
    them prints a sentence such as ``rank 2 is still in the dataloader of step 141 (data.py:33 in __getitem__); ranks 0,
    1, 3 wait in the gradient sync of bucket 4 (layer3.*)``, then what to try. The state, the stacks of all threads, and
    the last collectives of all ranks are written to files, which ``commopt doctor DIR`` reads.

    Some phases may take ten times ``after_s`` without a report: the first of its kind, a checkpoint, a callback, the
    start of a dataloader, and the start and end of an epoch or a validation. Every phase may take three times its
    longest duration among the last 50, not counting the first. If no rank waits for others, none is ended, and after
    the last batch nothing is reported. Works with every strategy whose ranks have a process group; with one rank it has
    no effect. Needs Linux. See ``docs/troubleshoot/hangs.md``.

    torch before 2.11 records collectives only with ``TORCH_FR_BUFFER_SIZE``. The callback sets this variable if it is
    unset, which has no effect in a process that has had a process group before; then a message says what is missing.

    Args:
        after_s: seconds without progress before a report.
        action: "report"; or "abort" to also end all ranks, with a nonzero status, if some wait for others.
        dirpath: parent of the folder ``hangs``; None for the Trainer's ``log_dir``, else its ``default_root_dir``.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, *, after_s: float = 60.0, action: str = "report", dirpath: str | Path | None = None) -> None:
        check_positive("after_s", after_s)
        check_choice("action", action, ("report", "abort"))
        self._after_s = float(after_s)
        self._action = action
        self._dirpath = check_dirpath(dirpath)
        turn_on_flight_recorder()
        self._watched: WatchedRank | None = None
        self._closing = ExitStack()
        self._num_lookups_left = 0
        self._step = 0
        self._stage = 0
        self._is_ending = self._has_waited = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Starts the watch, and begins to observe the gradient sync."""
        if trainer.world_size == 1 or not (dist.is_available() and dist.is_initialized()):
            return
        if sys.platform != "linux":
            warn_once("HangMonitor has no effect: it needs Linux.")
            return
        # Lightning's own strategies need this, too: a rank that aborts while Python ends would end the job.
        let_gloo_finish_at_exit()
        folder = find_folder(trainer, self._dirpath, self)
        environment: Any = getattr(trainer.strategy, "cluster_environment", None)
        main_address = ("localhost", 0) if environment is None else (environment.main_address, environment.main_port)
        self._stop_watching()
        try:
            self._watched = WatchedRank(
                after_s=self._after_s,
                action=self._action_for(trainer),
                folder=folder / "hangs",
                main_address=main_address,
                device=trainer.strategy.root_device,
            )
        except OSError as error:  # too many processes or descriptors
            warn(f"HangMonitor has no effect: its watcher cannot be started ({error}).", on_every_rank=True)
            return
        notify_in_spawned_rank(self, trainer, pl_module)
        self._stage = kinds.first_of_stage(_STAGES[stage])
        self._step = trainer.global_step
        self._is_ending = self._has_waited = False
        self._enter_number(kinds.SETUP)
        self._num_lookups_left = _MAX_LOOKUPS if stage == "fit" else 0
        if stage == "fit":
            self._observe_sync(trainer, self._watched)

    def _observe_sync(self, trainer: Trainer, watched: WatchedRank) -> None:
        plan, observers = plan_of(trainer.strategy), getattr(trainer.strategy, "sync_observers", None)
        inner = plan.inner if isinstance(plan, DiLoCoPlan) else plan
        # Observing DDP's own all-reduce would cost a pass over the gradients, and FSDP2 has no buckets.
        has_marks = isinstance(plan, DiLoCoPlan) if inner is None else inner.comm_hook is not None
        if observers is not None and has_marks:
            observers.add(watched.observer)
            self._closing.callback(observers.remove, watched.observer)
            self._num_lookups_left = 0

    def _action_for(self, trainer: Trainer) -> str:
        if self._action == "abort" and getattr(trainer.strategy, "lets_ranks_fail", False):
            warn_once(
                "HangMonitor(action='abort') only reports hangs here: with patience_s the fit continues without ranks"
                " that fail."
            )
            return "report"
        return self._action

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop_watching()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        def end() -> None:
            with log_own_errors("HangMonitor"):
                super(HangMonitor, self).on_exception(trainer, pl_module, exception)
                self._stop_watching(exception)

        run_whatever_handlers_raise(end)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Waits until the ranks' watchers are connected, which usually they are already."""
        super().on_fit_start(trainer, pl_module)
        self._meet()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts to watch Lightning's broadcast before every batch."""
        super().on_train_start(trainer, pl_module)
        if self._watched is not None:
            _explain_missing_records()
        self._closing.callback(report_lost_broadcasts(trainer, self._report_lost_broadcast))

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._enter_number(kinds.DATA_START)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._note_stop(trainer)
        self._enter_number(kinds.EPOCH_END)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stops watching: ranks may do different things after the fit."""
        super().on_train_end(trainer, pl_module)
        self._note_stop(trainer)
        self._end()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if not self._is_ending:
            self._enter_number(kinds.CHECKPOINT)

    def _enter(self, phase: str | None) -> None:
        if phase is not None:
            self._enter_number(_PHASES[phase])

    def _end_batch(self, trainer: Trainer, batch: Any, has_stepped: bool) -> None:
        self._step = trainer.global_step
        if self._num_lookups_left > 0 and self._watched is not None:
            names = bucket_names(trainer.strategy.model)
            self._num_lookups_left = 0 if names else self._num_lookups_left - 1
            if names:
                self._watched.name_buckets(names, are_all=True)

    def _enter_number(self, phase: int) -> None:
        if self._watched is not None:
            self._watched.enter(phase, self._step)

    def _enter_evaluation(self, phase: int, batch: int | None = None) -> None:
        if self._watched is not None:
            self._watched.enter(self._stage + phase, self._step)
            if batch is not None:
                self._watched.mark(kinds.BATCH, 0, batch)

    def _note_stop(self, trainer: Trainer) -> None:
        if trainer.should_stop and self._watched is not None:
            self._watched.note_stop("trainer.should_stop")

    def _end(self, trainer: Trainer | None = None, pl_module: LightningModule | None = None) -> None:
        self._is_ending = True
        self._enter_number(kinds.END)

    def _meet(self) -> None:
        """Waits for the other watchers, but only once, since a monitor that does not start in time may never start."""
        if self._watched is not None and not self._has_waited:
            self._has_waited = True
            if not self._watched.meet():
                warn_once(
                    "HangMonitor: not all ranks' monitors have started within a minute. Until they have, hangs are not"
                    " reported."
                )

    def _report_lost_broadcast(self, error: Exception) -> None:
        """Reports a timeout or a lost connection that Lightning ignores, so that a later collective fails instead."""
        if self._watched is not None:
            warn(
                f"HangMonitor: Lightning's broadcast of SIGTERM, before a batch of step {self._step}, has failed"
                f" ({type(error).__name__}: {error}). Lightning ignores this, and later collectives fail or hang.",
                on_every_rank=True,
            )
            if handles_sigterm(sys._getframe()):
                self._watched.note_stop("SIGTERM")
            # Marks of later operations, in which other ranks take no part, would hide where the connection was lost.
            self._stop_watching(error)

    def _stop_watching(self, exception: BaseException | None = None) -> None:
        self._closing.close()
        if self._watched is not None:
            self._watched.close(exception)
            self._watched = None

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        if trainer.sanity_checking:
            self._enter_evaluation(kinds.EVALUATION_START)
        elif trainer.state.fn != "fit":
            self._end()

    def _start_evaluation(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._meet()
        self._enter_evaluation(kinds.EVALUATION_START)

    def _start_evaluation_batch(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._enter_evaluation(kinds.EVALUATION_BATCH, batch_idx)

    def _end_evaluation_batch(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._enter_evaluation(kinds.EVALUATION_DATA, batch_idx)

    on_validation_start = on_test_start = on_predict_start = _start_evaluation
    on_validation_epoch_end = on_test_epoch_end = on_predict_epoch_end = _start_evaluation
    on_test_end = on_predict_end = _end
    on_validation_batch_start = on_test_batch_start = on_predict_batch_start = _start_evaluation_batch
    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _end_evaluation_batch


def _explain_missing_records() -> None:
    """Reports what is missing if torch has recorded none of the collectives that every fit begins with."""
    with suppress(RuntimeError):  # this torch has no Flight Recorder
        if flight_records()["entries"]:
            return
    ((name, number),) = FLIGHT_RECORDER_ON.items()
    info(
        "HangMonitor: torch records no collectives in this process, so reports may lack the operation in which ranks"
        " wait, and action='abort' may not end them. If the process had a process group before HangMonitor was created,"
        f" start it with {name}={number}."
    )
