"""What is a hang, and what may be ended: never a run that is healthy, however slow one of its ranks is."""

import io
import os
import pdb
import random
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_commopt.watch.hangs.diagnosis import has_moved, is_hang, is_waited_for, may_be_caught, may_end_ranks
from lightning_commopt.watch.hangs.marks import (
    BACKWARD,
    CALLBACKS,
    CHECKPOINT,
    DATA,
    END,
    EPOCH_END,
    FORWARD,
    PHASE,
    PHASES,
    SETUP,
    MarkWriter,
    PhaseTimes,
    first_of_stage,
)
from lightning_commopt.watch.hangs.observation import Observation, WatcherSettings
from lightning_commopt.watch.hangs.snapshot import RankSnapshot
from lightning_commopt.watch.hangs.stacks import Frame, own_stacks

AFTER_S = 60.0


def rank(number: int, phase: int = FORWARD, idle_s: float = 0.0, **fields: Any) -> RankSnapshot:
    times = PhaseTimes(AFTER_S)
    times.add(phase, 0.1)
    known = {"innermost": "a.py:1 in f", "limit_s": times.limit_s(phase), "phase": phase, "idle_s": idle_s}
    return RankSnapshot(rank=number, host="a", **{**known, **fields})


def waiting(number: int, phase: int = BACKWARD, idle_s: float = 61.0, **fields: Any) -> RankSnapshot:
    return rank(number, phase, idle_s, called="all_reduce", **fields)


def recorded(number: int, ago_s: float = 0.0) -> dict[str, Any]:
    """Returns the record of a rank that has called one collective, and is in it."""
    return {"entries": [{"collective_seq_id": number, "time_created_ns": (time.time() - ago_s) * 1e9}]}


@pytest.mark.parametrize(
    ("snapshots", "is_one", "may_end"),
    [
        pytest.param([rank(0, DATA, 61), waiting(1)], True, True, id="dataloader"),
        pytest.param([rank(0, DATA, 59), waiting(1)], False, True, id="a little slow"),
        pytest.param([rank(0, CALLBACKS, 590), waiting(1, idle_s=590)], False, True, id="another callback"),
        pytest.param([rank(0, CALLBACKS, 601), waiting(1, idle_s=590)], True, True, id="a stuck callback"),
        pytest.param([rank(0, CHECKPOINT, 590), waiting(1, idle_s=590)], False, True, id="checkpoint"),
        pytest.param([rank(0, DATA, 700), rank(1, DATA, 700)], True, False, id="nobody waits"),
        pytest.param([rank(0, END, 9999), rank(1, state="finished")], False, False, id="upload"),
        pytest.param([rank(0, END, 9999), rank(1, END, 9999)], False, False, id="two uploads"),
        pytest.param([rank(0, END, 590), waiting(1, END, 590)], False, True, id="others wait in the end"),
        pytest.param([rank(0, state="finished"), waiting(1, END, 590)], False, True, id="teardown of others"),
        pytest.param([rank(0, state="finished"), waiting(1)], True, True, id="fewer batches"),
        pytest.param([rank(0, state="finished"), rank(1, FORWARD, 9999)], False, False, id="alone"),
        pytest.param([rank(0, FORWARD, 590, is_computing=True), waiting(1)], False, True, id="computing"),
        pytest.param([rank(0, FORWARD, 590, is_compiling=True), waiting(1)], False, True, id="compiling"),
        pytest.param(
            [rank(0, CALLBACKS, 3600, is_computing=True), waiting(1, idle_s=3600)],
            False,
            True,
            id="a long evaluation on rank 0, in a group with a long timeout",
        ),
        pytest.param([rank(0, FORWARD, 590, innermost=None), waiting(1)], False, True, id="no stack"),
        pytest.param([waiting(0)], False, True, id="no other monitor"),
        pytest.param([rank(0, state="stopped", process="stopped, 0.1 s"), waiting(1)], True, True, id="SIGSTOP"),
        pytest.param(
            [rank(0, state="stopped", process="stopped by a debugger, 0.1 s"), waiting(1)], True, False, id="gdb"
        ),
        pytest.param([rank(0, state="silent"), waiting(1, idle_s=590)], False, False, id="silent"),
        pytest.param([rank(0, state="silent"), waiting(1, idle_s=601)], True, False, id="silent for long"),
        pytest.param([rank(0, state="unreachable"), waiting(1)], True, True, id="host lost"),
        pytest.param([rank(0, state="unwatched"), waiting(1, CHECKPOINT, 590)], False, True, id="monitor lost"),
        pytest.param([waiting(0, EPOCH_END, 590), waiting(1, EPOCH_END, 590)], False, True, id="not recorded"),
        pytest.param([waiting(0, EPOCH_END, 601), waiting(1, EPOCH_END, 601)], True, True, id="not recorded, for long"),
        pytest.param(
            [waiting(0, EPOCH_END, collectives=recorded(9)), waiting(1, EPOCH_END, collectives=recorded(9))],
            True,
            True,
            id="one recorded collective",
        ),
        pytest.param([rank(0, state="stopped"), waiting(1)], True, True, id="stopped"),
        pytest.param([rank(0, state="stopped"), rank(1, FORWARD, 61)], False, False, id="stopped, nobody waits"),
        pytest.param([rank(0, state="stopped"), rank(1, state="stopped")], False, False, id="all stopped"),
    ],
)
def test_what_is_a_hang(snapshots: list[RankSnapshot], is_one: bool, may_end: bool) -> None:
    """If it fails, a healthy run is reported or ended, or a hang is not."""
    assert is_hang(snapshots, AFTER_S) == is_one
    assert may_end_ranks(snapshots, "late") == may_end


def test_no_rank_is_ended_while_one_is_at_a_prompt() -> None:
    """If it fails, ``action="abort"`` ends a run while its user looks at it with ``breakpoint()`` on one rank."""
    reader, writer = os.pipe()

    def stop() -> None:
        with os.fdopen(reader) as typed:
            pdb.Pdb(stdin=typed, stdout=io.StringIO(), nosigint=True).set_trace()
            time.sleep(0)

    thread = threading.Thread(target=stop, daemon=True)
    thread.start()
    stack: list[str] = []
    while not any("cmdloop" in frame for frame in stack):
        time.sleep(0.01)
        stack = [str(Frame(*frame)) for frame in own_stacks().get(thread.ident or 0, ())]
    looked_at = rank(0, FORWARD, 61, pid=1, fit_thread="0x1", stacks={"process 1": {"0x1": stack}})
    os.write(writer, b"continue\n")
    thread.join()
    os.close(writer)
    assert is_hang([looked_at, waiting(1)], AFTER_S)
    assert not may_end_ranks([looked_at, waiting(1)], "late")
    looked_at.stacks["process 1"]["0x1"] = stack[-1:]
    assert may_end_ranks([looked_at, waiting(1)], "late")


def _draw_healthy(draw: random.Random) -> list[RankSnapshot]:
    """Returns ranks of which at least one may take long; the others do too, have ended, or wait for it."""
    slow = draw.choice([n for n, phase in enumerate(PHASES) if phase.is_slow])
    snapshots = [rank(0, slow, draw.uniform(0, 599))]
    for number in range(1, draw.choice([2, 3, 4, 8])):
        kind = draw.choice(["slow", "fast", "finished"] if slow == END else ["slow", "fast"])
        phase = slow if slow == END else draw.choice([BACKWARD, slow, first_of_stage("validation")])
        by_kind = {
            "slow": rank(number, slow, draw.uniform(0, 599)),
            "finished": rank(number, state="finished"),
            "fast": waiting(number, phase, draw.uniform(0, 599)),
        }
        snapshots.append(by_kind[kind])
    return snapshots


def test_healthy_runs_are_left_alone() -> None:
    """If it fails, some mixture of slow ranks, ended ones and ones that wait for them is taken for a hang."""
    for seed in range(200):
        assert not is_hang(_draw_healthy(random.Random(seed)), AFTER_S), seed


def test_who_has_ended_is_reported_if_others_need_it() -> None:
    """If it fails, ranks that end together are reported one by one, or Ctrl-C is."""
    died, failed = rank(0, state="died"), rank(1, state="failed", detail="KeyError: 1")
    assert not is_waited_for(failed, [died, failed])
    assert is_waited_for(failed, [rank(0), failed])
    assert is_waited_for(died, [died, rank(1, state="failed", detail="Connection reset by peer")])
    interrupted = rank(0, state="interrupted")
    assert not is_waited_for(interrupted, [interrupted, rank(1), rank(2, state="died")])
    assert is_waited_for(interrupted, [interrupted, waiting(1)])
    assert is_waited_for(interrupted, [interrupted, rank(1, state="failed", detail="Connection reset by peer")])
    assert not may_end_ranks([interrupted, waiting(1)], "interrupted")


def test_what_all_ranks_may_catch_is_not_reported() -> None:
    """If it fails, a program that catches an exception on all ranks is ended, as one of them is slow."""
    failed = rank(1, state="failed", detail="EarlyEnd: ")
    slow, stuck = ([waiting(0), failed, rank(2, CALLBACKS, idle_s)] for idle_s in (590, 601))
    assert may_be_caught(failed, slow, slow, AFTER_S)
    assert not may_be_caught(failed, stuck, stuck, AFTER_S)
    begun, lasting = ([waiting(0, idle_s=idle_s), failed] for idle_s in (1, 61))
    assert may_be_caught(failed, begun, begun, AFTER_S)
    assert not may_be_caught(failed, lasting, lasting, AFTER_S)
    died = rank(1, state="died")
    assert not may_be_caught(died, None, [waiting(0), died, rank(2, CALLBACKS, 590)], AFTER_S)


def test_what_all_ranks_may_catch_is_looked_at_twice() -> None:
    """If it fails, a program is ended whose ranks all raise the same, as one of them just passed a collective."""
    failed = rank(1, state="failed", detail="EarlyEnd: ")
    passing = [waiting(0, idle_s=61), failed]
    assert may_be_caught(failed, None, passing, AFTER_S)
    assert may_be_caught(failed, passing, [rank(0, state="failed", detail="EarlyEnd: "), failed], AFTER_S)


def test_a_rank_that_has_moved_between_two_looks() -> None:
    """If it fails, a rank that goes on at the moment of a report is ended."""
    first = [rank(0, DATA, 61), waiting(1)]
    assert not has_moved(first, [rank(0, DATA, 62), waiting(1, idle_s=62)])
    assert has_moved(first, [rank(0, FORWARD, 0.1), waiting(1, idle_s=62)])
    assert has_moved(first, [rank(0, DATA, 62), rank(1, state="finished")])
    queued, same, next_one = (waiting(1, idle_s=62, collectives=recorded(number)) for number in (5, 5, 6))
    same.collectives = queued.collectives
    assert not has_moved([queued], [same])
    assert has_moved([queued], [next_one])


@pytest.mark.parametrize("phase", [SETUP, EPOCH_END, DATA])
def test_a_rank_that_calls_many_collectives_makes_progress(phase: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, ranks that gather batch by batch in a hook, or search a learning rate, are ended."""
    writer = MarkWriter()
    writer.write(PHASE, phase, 3)
    called = recorded(700, ago_s=50.0)
    link: Any = SimpleNamespace(request=lambda *_, **question: {"collectives": called} if "dump" in question else None)
    settings = WatcherSettings(rank=0, host="a", pid=os.getpid(), fit_thread=(1, os.getpid()), after_s=AFTER_S)
    observation = Observation(settings, marks_fd=writer.fd, stacks_fd=-1, link=link)
    monkeypatch.setattr(Observation, "idle_s", 5000.0)

    def add_stacks(snapshot: RankSnapshot) -> bool:
        snapshot.called, snapshot.innermost = "all_reduce", "gloo.py:1 in all_reduce"
        return True

    monkeypatch.setattr(observation, "_add_stacks", add_stacks)
    healthy = observation.snapshot()
    assert 50.0 <= healthy.idle_s < AFTER_S
    assert not is_hang([healthy, healthy], AFTER_S)
    called = recorded(700, ago_s=70.0)
    stuck = observation.snapshot()
    assert is_hang([stuck, stuck], AFTER_S)
    assert has_moved([stuck], [healthy])
    called = recorded(700, ago_s=-70.0)  # the clock was set back
    assert observation.snapshot().idle_s == 5000.0
