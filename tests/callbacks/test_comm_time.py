"""CommTimeMonitor: what is logged, saved and said, and that training goes on whatever happens to it."""

import contextlib
import csv
import math
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from small_fit import NUM_STEPS, PARAMETERS, Net, fit
from torch.utils.data import DataLoader, TensorDataset

from lightning_commopt import CommOptDDP
from lightning_commopt.callbacks import CommTimeMonitor, SpeedMonitor
from lightning_commopt.callbacks import comm_time as comm_time_module
from lightning_commopt.callbacks.publisher import LOGGED_BY_DEFAULT
from lightning_commopt.measure.clock import HostClock
from lightning_commopt.measure.files import notices, rank_file, read_run
from support.cross_section import sampled
from support.lightnings import (
    Callback,
    CSVLogger,
    LightningModule,
    Logger,
    MisconfigurationException,
    ModelCheckpoint,
    TorchCheckpointIO,
    Trainer,
    callbacks,
)
from support.strategy_models import trainer
from support.warm_ranks import run_ranks

TIMES = [
    "step_s",
    "data_s",
    "forward_s",
    "backward_s",
    "optimizer_s",
    "comm_s",
    "exposed_s",
    "compression_s",
    "wait_s",
]


class MemoryLogger(Logger):
    """A logger that keeps everything, or fails."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.fails = fails
        self.logged: list[tuple[int | None, dict[str, float]]] = []
        self.num_calls = 0

    @property
    def name(self) -> str:
        return "kept"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.num_calls += 1
        if self.fails:
            raise ConnectionError("the server is gone")
        self.logged.append((step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


class SlowRank(Callback):
    """Makes rank 1 slow by far more than anything else takes."""

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_rank == 1:
            time.sleep(0.2)


class Failure(Callback):
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 10:
            raise ArithmeticError("broken on purpose")


def logged_windows(every_n_steps: int, comm_hook: str | None) -> tuple[list[Any], dict[str, float], str]:
    kept, comm_time = MemoryLogger(), CommTimeMonitor(every_n_steps=every_n_steps, num_warmup_steps=4, log="all")
    fit(comm_time, CommOptDDP(comm_hook=comm_hook), logger=kept)
    assert comm_time.verdict is not None
    return kept.logged, comm_time.summary, comm_time.verdict.headline


@pytest.mark.parametrize("comm_hook", [None, "bf16"])
def test_every_window_is_logged_alike_on_all_ranks(comm_hook: str | None) -> None:
    answers = run_ranks(logged_windows, 4, comm_hook)
    for logged, summary, headline in answers:
        assert [step for step, _ in logged] == [3, 7, 9]
        for _, metrics in logged:
            named = {key.removeprefix("comm_time/"): value for key, value in metrics.items()}
            assert named.keys() == summary.keys()
            assert named["gradient_bytes"] == 4 * PARAMETERS
            assert named["wire_bytes"] == (2 if comm_hook else 4) * PARAMETERS
            assert named["compression_ratio"] == (2 if comm_hook else 1)
            for name in TIMES:
                assert 0 <= named[name] <= named[f"{name}_max"] + 1e-12
                assert named[f"{name}_p50"] <= named[f"{name}_p95"] <= named[f"{name}_max"]
            assert 0 < named["exposed_s"] < named["backward_s"] < named["step_s"]
            assert math.isclose(named["samples_per_s"], 6 * named["steps_per_s"])
            assert named["bus_bandwidth"] == named["algorithm_bandwidth"] > 0  # two ranks: 2 (n - 1) / n = 1
        assert headline
    assert repr(answers[0][:2]) == repr(answers[1][:2])  # NaN as well, as one bucket tells no latency


def test_twelve_numbers_are_logged_by_default_and_one_process_has_no_communication() -> None:
    kept = MemoryLogger()
    fit(CommTimeMonitor(every_n_steps=5, save_records=False), devices=1, logger=kept)
    assert len(LOGGED_BY_DEFAULT) == 12
    assert [step for step, _ in kept.logged] == [4, 9]
    for _, metrics in kept.logged:
        assert set(metrics) == {f"comm_time/{name}" for name in LOGGED_BY_DEFAULT}
        assert metrics["comm_time/comm_s"] == metrics["comm_time/exposed_s"] == 0
        assert metrics["comm_time/step_s"] > 0
        assert metrics["comm_time/straggler_rank"] == -1


class DeviceClock(HostClock):
    """The clock of a device that is three steps behind."""

    num_lag_steps = 3


def test_windows_of_a_device_that_is_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, on CUDA steps are lost, or windows are cut at other steps than on CPU."""
    monkeypatch.setattr(comm_time_module, "clock_for", lambda device: DeviceClock())
    for every_n_steps, windows in ((4, [3, 7, 9]), (50, [9])):
        kept, monitor = MemoryLogger(), CommTimeMonitor(every_n_steps=every_n_steps, dirpath=tmp_path)
        fit(monitor, devices=1, logger=kept)
        assert [step for step, _ in kept.logged] == windows
        assert [record.step for record in read_run(tmp_path)[0].steps] == list(range(NUM_STEPS))


def slow_rank() -> dict[str, float]:
    comm_time = CommTimeMonitor(every_n_steps=NUM_STEPS, num_warmup_steps=2)
    fit(comm_time, CommOptDDP(), callbacks=[SlowRank()])
    return comm_time.summary


def test_the_rank_that_the_others_wait_for_is_named() -> None:
    for summary in run_ranks(slow_rank):
        assert summary["straggler_rank"] == 1
        assert summary["wait_s_max"] >= 0.16  # rank 0's; rank 1 sleeps 0.2 s, longer than other processes disturb it


def save_steps(folder: str, callbacks: Sequence[Callback] = ()) -> None:
    monitor, strategy = CommTimeMonitor(every_n_steps=3, dirpath=folder), CommOptDDP(bucket_cap_mb=0.0001)
    fit(monitor, strategy, callbacks=callbacks, accumulate_grad_batches=2)


def test_every_step_is_saved(tmp_path: Path) -> None:
    run_ranks(save_steps, str(tmp_path))
    ranks = read_run(tmp_path)
    assert [records.rank for records in ranks] == [0, 1]
    assert notices(ranks) == []
    for records in ranks:
        assert [record.step for record in records.steps] == list(range(NUM_STEPS))
        assert records.header["comm_hook"] == "none"
        for record in records.steps[3:]:
            assert record.totals.gradient_bytes == 4 * PARAMETERS
            assert record.num_samples == 3 * 2
            assert [phase.name for phase in record.phases].count("forward") == 2
            assert sorted(name for info in record.layout.values() for name in info.names) == [
                f"layers.{index}.{kind}" for index in (0, 2) for kind in ("bias", "weight")
            ]


class SearchesTwice(callbacks.LearningRateFinder):
    """Searches at the start of the fit and of the second epoch."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 1:
            self.lr_find(trainer, pl_module)


class WithRate(Net):
    lr = 0.1


def save_steps_after_searches(folder: str) -> int:
    search = SearchesTwice(num_training_steps=4, early_stop_threshold=None)
    options: dict[str, Any] = {"callbacks": [search], "net": WithRate(), "default_root_dir": folder, "max_steps": -1}
    monitor, strategy = CommTimeMonitor(dirpath=folder), CommOptDDP(comm_hook="bf16")
    return fit(monitor, strategy, max_epochs=2, **options).trainer.global_step


def test_a_search_is_no_part_of_a_step(tmp_path: Path) -> None:
    """If it fails, the step that follows has the gradient sync of all steps in which a learning rate was searched."""
    (num_steps, _) = run_ranks(save_steps_after_searches, str(tmp_path))
    assert num_steps > 3 * NUM_STEPS
    for records in read_run(tmp_path):
        assert [record.step for record in records.steps] == list(range(num_steps))
        assert [[bucket.backward for bucket in record.buckets] for record in records.steps] == [[0]] * num_steps
        assert all([phase.name for phase in record.phases].count("other") <= 2 for record in records.steps)
        assert {record.phases[0].name for record in records.steps} == {"data"}


def breaks(folder: str) -> str:
    with pytest.raises(ArithmeticError):
        save_steps(folder, [Failure()])
    return "raised"


def test_steps_before_a_failure_are_saved(tmp_path: Path) -> None:
    run_ranks(breaks, str(tmp_path))
    ranks = read_run(tmp_path)
    assert [records.rank for records in ranks] == [0, 1]
    for records in ranks:
        assert [record.step for record in records.steps] == [0, 1, 2, 3, 4]


def same_with_and_without(options: dict[str, Any]) -> bool:
    runs = [fit(comm_time, CommOptDDP(**options)) for comm_time in (None, CommTimeMonitor(every_n_steps=2))]
    pairs = zip(*(net.state_dict().values() for net in runs), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize(
    "options", sampled([{}, {"comm_hook": "int8"}, {"static_graph": True}], by_default=[{"comm_hook": "int8"}])
)
def test_no_bit_of_what_is_trained_changes(options: dict[str, Any]) -> None:
    assert all(run_ranks(same_with_and_without, options))


def warned(recorded: list[warnings.WarningMessage]) -> list[str]:
    return [str(warning.message) for warning in recorded if "CommTimeMonitor" in str(warning.message)]


def test_a_logger_that_fails_does_not_end_training(tmp_path: Path) -> None:
    broken, kept = MemoryLogger(fails=True), MemoryLogger()
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        fit(CommTimeMonitor(every_n_steps=2, dirpath=tmp_path), devices=1, logger=[broken, kept])
    assert len(kept.logged) == 5
    assert broken.num_calls == 1
    assert len(warned(recorded)) == 1
    assert "the server is gone" in warned(recorded)[0]


def test_a_disk_that_cannot_be_written_does_not_end_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        fit(CommTimeMonitor(every_n_steps=2, dirpath=tmp_path / "file"), devices=1)
    assert len(warned(recorded)) == 1


def test_csv_logger_has_the_columns(tmp_path: Path) -> None:
    fit(CommTimeMonitor(every_n_steps=5), devices=1, logger=CSVLogger(str(tmp_path), name="", version="csv"))
    with (tmp_path / "csv" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [4, 9]
    assert all(float(row["comm_time/step_s"]) > 0 for row in rows)
    assert rank_file(tmp_path / "csv", 0).exists()  # beside the logger's own file


class StepsLater(Net):
    """Takes optimizer steps in both epochs on rank 0, in the second one on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(super().training_step(batch, batch_idx))
        if self.current_epoch >= self.global_rank:
            self.optimizers().step()  # type: ignore[union-attr]


def steps_on_some_ranks() -> list[float]:
    comm_time = CommTimeMonitor(num_warmup_steps=0, save_records=False, print_summary=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(CommOptDDP(), callbacks=[comm_time]).fit(
            StepsLater(), DataLoader(TensorDataset(torch.randn(24, 8)), batch_size=3)
        )
    return [comm_time.metrics["step_s"], comm_time.summary["step_s"]]


def test_an_epoch_in_which_a_rank_takes_no_step_hangs_nobody() -> None:
    """If it fails, ranks with steps to publish wait at the end of an epoch for a rank that has none."""
    first, second = run_ranks(steps_on_some_ranks, group_timeout_s=20, limit_s=100)
    assert first == second
    assert min(first) > 0


class LateEnd(Net):
    """Rank 1 ends its epoch when rank 0 has ended its fit."""

    def __init__(self, ended: Path) -> None:
        super().__init__()
        self.ended = ended

    def on_train_epoch_end(self) -> None:
        while self.trainer.global_rank == 1 and not self.ended.exists():
            time.sleep(0.01)


def ends_late(folder: Path) -> tuple[list[str], list[int], list[dict[str, float]]]:
    comm_time = CommTimeMonitor(every_n_steps=4, num_warmup_steps=0, save_records=False, print_summary=False)
    ended = folder / "ended"
    num_steps, summaries = [], []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for net, limit_s in ((LateEnd(ended), 0.2), (Net(), 60.0)):
            with patch.object(comm_time_module, "_LAST_WINDOW_LIMIT_S", limit_s):
                fit(comm_time, CommOptDDP(), net=net)
            num_steps.append(comm_time._totals.num_gathered)
            summaries.append(comm_time.summary)
            if dist.get_rank() == 0:
                ended.touch()
    return [str(it.message) for it in warned if "CommTimeMonitor" in str(it.message)], num_steps, summaries


@pytest.mark.exhaustive
def test_a_rank_that_ends_late_keeps_nobody_waiting(tmp_path: Path) -> None:
    """If it fails, a fit waits at its end for the slowest rank, or the next one takes its steps for its own."""
    (warned, num_steps, (_, summary)), (others, other_num_steps, (_, other)) = run_ranks(ends_late, tmp_path)
    assert warned == [
        "CommTimeMonitor: not all ranks have sent their last steps within 0.2 s, so the summary does not include"
        " these steps."
    ]
    assert others == []
    assert (num_steps, other_num_steps) == ([8, NUM_STEPS], [NUM_STEPS] * 2)
    assert summary == pytest.approx(other, nan_ok=True)


class SlowFiles(TorchCheckpointIO):
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.05)
        super().save_checkpoint(*args, **kwargs)


def test_a_checkpoint_is_no_part_of_a_step(tmp_path: Path) -> None:
    """If it fails, a step counts the writing of a checkpoint as a wait for data, or not the wait that follows it."""
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, save_weights_only=True)
    options = {"plugins": [SlowFiles()], "enable_checkpointing": True, "max_steps": 3}
    fit(CommTimeMonitor(dirpath=tmp_path), devices=1, callbacks=[saving], **options)
    first, *others = read_run(tmp_path)[0].steps
    assert [phase.name for phase in first.phases][:2] == ["data", "forward"]
    assert len(others) == 2
    for record in others:
        before, after, forward = record.phases[:3]
        assert (before.name, after.name, forward.name) == ("data", "data", "forward")
        assert after.start_s - before.end_s >= 0.05
        assert after.end_s == forward.start_s
        assert record.totals.step_s <= record.phases[-1].end_s - before.start_s - 0.05 + 1e-9


class StepsUncounted(Net):
    """Steps with torch's own optimizer, once in two batches, which the Trainer does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(super().training_step(batch, batch_idx))
        if batch_idx % 2:
            self.optimizers(use_pl_optimizer=False).step()  # type: ignore[union-attr]


class StepsByItself(StepsUncounted):
    """Has an optimizer that the Trainer does not have, so that each batch counts as a step."""

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        return torch.optim.SGD(self.layers.parameters(), lr=0.1)

    def configure_optimizers(self) -> None:  # type: ignore[override]
        pass


@pytest.mark.parametrize(("kind", "batches_per_step"), [(StepsUncounted, 2), (StepsByItself, 1)])
def test_steps_that_the_trainer_does_not_count_are_measured(
    kind: type[Net], batches_per_step: int, tmp_path: Path
) -> None:
    """If it fails, such a fit is not measured, and keeps the marks of all its batches in memory."""
    comm_time, speed = CommTimeMonitor(num_warmup_steps=0, dirpath=tmp_path), SpeedMonitor(num_warmup_steps=1)
    net = fit(comm_time, devices=1, net=kind(), max_epochs=1, callbacks=[speed])
    assert net.trainer.global_step == 0
    assert comm_time.summary["step_s"] > 0
    num_steps = 4 * NUM_STEPS // batches_per_step
    assert speed.num_steps == num_steps - 1
    records = read_run(tmp_path)[0].steps
    assert [record.num_samples for record in records] == [3 * batches_per_step] * num_steps
    assert all([phase.name for phase in record.phases].count("forward") >= batches_per_step for record in records)


def test_a_second_fit_begins_anew(tmp_path: Path) -> None:
    comm_time = CommTimeMonitor(every_n_steps=5, dirpath=tmp_path)
    fits = set()
    for num_fits in (1, 2):
        fit(comm_time, devices=1)
        fits.add(read_run(tmp_path)[0].header["fit"])
        assert len(read_run(tmp_path)[0].steps) == NUM_STEPS
        lines = rank_file(tmp_path, 0).read_text()
        assert lines.count('"type": "run"') == num_fits
        assert lines.count('"type":"step"') == num_fits * NUM_STEPS
    assert len(fits) == 2


def test_two_monitors_write_to_two_folders(tmp_path: Path) -> None:
    """If it fails, the file of a rank has steps of two monitors in turn, of which readers take the last few."""
    first, second = (CommTimeMonitor(every_n_steps=number, dirpath=tmp_path) for number in (2, 3))
    with pytest.raises(MisconfigurationException, match="writes the same files"):
        fit(first, devices=1, callbacks=[second])
    fit(first, devices=1, callbacks=[CommTimeMonitor(dirpath=tmp_path / "other"), CommTimeMonitor(save_records=False)])
    for folder in (tmp_path, tmp_path / "other"):
        assert [record.step for record in read_run(folder)[0].steps] == list(range(NUM_STEPS))


def test_a_short_fit_has_no_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    comm_time = CommTimeMonitor(num_warmup_steps=NUM_STEPS, dirpath=tmp_path)
    fit(comm_time, devices=1)
    assert comm_time.summary == {}
    assert comm_time.verdict is None


def test_summary_is_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(CommTimeMonitor(num_warmup_steps=0, dirpath=tmp_path), devices=1)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith(" forward ") for line in lines)
    assert lines[-1] == f"Files: {tmp_path}. Next: commopt trace {tmp_path}"
    fit(CommTimeMonitor(num_warmup_steps=0, dirpath=tmp_path, print_summary=False), devices=1)
    assert capsys.readouterr().out == ""


def test_a_summary_that_nobody_reads_does_not_end_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a fit behind a pipe to ``head`` ends as soon as it is trained, before it is saved."""
    for is_closed in (True, False):
        reader, writer = os.pipe()
        os.close(reader)
        stdout = os.fdopen(writer, "w")
        monkeypatch.setattr(sys, "stdout", stdout)
        if is_closed:
            stdout.close()
        comm_time = CommTimeMonitor(num_warmup_steps=0, dirpath=tmp_path)
        assert fit(comm_time, devices=1).trainer.state.finished
        assert comm_time.summary
        monkeypatch.undo()
        with contextlib.suppress(BrokenPipeError):  # what an older rich has not written is left in its buffer
            stdout.close()


class Saver(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def test_steps_are_counted_on_after_a_resume(tmp_path: Path) -> None:
    path, kept = tmp_path / "half.ckpt", MemoryLogger()
    fit(CommTimeMonitor(save_records=False), devices=1, callbacks=[Saver(path)])
    torch.load(path, weights_only=True)
    fit(CommTimeMonitor(every_n_steps=5, save_records=False), devices=1, logger=kept, max_steps=20, ckpt_path=path)
    assert [step for step, _ in kept.logged] == [14, 19]
