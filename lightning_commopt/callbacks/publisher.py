"""Observes collectives for `CommTimeMonitor`, and passes its numbers to loggers, callbacks and files."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_commopt.compat.collectives import CollectiveHooks, has_collective_hooks
from lightning_commopt.compat.fsdp import units_of
from lightning_commopt.compat.fsdp_calls import ComputationWaits, ObservedUnits
from lightning_commopt.compat.sigterm import around_broadcast_calls, around_broadcasts
from lightning_commopt.cost.basis import Basis
from lightning_commopt.cost.fsdp2.basis import ShardedBasis
from lightning_commopt.measure.files import StepWriter, rank_file
from lightning_commopt.measure.forecasts import Forecast
from lightning_commopt.measure.record import StepRecord
from lightning_commopt.measure.recorder import StepRecorder, issued_by, parts_of_one
from lightning_commopt.measure.runs.files import PREDICTION_FILE
from lightning_commopt.sync.groups import BorrowedGroups, borrow_host_group
from lightning_commopt.text.terminal import TextConsole, print_text
from lightning_commopt.text.validation import info, warn
from lightning_commopt.watch.hangs.flight_recorder import BACKGROUND_GROUP

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.loggers import Logger

PREFIX = "comm_time/"

LOGGED_BY_DEFAULT = (
    *("step_s", "data_s", "comm_s", "exposed_s", "exposed_share", "exposed_wait_s"),
    *("wire_bytes", "bus_bandwidth", "link_latency_s", "link_bandwidth", "samples_per_s", "straggler_rank"),
)
"""The metrics that loggers get with ``log="default"``."""


class CollectiveWatch:
    """Observes the collectives of a fit until `close`; needs the process group.

    Before torch 2.14, these are only FSDP2's, and Lightning's broadcast before every batch, for which a verdict would
    otherwise blame the dataloader.

    On CUDA only FSDP2's collectives are timed, and computation that waits for them is observed as well.
    """

    def __init__(self, trainer: Trainer, recorder: StepRecorder) -> None:
        is_cpu, model = trainer.strategy.root_device.type == "cpu", trainer.strategy.model
        assert model is not None
        self._hooks: CollectiveHooks | None = None
        self._closers: list[Callable[[], None]] = []
        if has_collective_hooks():
            self._hooks = CollectiveHooks(recorder.issue, sees_end=is_cpu)
            self._closers += [self._hooks.close, around_broadcasts(trainer, _broadcast)]
        else:
            self._closers.append(around_broadcast_calls(trainer, partial(_record_broadcast, recorder)))
        if not is_cpu:
            self._units = ObservedUnits(model, recorder.issue_in_stream, sees_end=True, around=parts_of_one)
            if units_of(model):
                self._closers.append(ComputationWaits(trainer.strategy.root_device, recorder.wait).close)
        else:
            # With collective hooks, the end of a call is needed only where a collective does not report its own end.
            # Gloo's reduce-scatters do not.
            listener = recorder.issue if self._hooks is None else recorder.call
            self._units = ObservedUnits(model, listener, sees_end=True, around=recorder.waiting)
        self._closers.append(self._units.close)
        if self._hooks is None:
            info(
                "CommTimeMonitor observes only gradient sync, FSDP2's all-gathers and reduce-scatters, and Lightning's"
                " broadcast before every batch; torch reports other collectives from version 2.14 on."
            )

    def update(self) -> None:
        """Observes process groups that were created, and units that were changed by a new plan, since the last call."""
        if self._hooks is not None:
            self._hooks.update()
        self._units.update()

    def close(self) -> None:
        while self._closers:
            self._closers.pop()()


def _broadcast(inner: Callable[[], None]) -> None:
    with issued_by("lightning"):
        inner()


def _record_broadcast(recorder: StepRecorder, broadcast: Callable[..., Any], tensor: Tensor, **kwargs: Any) -> Any:
    with issued_by("lightning"):
        issued = recorder.issue("broadcast", tensor.nbytes)
    result = broadcast(tensor, **kwargs)
    if issued is not None:
        issued.end()
    return result


def gathering_group(trainer: Trainer) -> BorrowedGroups | None:
    """Returns a gloo group of all ranks; None, with a message, if ranks cannot connect or need not train together."""
    if getattr(trainer.strategy, "uneven_batches", None) == "allow":
        info(
            "CommTimeMonitor: each rank logs only its own times, because epochs may end after different steps on"
            " different ranks (uneven_batches='allow')."
        )
        return None
    if getattr(trainer.strategy, "lets_ranks_fail", False):
        info(
            "CommTimeMonitor: each rank logs only its own times, because the fit continues without ranks that fail"
            " (patience_s)."
        )
        return None
    try:
        return borrow_host_group(BACKGROUND_GROUP)
    except RuntimeError as error:
        warn(
            f"CommTimeMonitor: the ranks cannot connect over gloo ({error}), so each logs only its own times."
            " If gloo chose a wrong network interface, set GLOO_SOCKET_IFNAME to the right one.",
            on_every_rank=True,
        )
        return None


class MetricPublisher:
    """Publishes metrics under ``comm_time/``.

    Args:
        publishes_all: publish all metrics; otherwise `LOGGED_BY_DEFAULT`.
        prog_bar: show ``exposed_share`` in the progress bar.

    Attributes:
        is_shared: whether all ranks have the same numbers; only then callbacks and the progress bar get them.
    """

    def __init__(self, *, publishes_all: bool, prog_bar: bool) -> None:
        self.is_shared = False
        self._publishes_all = publishes_all
        self._prog_bar = prog_bar
        self._failed_loggers: list[Logger] = []

    def share(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Puts metrics into ``trainer.callback_metrics``, and ``exposed_share`` into the progress bar if requested."""
        if not self.is_shared:
            return
        prefixed = self._with_prefix(metrics)
        trainer.callback_metrics.update({name: torch.tensor(value, device="cpu") for name, value in prefixed.items()})
        if self._prog_bar and not math.isnan(share := metrics.get("exposed_share", math.nan)):
            trainer.progress_bar_metrics["exposed_share"] = share

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
                    f"CommTimeMonitor: {type(logger).__name__} failed to log ({type(error).__name__}: {error})."
                    " It gets no further metrics; training continues."
                )

    def _with_prefix(self, metrics: Mapping[str, float]) -> dict[str, float]:
        return {
            PREFIX + name: value for name, value in metrics.items() if self._publishes_all or name in LOGGED_BY_DEFAULT
        }


class StepFiles:
    """Writes this rank's steps and the predictions, and replaces those of an earlier fit.

    If writing a file fails, it warns, and does not write that file again.
    """

    def __init__(self, folder: str | Path, header: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        self._writer = StepWriter(rank_file(folder, header["rank"]), header)
        self._failed: set[str] = set()
        # A prediction of an earlier fit in this directory is removed once this fit has written steps.
        self._stale = self.folder / PREDICTION_FILE if header["rank"] == 0 else None

    def save_steps(self, steps: Sequence[StepRecord], plan: Mapping[str, Any] | None = None) -> None:
        """Writes steps. ``plan``, from `describe_plan`, is the plan at their end, and applies to later steps."""
        if self._stale is not None:
            with suppress(OSError):
                self._stale.unlink()
            self._stale = None
        self._save("steps", partial(self._writer.write, steps))
        self._writer.change(plan or {})

    def save_basis(self, basis: Basis | ShardedBasis, forecasts: Sequence[Forecast]) -> None:
        """Writes the fitted inputs for predictions of other plans, and these predictions."""
        self._save("prediction", partial(basis.save, self.folder, forecasts))

    def print_next_command(self, console: TextConsole, *, has_forecasts: bool) -> None:
        """Prints where the files are, if they could be written, and the command to run next."""
        if "steps" in self._failed:
            return
        command = "predict" if has_forecasts and not self._failed else "trace"
        print_text(f"Files: {self.folder}. Next: commopt {command} {quote(str(self.folder))}", console)

    def _save(self, content: str, save: Callable[[], None]) -> None:
        if content in self._failed:
            return
        try:
            save()
        except (OSError, ValueError) as error:  # a compressor without a name cannot be written
            self._failed.add(content)
            message = (
                f"CommTimeMonitor could not save the {content} ({error}), and will not try again; training continues."
            )
            warn(message, on_every_rank=True)
