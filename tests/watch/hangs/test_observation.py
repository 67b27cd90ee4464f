"""How a watcher follows its rank: how long that has been idle, how it has ended, where its workers are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from lightning_commopt.watch import times
from lightning_commopt.watch.hangs import marks as kinds
from lightning_commopt.watch.hangs import observation
from lightning_commopt.watch.hangs import process as processes
from lightning_commopt.watch.hangs.marks import BACKWARD, FORWARD, MarkWriter
from lightning_commopt.watch.hangs.observation import Observation, WatcherSettings
from lightning_commopt.watch.hangs.snapshot import RankSnapshot
from lightning_commopt.watch.hangs.stacks import Frame


def _follow(pid: int, writer: MarkWriter) -> Observation:
    settings = WatcherSettings(rank=0, host="a", pid=pid, fit_thread=(1, pid), after_s=60.0)
    return Observation(settings, marks_fd=writer.fd, stacks_fd=-1, link=None)  # type: ignore[arg-type]


def test_limits_are_those_of_the_phases_that_a_rank_has_marked() -> None:
    """If it fails, a hang in a phase that has always been short is reported after ten minutes."""
    writer = MarkWriter()
    own, limits = _follow(os.getpid(), writer), []
    for phase in (FORWARD, BACKWARD, FORWARD, BACKWARD):
        writer.write(kinds.PHASE, phase, 3)
        own.update()
        limits.append(own.snapshot(is_whole=False).limit_s)
    assert limits == [600, 600, 60, 60]


def test_places_of_a_dataloaders_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a report of a dataloader that hangs does not say in which line of the dataset it does."""
    read, library = Frame("/me/data.py", 9, "read"), "/x/site-packages/torch/utils/data/_utils"
    loop, loader = Frame(f"{library}/worker.py", 3, "_worker_loop"), Frame(f"{library}/fetch.py", 4, "fetch")
    trainer = Frame("/x/site-packages/lightning/pytorch/trainer/trainer.py", 5, "fit")  # workers are forked from it
    stacks = {7: [read, loader, loop, trainer], 8: [loader, loop, trainer]}
    monkeypatch.setattr(processes, "descendants", lambda pid: [7, 8, 9])
    monkeypatch.setattr(processes, "is_asleep", lambda pid, thread: pid in stacks)
    monkeypatch.setattr(observation, "dump_stack", lambda pid, *_: stacks[pid])
    own = _follow(os.getpid(), MarkWriter())
    snapshot = own.snapshot(is_whole=False)
    own._add_workers(snapshot)
    assert snapshot.worker_places == ["me/data.py:9 in read"]
    assert snapshot.missing == ["stack of process 9: it is running, and the signal could crash it"]


def test_a_rank_that_was_stopped_is_not_late_when_it_goes_on() -> None:
    """If it fails, a job that a scheduler has suspended is reported, or ended, as soon as it is resumed."""
    writer = MarkWriter()
    writer.write(kinds.PHASE, FORWARD, 3)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process, ExitStack() as end:
        end.callback(process.kill)
        own = _follow(process.pid, writer)
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        time.sleep(0.3)
        own.update()
        assert own.snapshot().state == "stopped"
        assert own.idle_s >= 0.3
        stopped_s = own.idle_s
        os.kill(process.pid, signal.SIGCONT)
        os.waitid(os.P_PID, process.pid, os.WCONTINUED | os.WNOWAIT)
        own.update()
        assert own.idle_s < stopped_s


def test_the_end_of_a_rank_is_seen_while_the_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, the others wait for a dead rank for as long as the clock was set back."""
    monkeypatch.setattr(times, "LAST_MESSAGE_S", 0.01)
    process = subprocess.Popen(["true"])
    process.wait()
    own = _follow(process.pid, MarkWriter())
    own.update()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    time.sleep(0.02)
    own.update()
    assert own.ended == "died"


def test_a_rank_that_ends_while_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, ranks that raise together are reported as waiting for each other: each look takes seconds."""
    writer = MarkWriter()
    writer.write(kinds.PHASE, FORWARD, 3)
    own = _follow(os.getpid(), writer)
    looks = []

    def look(found: RankSnapshot) -> None:
        looks.append(found.state)
        if len(looks) == 1:
            own.learn({"ended": "failed", "detail": "Broken"})

    monkeypatch.setattr(own, "_add_stacks", look)
    monkeypatch.setattr(own, "_add_dump", lambda found: None)
    assert own.snapshot().state == "failed"
    assert looks == ["running"]
    own.ended = None
    monkeypatch.setattr(own, "_add_stacks", lambda found: writer.write(kinds.PHASE, BACKWARD, len(looks)))
    looks.append("again")
    assert own.snapshot().phase == BACKWARD
