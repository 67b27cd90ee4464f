"""What a watcher makes of its rank's end, and of what others have reported."""

import json
import os
import queue
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_commopt.watch import times
from lightning_commopt.watch.hangs import marks as kinds
from lightning_commopt.watch.hangs import watcher as watching
from lightning_commopt.watch.hangs.diagnosis import diagnose
from lightning_commopt.watch.hangs.flight_recorder import Signature
from lightning_commopt.watch.hangs.marks import BACKWARD, DATA, FORWARD, MarkWriter
from lightning_commopt.watch.hangs.observation import Observation, WatcherSettings
from lightning_commopt.watch.hangs.snapshot import RankSnapshot
from lightning_commopt.watch.hangs.transport import Address, Server, ask
from support.silent_link import FakeRank, SilentLink, watcher_of

LOST = "RuntimeError: [pair.cc:545] Read error [127.0.0.1]:1: Connection reset by peer"
TRAINER = ("/x/site-packages/lightning/pytorch/trainer/trainer.py", 9, "fit")
NO_PROCESS = 2**22 + 1
"""Above the highest number that Linux gives to a process."""


class EndingRank(FakeRank):
    """Goes on, and fails as soon as anybody looks at it."""

    def snapshot(self, *, is_whole: bool = True) -> RankSnapshot:
        self.ended = "failed"
        return RankSnapshot(rank=0, host="a", state="failed", detail="KeyError: 'x'", ended_unix_s=1.0)


def make_watcher(
    folder: Path, rank: Any, other_port: int, *, action: str, pid: int = NO_PROCESS, **settings: Any
) -> tuple[watching.Watcher, int]:
    """Returns the watcher of rank 0 of two, and its port."""
    watcher, port = watcher_of(rank, folder / "hangs", pid=pid, action=action, **settings)
    watcher.receive({"peers": [["127.0.0.1", 1, "a"], ["127.0.0.1", other_port, "a"]]})
    return watcher, port


@pytest.mark.parametrize("is_aborted", [False, True])
def test_what_follows_from_an_abort_is_no_report(is_aborted: bool, tmp_path: Path, monkeypatch: Any) -> None:
    """If it fails, a rank that fails because all are being ended writes its own report over that of the cause.

    Or the report lacks the reason why NCCL's RAS has not answered.
    """
    monkeypatch.setenv("NCCL_RAS_ADDR", "127.0.0.1:1")
    monkeypatch.setattr(times, "DEATH_S", 0.0)
    monkeypatch.setattr(times, "HANG_LOOK_S", 0.01)
    other = Server("127.0.0.1", "key", lambda question: RankSnapshot(rank=1, host="a").to_plain())
    rank = EndingRank()
    watcher, port = make_watcher(tmp_path, rank, other.port, action="report", has_gpu=True)
    thread = threading.Thread(target=watcher.run)
    thread.start()
    ask(Address("127.0.0.1", port, "a"), "key", {"reported": is_aborted, "abort": is_aborted}, 60)
    rank.ended = "failed"
    thread.join()
    path = tmp_path / "hangs" / "report.json"
    assert path.exists() == (not is_aborted)
    if not is_aborted:
        report = json.loads(path.read_text())
        assert (report["kind"], report["ranks"], report["nccl_ras"]) == ("failed", [0], None)
        assert "NCCL RAS: nothing listens at 127.0.0.1:1" in report["snapshots"][0]["missing"]


def test_a_rank_that_raises_the_same_after_a_long_hook_is_left_alone(tmp_path: Path, monkeypatch: Any) -> None:
    """If it fails, ranks that all raise and catch the same are ended, as one was met in a collective on its way."""
    for name in ("HANG_LOOK_S", "CONFIRM_S", "DEATH_S"):
        monkeypatch.setattr(times, name, 0.01)
    monkeypatch.setattr(watching, "end_rank", lambda *_: None)  # it would be the process of this test
    heard: list[dict[str, Any]] = []
    passing = RankSnapshot(rank=1, host="a", phase=DATA, idle_s=100.0, limit_s=60.0, called="broadcast")
    raised = RankSnapshot(rank=1, host="a", state="failed", detail="KeyError: 'x'", ended_unix_s=2.0)

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        heard.append(question)
        looks = [each for each in heard if "state" in each]
        return (passing if len(looks) < 2 else raised).to_plain()

    rank = EndingRank()
    other = Server("127.0.0.1", "key", answer)
    watcher, _ = make_watcher(tmp_path, rank, other.port, action="abort", pid=os.getpid())
    rank.ended = "failed"
    watcher.run()
    assert sum("state" in question for question in heard) >= 2
    assert not any("abort" in question for question in heard)
    assert not (tmp_path / "hangs" / "report.json").exists()


class StuckRank(EndingRank):
    """Is in its dataloader for ever."""

    idle_s = 100.0

    def snapshot(self, *, is_whole: bool = True) -> RankSnapshot:
        return stuck(0)


def stuck(rank: int, **fields: Any) -> RankSnapshot:
    return RankSnapshot(rank=rank, host="a", phase=DATA, idle_s=100.0, limit_s=60.0, innermost="a.py:1 in f", **fields)


def test_ranks_are_ended_once_one_waits(tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    """If it fails, ``action="abort"`` ends ranks that hold up nobody, or, once they do, never does."""
    for name in ("HANG_LOOK_S", "ASK_AGAIN_S", "CONFIRM_S"):
        monkeypatch.setattr(times, name, 0.01)
    heard: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    called: list[str | None] = [None]

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        heard.put(question)
        return stuck(1, called=called[0]).to_plain()

    watcher, _ = make_watcher(tmp_path, StuckRank(), Server("127.0.0.1", "key", answer).port, action="abort")
    thread = threading.Thread(target=watcher.run)
    thread.start()
    while "reported" not in (question := heard.get(timeout=60)):
        pass
    assert question == {"reported": True, "abort": False}
    for _ in range(10):
        assert not heard.get(timeout=60).get("abort")  # it keeps asking
    called[0] = "all_reduce"
    thread.join(60)
    assert not thread.is_alive()
    printed = capfd.readouterr().err
    assert printed.count("HangMonitor: ranks 0, 1 are still in the dataloader") == 1
    assert printed.count("Ending all ranks, because action='abort' is set.") == 1


@pytest.mark.parametrize("is_writable", [True, False])
def test_a_report_that_cannot_be_written_names_no_folder(is_writable: bool, tmp_path: Path, capfd: Any) -> None:
    """If it fails, whoever looks for the stacks finds nothing where they are said to be."""
    if not is_writable:
        (tmp_path / "hangs").touch()  # a file where the folder should be, which stops root too
    other = Server("127.0.0.1", "key", lambda question: {})
    watcher, _ = make_watcher(tmp_path, StuckRank(), other.port, action="report")
    snapshots = [stuck(0), stuck(1, called="all_reduce")]
    watcher._print_and_write(diagnose(snapshots), snapshots, aborts=False)
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("  Stacks and collectives of all ranks: ")
    assert ("commopt doctor" in last, "cannot be written ([Errno" in last) == (is_writable, not is_writable)


def failed_rank(phase: int, operations: list[tuple[str, bool]], raised_in: tuple[str, int, str]) -> RankSnapshot:
    """Returns the snapshot of a rank of two buckets that lost its connection after it had called collectives."""
    writer = MarkWriter()
    writer.write(kinds.PHASE, phase, 3)
    settings = WatcherSettings(rank=0, host="a", pid=NO_PROCESS, fit_thread=(1, 1), after_s=60.0)
    observation = Observation(settings, marks_fd=writer.fd, stacks_fd=-1, link=SilentLink())
    observation.learn({"buckets": [[0, ["a"]], [1, ["b"]]], "are_all": True})
    entries = [
        {
            "collective_seq_id": number,
            "process_group": ["0", ""],
            "profiling_name": f"gloo:{operation}",
            "input_sizes": [[number]],
            "retired": is_done,
            "time_created_ns": (time.time() + 1) * 1e9,
        }
        for number, (operation, is_done) in enumerate(operations, start=1)
    ]
    dump = {"collectives": {"entries": entries}}
    observation.learn({"ended": "failed", "detail": LOST, "raised": [raised_in, TRAINER], "dump": dump})
    return observation.snapshot()


@pytest.mark.parametrize(
    ("operations", "bucket"),
    [
        ([("all_reduce", True), ("all_reduce", True)], 1),
        ([("all_reduce", True), ("all_reduce", False)], 1),
        ([("all_reduce", False), ("all_reduce", False)], 0),
        ([("all_reduce", True), ("all_reduce", True), ("all_gather", True)], None),
    ],
)
def test_the_bucket_in_which_a_connection_was_lost(operations: list[tuple[str, bool]], bucket: int | None) -> None:
    """If it fails, a rank that another's death has ended is not reported as in gradient sync, or in the wrong one."""
    found = failed_rank(BACKWARD, operations, ("/x/site-packages/torch/autograd/graph.py", 3, "backward"))
    assert (found.bucket, found.is_consequence) == (bucket, True)


def test_the_collective_in_which_a_connection_was_lost() -> None:
    """If it fails, an exception is not traced to a collective, or one of another kind is."""
    own = ("/home/me/project/train.py", 7, "training_step")
    within = ("/x/site-packages/torch/distributed/distributed_c10d.py", 5, "all_gather")
    operations = [("all_reduce", True), ("all_gather", True)]
    found = failed_rank(FORWARD, operations, within)
    current = found.current_collective()
    assert current is not None
    assert (current.signature, current.number) == (Signature("0", "all_gather", ((2,),), ()), 2)
    found = failed_rank(FORWARD, operations, own)
    assert (found.place, found.current_collective()) == ("project/train.py:7 in training_step", None)
