"""Members: who takes part in an exchange, decided in a store by ranks that may be late, or gone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from lightning_commopt.sync.diloco.members import FIRST_MESH, Attempt, Members, MembersError

LONG_S = 120.0
"""A patience that no test ends by waiting."""


def make(world_size: int, patience_s: float = LONG_S, log: Callable[[str], None] = lambda text: None) -> list[Members]:
    store = dist.HashStore()
    options: dict[str, Any] = {"patience_s": patience_s, "timeout_s": LONG_S, "log": log}
    return [Members(store, rank, world_size, **options) for rank in range(world_size)]


def meet(members: list[Members], **options: Any) -> list[Attempt | None]:
    """Lets some ranks meet, each in a thread of its own."""
    with ThreadPoolExecutor() as pool:
        return [*pool.map(lambda one: one.meet(**options), members)]


def conclude(members: list[Members], attempts: list[Attempt | None], *failed: int) -> list[bool]:
    def end(pair: tuple[Members, Attempt | None]) -> bool:
        assert pair[1] is not None
        return pair[0].conclude(pair[1], is_success=pair[0].rank not in failed)

    with ThreadPoolExecutor() as pool:
        return [*pool.map(end, zip(members, attempts, strict=True))]


def test_all_who_come_take_part_over_the_same_connections() -> None:
    members = make(3)
    for number in range(3):
        attempts = meet(members)
        assert attempts == [Attempt(f"{number}/0", (0, 1, 2), (), FIRST_MESH)] * 3
        assert conclude(members, attempts) == [True] * 3
    assert members[0].are_complete


def test_a_rank_that_comes_late_learns_that_the_others_went_on_and_joins_again() -> None:
    texts: list[str] = []
    members = make(3, patience_s=0.5, log=texts.append)
    others = members[:2]
    attempts = meet(others)
    assert attempts == [Attempt("0/0", (0, 1), (), "0/0")] * 2
    conclude(others, attempts)
    assert members[2].meet() is None
    assert members[2].is_behind
    assert not members[0].are_complete
    assert "rank 2 did not come within patience_s=0.5; 2 of 3 ranks continue" in texts[0]
    assert "exchange 0 succeeded without rank 2" in texts[1]

    late = members[2]
    with ThreadPoolExecutor() as pool:
        waiting: Future[Attempt | None] = pool.submit(late.meet)  # it is there before the others, and decides nothing
        while not late._store.check(["1/0/here/2"]):
            pass
        attempts = [*meet(others), waiting.result()]
    assert attempts == [Attempt("1/0", (0, 1, 2), (2,), "1/0")] * 3
    assert attempts[0] is not None
    assert attempts[0].leader == 0
    assert conclude(members, attempts) == [True] * 3
    assert not late.is_behind
    assert late.steady == {0, 1}
    assert meet(members) == [Attempt("2/0", (0, 1, 2), (), "1/0")] * 3


def test_nobody_waits_for_a_rank_that_is_missed_already() -> None:
    """If it fails, each exchange after the loss of a rank takes ``patience_s``: here the test would not end."""
    members = make(3, patience_s=0.5)[:2]
    conclude(members, meet(members))
    for one in members:
        one._patience_s = LONG_S
    for _ in range(3):
        attempts = meet(members)
        assert conclude(members, attempts) == [True, True]


def test_an_attempt_counts_for_all_or_for_none() -> None:
    members = make(3)
    attempts = meet(members)
    assert conclude(members, attempts, 1) == [False] * 3
    attempts = meet(members)
    assert attempts == [Attempt("0/1", (0, 1, 2), (), "0/1")] * 3
    assert conclude(members, attempts) == [True] * 3


def test_a_rank_that_ends_in_an_exchange_makes_it_fail_for_all() -> None:
    members = make(3)
    attempts = meet(members)
    others = members[:2]
    for one in members:
        one._patience_s = 0.5
    assert conclude(others, attempts[:2]) == [False, False]
    attempts = meet(others)
    assert attempts == [Attempt("0/1", (0, 1), (), "0/1")] * 2
    assert conclude(others, attempts) == [True, True]
    # The third was only frozen, and believes that its exchange has succeeded.
    assert not members[2].conclude(Attempt("0/0", (0, 1, 2), (), FIRST_MESH), is_success=True)
    assert members[2].meet() is None


def test_progress_prolongs_the_wait() -> None:
    members = make(2, patience_s=1.0)
    attempts = meet(members)
    first, second = attempts
    assert first is not None
    assert second is not None
    told = threading.Event()

    def work() -> bool:
        for _ in range(30):  # three times as long as the others wait without progress
            members[1].tell_progress(second)
            told.wait(0.1)
        return members[1].conclude(second, is_success=True)

    with ThreadPoolExecutor() as pool:
        slow = pool.submit(work)
        assert members[0].conclude(first, is_success=True)
        assert slow.result()


def test_a_rank_that_came_late_takes_over_when_the_others_end() -> None:
    members = make(3, patience_s=0.2)
    attempts = meet(members[:2])  # these die before their exchange has ended
    assert attempts == [Attempt("0/0", (0, 1), (), "0/0")] * 2
    attempt = members[2].meet()
    assert attempt == Attempt("0/1", (2,), (), "0/1")
    assert members[2].conclude(attempt, is_success=True)


@pytest.mark.parametrize("voters", [(), (1,), (0, 2)])
def test_all_get_the_same_answer(voters: tuple[int, ...]) -> None:
    members = make(3)
    for _ in range(2):
        with ThreadPoolExecutor() as pool:
            answers = [*pool.map(lambda one: one.any_member(one.rank in voters), members)]
        assert answers == [bool(voters)] * 3


def test_a_late_rank_gets_the_answer_of_the_others() -> None:
    members = make(3, patience_s=0.5)
    with ThreadPoolExecutor() as pool:
        assert [*pool.map(lambda one: one.any_member(False), members[:2])] == [False, False]
    assert not members[2].any_member(True)


@pytest.mark.parametrize("value", [True, False])
def test_a_rank_that_is_left_alone_answers_itself(value: bool) -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=5))
    assert Members(store, 0, 1, patience_s=LONG_S, timeout_s=LONG_S, log=print).any_member(value) == value


def test_a_lost_store_is_named() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    members = Members(client, 0, 1, patience_s=LONG_S, timeout_s=LONG_S, log=print)
    attempt = members.meet()
    assert attempt is not None
    del server
    with pytest.raises(MembersError, match=r"has ended, which is torchrun's agent, or without torchrun rank 0"):
        members.conclude(attempt, is_success=True)


def test_keys_do_not_pile_up() -> None:
    members = make(2)
    sizes = []
    for _ in range(6):
        conclude(members, meet(members))
        sizes.append(members[0]._store.num_keys())
    assert sizes[5] - sizes[4] == sizes[4] - sizes[3] == 2  # who took part, and how it ended
