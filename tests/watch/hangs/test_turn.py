"""Who reports a hang that several watchers find at the same time: exactly one of them."""

import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_commopt.watch import times
from lightning_commopt.watch.hangs import watcher as watching
from lightning_commopt.watch.hangs.marks import FORWARD
from lightning_commopt.watch.hangs.nccl_ras import RasError
from lightning_commopt.watch.hangs.snapshot import RankSnapshot
from lightning_commopt.watch.hangs.transport import Server
from lightning_commopt.watch.hangs.turn import Turn
from support.cross_section import sampled
from support.silent_link import FakeRank, watcher_of


def test_two_that_ask_at_the_same_time() -> None:
    """If it fails, two watchers report the same hang, or each leaves it to the other."""
    low, high = Turn(0), Turn(1)
    answers: list[bool] = []

    def meanwhile() -> list[bool]:
        answers.append(high.take(lambda: [low.refuse(1)]))
        return [high.refuse(0)]

    assert low.take(meanwhile)
    assert answers == [False]
    assert not high.take(lambda: [low.refuse(1)])
    low.give_back()
    assert high.take(lambda: [low.refuse(1)])
    assert not low.take(lambda: [high.refuse(0)])


def test_one_that_asks_while_a_higher_rank_does() -> None:
    """If it fails, a watcher reports what a lower rank, which asked after it, reports too."""
    low, high = Turn(0), Turn(1)
    taken: list[bool] = []

    def meanwhile() -> list[bool]:
        was_refused = low.refuse(1)
        taken.append(low.take(lambda: [high.refuse(0)]))
        return [was_refused]

    assert not high.take(meanwhile)
    assert taken == [True]


class Hanging(FakeRank):
    """A rank that has failed, or that waits for the one that has; a look at it takes some milliseconds."""

    def __init__(self, number: int, ended: str | None, draw: random.Random) -> None:
        self.ended, self.detail, self.idle_s = ended, "KeyError: 'x'" if ended else "", 100.0
        self._number, self._draw = number, draw

    def snapshot(self, *, is_whole: bool = True) -> RankSnapshot:
        time.sleep(self._draw.uniform(0, 0.01))
        return RankSnapshot(
            rank=self._number,
            host="a",
            state=self.ended or "running",
            detail=self.detail,
            ended_unix_s=1.0 if self.ended else None,
            phase=FORWARD,
            idle_s=self.idle_s,
            limit_s=60.0,
            called=None if self.ended else "all_reduce",
        )


def third_watcher(is_silent: bool, has_met: threading.Event) -> Server:
    """Returns the watcher of a third rank, which waits; once it has met rank 0's, a silent one answers too late."""

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        if is_silent and has_met.is_set():
            time.sleep(1)
        has_met.set()
        return RankSnapshot(rank=2, host="a", phase=FORWARD, idle_s=100.0, limit_s=60.0, called="all_reduce").to_plain()

    return Server("127.0.0.1", "key", answer)


def let_watch(
    folder: Path, draw: random.Random, *, action: str, is_silent: bool, ends: tuple[str | None, str | None]
) -> None:
    """Lets the watchers of two ranks find the same hang at about the same time, until neither has more to report."""
    ranks = [Hanging(number, ended, random.Random(draw.random())) for number, ended in enumerate(ends)]
    settings: dict[str, Any] = {"pid": os.getpid(), "action": action, "has_gpu": True, "world_size": 3}
    found = [watcher_of(rank, folder / f"{number}", number=number, **settings) for number, rank in enumerate(ranks)]
    watchers, ports = ([*each] for each in zip(*found, strict=True))
    has_met = threading.Event()
    ports.append(third_watcher(is_silent, has_met).port)
    delays_s = [draw.uniform(0, 0.02) for _ in watchers]

    def run(watcher: watching.Watcher, delay_s: float) -> None:
        watcher.receive({"peers": [["127.0.0.1", port, "a"] for port in ports]})
        while not watcher._peers:
            time.sleep(0.001)
        has_met.wait(20)
        time.sleep(delay_s)
        watcher.run()

    threads = [threading.Thread(target=run, args=each) for each in zip(watchers, delays_s, strict=True)]
    for thread in threads:
        thread.start()
    if action == "report":  # the watcher of a rank that runs goes on for ever
        for rank, watcher, thread in zip(ranks, watchers, threads, strict=True):
            deadline = time.monotonic() + 20
            while rank.ended is None and not watcher._is_reported and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.1)
            rank.ended = rank.ended or "finished"
            thread.join(20)
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns what all watchers print; they are quick, and NCCL's RAS answers nothing after a while."""
    lines: list[str] = []
    quick_s = {"HANG_LOOK_S": 0.005, "ASK_AGAIN_S": 0.02, "CONFIRM_S": 0.01, "DEATH_S": 0.02, "MOVED_S": 0.0}
    for name, seconds in quick_s.items():
        monkeypatch.setattr(times, name, seconds)

    def ask_ras(*_: Any) -> None:
        time.sleep(0.05)
        raise RasError("nothing listens")

    monkeypatch.setattr(watching, "ask_ras", ask_ras)
    monkeypatch.setattr(watching, "_print", lambda *texts: lines.extend(texts))
    monkeypatch.setattr(watching, "end_rank", lambda *_: None)  # it would be the process of this test
    return lines


@pytest.mark.parametrize("seeds", sampled([range(3), range(3, 20)], by_default=[range(3)]))
@pytest.mark.parametrize("action", sampled(["report", "abort"], by_default=["abort"]))
@pytest.mark.parametrize("ends", [(None, "failed"), ("failed", None), ("failed", "failed")])
def test_a_hang_is_reported_once(
    ends: tuple[str | None, str | None], action: str, seeds: range, printed: list[str], tmp_path: Path
) -> None:
    """If it fails, a failed rank's watcher and the one that asks all report the same hang, or none does."""
    for seed in seeds:
        printed.clear()
        let_watch(tmp_path / str(seed), random.Random(seed), action=action, is_silent=False, ends=ends)
        assert sum("failed in forward" in line for line in printed) == 1, (seed, printed)
        assert sum("Ending all ranks" in line for line in printed) == (action == "abort"), (seed, printed)


def test_a_watcher_that_does_not_answer(printed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a hang is not reported, as one watcher is stopped or its host is lost."""
    monkeypatch.setattr(times, "HELLO_ANSWER_S", 0.1)
    monkeypatch.setattr(times, "STATE_S", 0.1)
    for seed in range(2):
        printed.clear()
        let_watch(tmp_path / str(seed), random.Random(seed), action="report", is_silent=True, ends=(None, "failed"))
        assert sum("failed in forward" in line for line in printed) == 1, (seed, printed)
