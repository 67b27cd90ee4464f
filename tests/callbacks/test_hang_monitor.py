"""HangMonitor, on real ranks of which one keeps the others waiting."""

import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hanging_fits import LosingBroadcast, fit_slowly, fit_with_faults
from torch.torch_version import TorchVersion

from lightning_commopt.callbacks import HangMonitor, hang_monitor
from lightning_commopt.compat.torch import FLIGHT_RECORDER_ON, flight_records
from lightning_commopt.watch.hangs import rank_side
from lightning_commopt.watch.hangs.marks import BATCH, PHASES, first_of_stage
from lightning_commopt.watch.hangs.records import read_hang_report
from support.lightnings import DDPStrategy, needs_sigterm_broadcast
from support.marked_processes import Program
from support.ranks import run_ranks
from support.strategy_models import Tiny, loader, trainer

_FAULTS = [("forward", "ddp")]
_MORE_FAULTS = [
    ("forward", "int8"),
    ("stopped", "int8"),
    ("stopped", "native"),
    ("callbacks", "native"),
    ("hook", "ddp"),
]
HOOKS = {"callbacks": "Holding.on_before_optimizer_step", "hook": "Blocking.on_train_batch_end"}
_HAS_RECORDER = TorchVersion(torch.__version__) >= "2.11"
"""Whether torch records gloo's collectives by itself, also in ranks that have made a group before the callback."""
_SYNC = "rank 0 waits in the gradient sync of bucket 0 (layers.*) of step 4"


@pytest.mark.parametrize(
    "faults", [_FAULTS, pytest.param(_MORE_FAULTS, marks=pytest.mark.exhaustive)], ids=["some", "more"]
)
def test_the_rank_that_is_waited_for_is_named(faults: list[tuple[str, str]], tmp_path: Path) -> None:
    """If it fails, a hang is not reported, or somebody else is blamed for it."""
    reports, same = run_ranks(fit_with_faults, tmp_path, faults)
    assert reports == same
    for (fault, strategy), report in zip(faults, reports, strict=True):
        check(fault, report)
        snapshots = {
            snapshot.rank: snapshot for snapshot in read_hang_report(tmp_path / f"{fault}-{strategy}").snapshots
        }
        assert any("hanging_fits.py" in frame for frame in frames_of(snapshots[1])) == (fault != "stopped")


@pytest.mark.parametrize("value", [None, "0"])
def test_collectives_are_recorded_unless_one_has_chosen(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, reports lack operations with torch before 2.11, or record what somebody has turned off."""
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        monkeypatch.delenv(name, raising=False)
    if value is not None:
        monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", value)  # the older name counts, too
    HangMonitor()
    chosen = {name: number for name, number in os.environ.items() if name.endswith("_BUFFER_SIZE")}
    assert chosen == (FLIGHT_RECORDER_ON if value is None else {"TORCH_NCCL_TRACE_BUFFER_SIZE": value})


def _fit_twice(folder: Path) -> list[bool]:
    """Returns whether a fit reports that records are missing, and one in which torch has recorded nothing."""
    reported = []
    nothing: dict[str, Any] = {"entries": []}
    for records in (flight_records, lambda: nothing):
        with (
            mock.patch.object(hang_monitor, "flight_records", records),
            mock.patch.object(hang_monitor, "info") as info,
        ):
            trainer("ddp", callbacks=[HangMonitor(dirpath=folder)], max_epochs=1).fit(Tiny(), loader(16))
        reported.append(any("records no collectives" in call.args[0] for call in info.mock_calls))
    return reported


def test_a_message_if_collectives_are_not_recorded(tmp_path: Path) -> None:
    """If it fails, nobody learns why reports lack operations, or 'abort' ends nobody, with torch before 2.11."""
    for of_recorded, of_unrecorded in run_ranks(_fit_twice, tmp_path):
        assert of_unrecorded
        assert not (of_recorded and _HAS_RECORDER)


_BLOCKING = "Blocking.on_train_batch_end"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("fault", "strategy", "rank", "phase", "wait"),
    [
        ("forward", "diloco", 1, "forward of step 4", "exchange 0 of DiLoCo's fragment 0 (layers.*) of step 4"),
        pytest.param(
            "first_hook",
            "ddp",
            0,
            f"{_BLOCKING} of step 5",
            "Lightning's broadcast of SIGTERM before a batch of step 5",
            marks=needs_sigterm_broadcast,
        ),
        ("window", "ddp", 1, f"{_BLOCKING} of step 6", "a meeting of all ranks of step 6"),
        ("buffers", "ddp", 0, "Holding.on_train_batch_start of step 4", "broadcast"),
    ],
)
def test_what_the_other_rank_waits_in_is_named(
    fault: str, strategy: str, rank: int, phase: str, wait: str, tmp_path: Path
) -> None:
    """If it fails, a rank that waits in one of these collectives is said to be slow itself, and is never aborted."""
    ((report,), _) = run_ranks(fit_with_faults, tmp_path, [(fault, strategy)])
    assert report["ranks"] == [rank]
    assert report["sentence"].startswith(f"rank {rank} is still in {phase}")
    assert f"; rank {1 - rank} waits in {wait}" in report["sentence"]


def _lose_broadcast(folder: Path) -> tuple[list[str], int]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = trainer(DDPStrategy(), callbacks=[HangMonitor(dirpath=folder), LosingBroadcast()], max_epochs=1)
        run.fit(Tiny(), loader())
    assert "_broadcast_sigterm_tensor" not in vars(run.fit_loop.epoch_loop)
    return [str(one.message) for one in caught if "HangMonitor" in str(one.message)], run.global_step


@needs_sigterm_broadcast
def test_a_broadcast_that_lightning_gives_up_is_reported(tmp_path: Path) -> None:
    """If it fails, Lightning ignores a timeout in its own broadcast, and nobody learns why training breaks later."""
    for messages, num_steps in run_ranks(_lose_broadcast, tmp_path):
        assert num_steps == 3
        (message,) = messages
        assert "Lightning's broadcast of SIGTERM, before a batch of step 1, has failed" in message
        assert "(RuntimeError: Timed out waiting 2000ms)" in message


def _fit_without_processes(folder: Path) -> tuple[list[str], int]:
    def refuse(*args: Any, **options: Any) -> None:
        raise BlockingIOError("too many processes")

    rank_side.subprocess.Popen = refuse  # type: ignore[assignment, misc]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = trainer(DDPStrategy(), callbacks=[HangMonitor(dirpath=folder)], max_epochs=1)
        run.fit(Tiny(), loader())
    return [str(one.message) for one in caught if "HangMonitor" in str(one.message)], run.global_step


def test_a_fit_goes_on_without_its_watcher(tmp_path: Path) -> None:
    """If it fails, what should find hangs keeps a fit from beginning on a host that allows no more processes."""
    message = "HangMonitor has no effect: its watcher cannot be started (too many processes)."
    assert run_ranks(_fit_without_processes, tmp_path) == [([message], 3)] * 2


def check(fault: str, report: dict[str, Any]) -> None:
    assert report["ranks"] == [1]
    assert report["step"] == 4 + (fault == "hook")
    if _HAS_RECORDER or fault == "stopped":  # of int8 our hook marks the buckets
        assert report["sentence"].endswith(_SYNC) or fault in HOOKS, report["sentence"]
    assert report["hints"]
    if fault == "stopped":
        assert (report["kind"], report["phase"]) == ("stopped", "forward")
        assert report["sentence"].startswith("rank 1 is stopped (process ")
    else:
        assert (report["kind"], report["phase"]) == ("late", "callbacks" if fault in HOOKS else "forward")
        assert report["sentence"].startswith(f"rank 1 is still in {HOOKS.get(fault, 'forward')} of step ")
        assert report["verdict"] == "non-communication slow"  # as it went on after the report
        assert any("callbacks and loggers" in hint for hint in report["hints"]) == (fault in HOOKS)
        assert "hanging_fits.py" in report["sentence"]


def frames_of(snapshot: Any) -> list[str]:
    return [frame for threads in snapshot.stacks.values() for frames in threads.values() for frame in frames]


@pytest.mark.exhaustive
def test_phases_that_take_long_are_no_hangs(tmp_path: Path) -> None:
    """If it fails, a first forward, a validation, a checkpoint, a test or a hook's collectives raise a false alarm."""
    assert run_ranks(fit_slowly, tmp_path, 2.0) == [[], []]


def run_program(fault: str, strategy: str, folder: Path) -> tuple[str, int]:
    """Returns what a job on two ranks has printed, and its status; all its processes have ended by themselves."""
    program = Program([str(Path(__file__).parent / "hanging_fits.py"), str(folder), fault, strategy], folder)
    status = program.finish(240)
    return program.output, status


@pytest.mark.exhaustive
def test_abort_ends_all_ranks(tmp_path: Path) -> None:
    """If it fails, ranks in different collectives look the same, or a job that is dead keeps its devices."""
    output, status = run_program("collective", "int8", tmp_path)
    assert status != 0
    (sentence,) = sentences_in(output)
    assert "rank 1 has" in sentence, sentence
    assert "all_gather (3,)" in sentence, sentence
    found = read_hang_report(tmp_path)
    assert (found.diagnosis.kind, found.diagnosis.ranks) == ("mismatch", (1,))
    assert found.diagnosis.verdict == "communication hang"
    assert f"HangMonitor: {found.diagnosis.sentence}" == sentence


def sentences_in(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("HangMonitor: ")]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("fault", "kind", "beginning", "hint"),
    [
        (
            "exit",
            "failed",
            "rank 1 has called sys.exit(3) in forward of step 4 (callbacks/hanging_fits.py:",
            "Call sys.exit on all ranks",
        ),
        (
            "should_stop",
            "ended",
            "rank 1 has left training's batches after step 5, as trainer.should_stop was set there, and is in the end",
            "reduce_boolean_decision(stop, all=False)",
        ),
        (
            "terminated",
            "terminated",
            "rank 1 has ",  # received SIGTERM and waits, or with a Lightning that does not wait in its handler, ended
            "SIGTERM comes from a scheduler",
        ),
        (
            "killed",
            "died",
            "rank 1 has died in forward of step 4: process ",
            "memory",
        ),
    ],
)
def test_what_has_ended_a_rank_is_named(fault: str, kind: str, beginning: str, hint: str, tmp_path: Path) -> None:
    """If it fails, the reason of a rank's end is guessed, and the hints lead away from it."""
    output, status = run_program(fault, "ddp", tmp_path)
    assert status != 0
    (sentence,) = sentences_in(output)
    found = read_hang_report(tmp_path).diagnosis
    assert sentence.startswith(f"HangMonitor: {beginning}"), sentence
    assert (found.kind, found.ranks) == (kind, (1,))
    assert hint in found.hints[0]


@pytest.mark.exhaustive
def test_an_interrupted_job_raises_no_alarm(tmp_path: Path) -> None:
    """If it fails, Ctrl-C looks like a process that is out of memory: Lightning kills the other ranks after it."""
    output, status = run_program("interrupt", "ddp", tmp_path)
    assert status != 0
    assert "Detected KeyboardInterrupt" in output
    assert sentences_in(output) == []
    assert not (tmp_path / "hangs" / "report.json").exists()


@pytest.mark.exhaustive
def test_a_long_end_of_one_rank_is_no_hang(tmp_path: Path) -> None:
    """If it fails, an upload in ``on_fit_end`` of a rank for which nobody waits ends the job."""
    output, status = run_program("long_end", "ddp", tmp_path)
    assert (status, sentences_in(output)) == (0, []), output


class MissingMonitor:
    """A watch whose other monitors never come up."""

    num_waits = 0

    def meet(self) -> bool:
        self.num_waits += 1
        return False

    def enter(self, phase: int, step: int) -> None:
        pass


def test_a_missing_monitor_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a monitor that never starts costs a minute at the start and end of every validation."""
    monitor, watched = HangMonitor(), MissingMonitor()
    monkeypatch.setattr(hang_monitor, "WatchedRank", lambda **options: watched)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    trainer: Any = SimpleNamespace(training=False, validating=False, sanity_checking=False, world_size=2)
    trainer.log_dir, trainer.global_step = "logs", 0
    trainer.strategy = SimpleNamespace(root_device=torch.device("cpu"), launcher=None)
    module: Any = None
    monitor.setup(trainer, module, "validate")
    with pytest.warns(UserWarning, match="not all ranks' monitors have started within a minute"):
        monitor.on_validation_start(trainer, module)
    for _ in range(3):  # a warning is an error in tests
        monitor.on_validation_epoch_end(trainer, module)
        monitor.on_validation_start(trainer, module)
    assert watched.num_waits == 1


def test_nothing_is_marked_after_a_connection_was_lost() -> None:
    """If it fails, a rank that Lightning lets go on without the others is reported in the phase after the loss."""
    monitor = HangMonitor()
    watched = monitor._watched = mock.Mock()
    error = RuntimeError("Connection closed by peer")
    with pytest.warns(UserWarning, match="broadcast of SIGTERM, before a batch of step 0, has failed"):
        monitor._report_lost_broadcast(error)
    monitor._enter("backward")
    watched.close.assert_called_once_with(error)
    watched.enter.assert_not_called()


def _in_validation(function: str, *, is_sanity_check: bool = False) -> tuple[HangMonitor, mock.Mock, Any]:
    """Returns a monitor in a validation, its rank, which is watched, and a Trainer."""
    monitor, watched = HangMonitor(), mock.Mock()
    monitor._watched, monitor._stage = watched, first_of_stage("validation")
    return monitor, watched, SimpleNamespace(sanity_checking=is_sanity_check, state=SimpleNamespace(fn=function))


def _phases(watched: mock.Mock) -> list[str]:
    return [PHASES[call.args[0]].where for call in watched.enter.call_args_list]


def test_batches_of_a_validation() -> None:
    """If it fails, a rank that hangs in a validation is reported in another phase or batch."""
    monitor, watched, trainer = _in_validation("fit")
    monitor.on_validation_batch_start(trainer, mock.Mock(), None, 7)
    monitor.on_validation_batch_end(trainer, mock.Mock(), None, None, 8)
    assert _phases(watched) == ["in validation", "in the dataloader of validation"]
    assert [call.args for call in watched.mark.call_args_list] == [(BATCH, 0, 7), (BATCH, 0, 8)]


@pytest.mark.parametrize(
    ("function", "is_sanity_check", "expected"),
    [
        ("fit", True, "in the start or end of validation"),
        ("fit", False, "in the dataloader"),
        ("validate", False, "in the end of the run"),
    ],
)
def test_what_follows_a_validation(function: str, is_sanity_check: bool, expected: str) -> None:
    """If it fails, a rank that hangs after a validation is reported in another phase, with the time of that one."""
    monitor, watched, trainer = _in_validation(function, is_sanity_check=is_sanity_check)
    monitor.on_validation_end(trainer, mock.Mock())
    assert _phases(watched) == [expected]
