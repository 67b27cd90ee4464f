"""RunRecorder: writes a run's settings and results into its directory, where reports read them."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_original_cwd
from torch import Tensor

from lightning_commopt.callbacks.comm_time import CommTimeMonitor
from lightning_commopt.callbacks.folders import check_dirpath, find_folder, local_folder
from lightning_commopt.callbacks.publisher import PREFIX
from lightning_commopt.callbacks.run_description import (
    describe_run,
    describe_tuning,
    nccl_settings,
    num_parameters,
    with_plan,
)
from lightning_commopt.callbacks.speed import SpeedMonitor
from lightning_commopt.compat.lightning import Callback
from lightning_commopt.compat.sigterm import run_whatever_handlers_raise
from lightning_commopt.compat.spawned import notify_in_spawned_rank
from lightning_commopt.measure.runs.files import LOSS_FILE
from lightning_commopt.measure.runs.losses import LossCurve, LossPoint, read_losses, write_losses
from lightning_commopt.measure.runs.machine import PeakMemory
from lightning_commopt.measure.runs.record import (
    RunRecord,
    fail_rank,
    find_metric,
    how_to_name_loss,
    load_average,
    new_record,
)
from lightning_commopt.measure.runs.settings import Settings, hydra_settings
from lightning_commopt.sync.gather import all_ranks_ready
from lightning_commopt.sync.store import prepare_key_spaces
from lightning_commopt.text.validation import check_switch, info, warn

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

# A rank may be busy after training, for example with an upload, for longer than the timeout of a collective. Rank 0
# waits for the others for the first time, and then records its own losses only; the others wait for rank 0 for the
# second time.
_PATIENCE_S, _LONGEST_WAIT_S = 300.0, 24 * 3600.0

# Both monitors measure these: maps names in `CommTimeMonitor`'s summary to names in `SpeedMonitor` and the record.
_SHARED_METRICS = {"steps_per_s": "steps_per_s", "samples_per_s": "samples_per_s", "wire_bytes": "wire_bytes_per_step"}


class RunRecorder(Callback):
    """Writes ``run.json`` and ``loss.jsonl`` into the run's directory, which is what ``commopt report`` reads.

    ``run.json`` is a `RunRecord`: the plan, versions, hardware and git state from the start of the fit on, and at its
    end the results of the callbacks `SpeedMonitor` and `CommTimeMonitor`, if the Trainer has them, the metrics that the
    model logged, and the peak memory. ``loss.jsonl`` has the training loss, averaged over the ranks that have one, and
    the validation loss, by step and seconds. Training never waits for the device; the ranks average once after it. If a
    rank ends the fit more than five minutes later than rank 0, losses and memory are those of rank 0 alone.

    Args:
        dirpath: the run's directory; None for the Hydra run's directory, else the logger's, else the Trainer's
            ``default_root_dir``.
        val_loss: name of the metric for the validation loss; None to find it by its name, see `find_metric`:
            ``val_loss``, ``val/loss``, ``model/validation_loss``.
        val_accuracy: the same for the validation accuracy.
        ends_run: whether the run ends with the fit; if not, the caller has started the record and will finish it.
    """

    def __init__(
        self,
        *,
        dirpath: str | Path | None = None,
        val_loss: str | None = None,
        val_accuracy: str | None = None,
        ends_run: bool = True,
    ) -> None:
        for option, name in (("val_loss", val_loss), ("val_accuracy", val_accuracy)):
            if name is not None and (not isinstance(name, str) or not name):
                raise ValueError(f"{option} must be the name of a metric or None, got {name!r}")
        check_switch("ends_run", ends_run)
        self._dirpath = check_dirpath(dirpath)
        self._settings = Settings()
        self._started_in = Path.cwd()
        if HydraConfig.initialized():  # false in ranks that are spawned later
            job = HydraConfig.get()
            self._started_in = Path(get_original_cwd())
            self._dirpath = self._dirpath or Path(job.runtime.output_dir)
            if ends_run:
                self._settings = hydra_settings(Path(job.runtime.output_dir))
        self._ends_run = ends_run
        self._names = {"val_loss": val_loss, "val_accuracy": val_accuracy}
        self._record: RunRecord | None = None
        self._is_running = not ends_run  # whether an exception belongs to the run, on any rank
        self._reset()

    def _reset(self) -> None:
        self._fit_folder: Path | None = None  # where this fit is recorded, once it has begun
        self._curve = LossCurve()
        self._other_points: list[LossPoint] = []
        self._memory: PeakMemory | None = None
        self._has_validated = False
        self._seconds = 0.0
        self._started: float | None = None
        self._created = time.perf_counter()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._reset()
        # The program may change its working directory.
        self._fit_folder = find_folder(trainer, self._dirpath, self).absolute()
        self._is_running = True
        notify_in_spawned_rank(self, trainer, pl_module)
        self._memory = PeakMemory(trainer.strategy.root_device)
        if _needs_patience(trainer):
            prepare_key_spaces()
        if trainer.is_global_zero and not getattr(trainer, "fast_dev_run", False):
            description = describe_run(trainer, pl_module)
            record = self._start_record(self._folder(trainer), description["sync_method"])
            values = {**record.settings.values, **nccl_settings()}
            settings = with_plan(dataclasses.replace(record.settings, values=values), trainer.strategy)
            self._record = dataclasses.replace(record, **description, settings=settings)
            self._save(self._folder(trainer))

    def _start_record(self, folder: Path, sync_method: str) -> RunRecord:
        """Returns the record that the caller has started, or a new one."""
        if not self._ends_run:
            with suppress(OSError, ValueError):
                record = RunRecord.load(folder)
                if record.status == "running":
                    return record
        return new_record(sync_method, self._started_in, settings=self._settings)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._record is not None:
            folder = self._folder(trainer)
            with suppress(OSError, ValueError):
                if trainer.global_step > 0:
                    self._other_points = [p for p in read_losses(folder) if p.step <= trainer.global_step]
                else:  # a file of an earlier run must not remain if this run ends without a loss
                    (folder / LOSS_FILE).unlink(missing_ok=True)
        self._seconds = max([point.seconds for point in self._other_points], default=0.0)
        self._started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor) and loss.numel() == 1:
            # Lightning has divided it by the number of accumulated batches.
            loss = loss * (trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1)
        else:
            loss = None
        self._curve.add(loss, trainer.global_step, self._training_s())

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seconds, self._started = self._training_s(), None

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        self._has_validated = True
        name = self._metric_name("val_loss", trainer.callback_metrics)
        loss = None if name is None else trainer.callback_metrics.get(name)
        if loss is not None:
            point = LossPoint(kind="val", step=trainer.global_step, seconds=self._seconds, loss=float(loss))
            self._other_points.append(point)
        self._started = time.perf_counter()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._memory is not None
        device, reduce = trainer.strategy.root_device, trainer.strategy.reduce
        num_bytes = torch.tensor(self._memory.num_bytes, dtype=torch.float64, device=device)
        are_all_here = not _needs_patience(trainer) or all_ranks_ready("record of a run", _PATIENCE_S, _LONGEST_WAIT_S)
        is_averaged = trainer.world_size > 1 and are_all_here
        losses = self._curve.points(device, (lambda x, op: reduce(x, reduce_op=op)) if is_averaged else None)
        if are_all_here:
            num_bytes = reduce(num_bytes, reduce_op="max")
        elif self._record is not None:
            warn(
                f"RunRecorder: not all ranks have ended the fit within {_PATIENCE_S:g} s after rank 0, so the recorded"
                " loss and peak memory are those of rank 0 alone."
            )
        if self._record is not None:
            results = self._results(trainer) | {"peak_memory_bytes": float(num_bytes)}
            # FSDPStrategy has sharded the parameters by now, so their number would be wrong.
            if self._record.num_parameters is None and self._record.strategy != "FSDPStrategy":
                results["num_parameters"] = num_parameters(pl_module)
            self._record = dataclasses.replace(self._record, **results)
            self._log_loss_name(self._record)
            self._save(self._folder(trainer), losses)
        self._is_running = not self._ends_run

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if not self._is_running:  # the exception belongs to a test after the fit, or to a fit that has not begun
            return
        folder = self._folder(trainer)

        def end() -> None:
            if self._record is not None:
                with suppress(RuntimeError, OSError):  # the device or the disk may have failed
                    self._save_losses(folder, self._curve.points())
            if not getattr(trainer, "fast_dev_run", False):
                seconds = time.perf_counter() - self._created
                fail_rank(folder, exception, rank=trainer.global_rank, seconds=seconds)

        run_whatever_handlers_raise(end)

    def _save(self, folder: Path, losses: Sequence[LossPoint] = ()) -> None:
        assert self._record is not None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._save_losses(folder, losses)
            self._record.save(folder)
        except OSError as error:
            warn(f"RunRecorder: the run cannot be recorded ({error}); training continues.")

    def _save_losses(self, folder: Path, losses: Sequence[LossPoint]) -> None:
        points = [*self._other_points, *losses]
        if points:
            write_losses(folder, sorted(points, key=lambda point: (point.step, point.seconds)))

    def _folder(self, trainer: Trainer) -> Path:
        return self._fit_folder or self._dirpath or local_folder(trainer.default_root_dir, self)

    def _training_s(self) -> float:
        return self._seconds + (0.0 if self._started is None else time.perf_counter() - self._started)

    def _metric_name(self, field: str, metrics: Collection[str]) -> str | None:
        return self._names[field] or find_metric(metrics, field)

    def _log_loss_name(self, record: RunRecord) -> None:
        """Logs which metric became the final loss, unless that is obvious; or how to name it."""
        name = record.metric_names.get("val_loss")
        if record.val_loss is None and self._has_validated:
            hint = how_to_name_loss(record.metrics, record.settings, name)
            info(f"RunRecorder recorded no final loss: {hint}.")
        elif name is not None and self._names["val_loss"] is None and name != "val_loss":
            info(f"RunRecorder: the final loss is the metric {name!r}.")

    def _results(self, trainer: Trainer) -> dict[str, Any]:
        """Returns the fields of the record that are known after the fit, on this rank."""
        metrics = {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if value.numel() == 1 and not name.startswith(PREFIX)  # those are in ``comm_time``
        }
        metric_names = {field: self._metric_name(field, metrics) for field in self._names}
        results: dict[str, Any] = {
            "status": "finished" if self._ends_run else "running",
            "seconds": time.perf_counter() - self._created,
            "load_at_end": load_average(),
            "metrics": metrics,
            "metric_names": {field: name for field, name in metric_names.items() if name is not None},
        }
        results |= describe_tuning(trainer.strategy)
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        for monitor in callbacks:
            if isinstance(monitor, CommTimeMonitor):
                results |= _without_duplicates(monitor.summary)
        for monitor in callbacks:
            if isinstance(monitor, SpeedMonitor):
                results["num_timed_steps"] = monitor.num_steps
                rates = {name: getattr(monitor, name) for name in _SHARED_METRICS.values()}
                results |= {name: rate for name, rate in rates.items() if rate is not None}
        return results


def _needs_patience(trainer: Trainer) -> bool:
    """Returns whether ranks must wait for each other with a patience before a collective at the end of the fit.

    Otherwise a rank that ends the fit too late for the collective would make it fail on the others.
    """
    has_group = trainer.world_size > 1 and dist.is_available() and dist.is_initialized()
    return has_group and not getattr(trainer.strategy, "lets_ranks_fail", False)


def _without_duplicates(summary: Mapping[str, float]) -> dict[str, Any]:
    """Returns the fields of a record for a summary of `CommTimeMonitor`, in which each number appears only once."""
    is_observed = summary.get("comm_s") != 0
    shared = {
        field: summary[name] for name, field in _SHARED_METRICS.items() if math.isfinite(summary.get(name, math.nan))
    }
    if not is_observed:
        shared.pop("wire_bytes_per_step", None)
    return {**shared, "comm_time": {name: value for name, value in summary.items() if name not in _SHARED_METRICS}}
