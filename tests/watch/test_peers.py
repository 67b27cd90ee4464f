"""Which ranks are waited for in vain."""

import os
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_commopt.watch import peers
from lightning_commopt.watch.lifelines import Lifelines
from lightning_commopt.watch.peers import Peers, namespace_name
from lightning_commopt.watch.waiting import end_process, print_now


def _peers(num: int) -> list[Peers]:
    store = dist.HashStore()
    return [Peers(store, rank, num, range(num), Lifelines(store, rank, [0], "localhost")) for rank in range(num)]


def test_ranks_that_wait_for_a_slow_one_are_told_apart() -> None:
    """If it fails, a rank is ended that waits for a slow one, while all are about to raise and catch the same."""
    raised, waits, slow = _peers(3)
    raised.leave()
    raised.fail(ValueError("caught on all ranks"))
    waits.set_waiting(True)
    waits.set_waiting(True)
    failure = waits.failure()
    assert failure is not None
    assert not failure.has_died
    assert not waits.are_all_idle()
    slow.set_waiting(True)
    assert waits.are_all_idle()
    slow.set_waiting(False)
    assert not waits.are_all_idle()
    slow.finish()
    slow.set_waiting(False)
    assert waits.are_all_idle()


def test_ranks_wait_for_one_that_saves_after_an_exception_unless_one_dies() -> None:
    """If it fails, a checkpoint on an error is lost, or ranks on other hosts wait for one that has died meanwhile."""
    store = dist.HashStore()
    lifelines = [Lifelines(store, rank, [0], "localhost") for rank in range(3)]
    raised, sees_the_end, other = (Peers(store, rank, 3, [rank], lifelines[rank]) for rank in range(3))
    assert not other.is_one_busy()
    raised.leave_by_exception()
    assert other.is_one_busy()
    for _ in range(2):
        raised.set_busy(False)
        assert not other.is_one_busy()
    raised.set_busy(True)
    assert other.is_one_busy()
    lifelines[1].ended.add(0)
    assert sees_the_end.has_died()
    assert not other.is_one_busy()


def test_text_of_another_rank_is_printed_without_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    """If it fails, an exception of one rank writes to the terminals of the others what it wants."""
    raised, other = _peers(2)
    raised.fail(ValueError("\x1b]0;PWNED\x07\x9b2Jé\u202e\r中"))
    failure = other.failure()
    assert failure is not None
    assert r"ValueError: \x1b]0;PWNED\x07\x9b2Jé\u202e\r中" in failure.text
    assert len(failure.text.splitlines()) > 1
    print_now("\x1b[2Jé\nsecond")
    assert capsys.readouterr().err == "\\x1b[2Jé\nsecond\n"


def test_a_rank_ends_although_nobody_reads_what_it_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a rank whose output nobody reads waits for ever for one that has died."""
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with open(os.devnull) as unwritable:
        for stream in (None, unwritable):
            for name in ("stdout", "stderr"):
                monkeypatch.setattr(sys, name, stream)
            end_process("another rank has died")
        monkeypatch.undo()
    assert ended == [1, 1]


def test_a_kernel_that_does_not_name_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, no fit of ours begins in a sandbox that has no ``boot_id``, or all its ranks seem to have ended."""
    monkeypatch.setattr(peers, "_BOOT_ID", Path("/proc/sys/kernel/random/nothing"))
    namespace_name.cache_clear()
    first, other = _peers(2)
    first.learn()
    assert first.failure() is None
    other.fail(ValueError())
    assert first.failure() is not None
    namespace_name.cache_clear()
