"""LivingRanks between threads that stand for ranks: whose values count, and what a rank finds that comes late."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_commopt.sync.diloco import living as module
from lightning_commopt.sync.diloco.errors import MembersError
from lightning_commopt.sync.diloco.living import LivingRanks, reduced
from lightning_commopt.sync.store import poll

PATIENCE_S = 2.0


class Ranks:
    """Three ranks, and what each has said."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self.store = dist.HashStore()
        self.logs: list[list[str]] = [[] for _ in range(3)]
        self.all = [
            LivingRanks(self.store, rank, 3, patience_s=PATIENCE_S, timeout_s=timeout_s, log=self.logs[rank].append)
            for rank in range(3)
        ]

    def gather(self, *ranks: int, what: str = "a test") -> list[dict[int, int]]:
        with ThreadPoolExecutor() as pool:
            return [*pool.map(lambda rank: self.all[rank].objects(10 * rank, what), ranks)]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    for one in ranks.all:
        one._pulse.close()


def test_who_is_silent_or_has_left_is_not_waited_for(ranks: Ranks) -> None:
    assert ranks.gather(0, 1, 2) == [{0: 0, 1: 10, 2: 20}] * 3
    ranks.all[2]._pulse.close()  # its process is frozen
    assert ranks.gather(0, 1) == [{0: 0, 1: 10}] * 2
    ranks.all[1].leave()
    assert ranks.gather(0) == [{0: 0}]
    assert ranks.gather(1) == [{1: 10}]
    assert ranks.logs[0] == [
        "rank 2, which has left or shown no sign of life for patience_s=2: 2 of 3 ranks continue in a test",
        "rank 1, which has left or shown no sign of life for patience_s=2: 1 of 3 ranks continue in a test",
    ]


def test_a_rank_that_comes_late_finds_the_results_of_the_others(ranks: Ranks) -> None:
    """If it fails, it decides something else than the others did, and goes another way through the program."""
    ranks.all[2]._pulse.close()
    first, second = ranks.gather(0, 1), ranks.gather(0, 1)
    assert ranks.gather(2) == first[:1]
    assert ranks.gather(2) == second[:1]
    with ThreadPoolExecutor() as pool:
        late = pool.submit(ranks.gather, 2)
        # Without its pulse the others wait for it no longer, so it comes before them.
        assert poll(lambda: ranks.store.check(["2/here/2"]), 60)
        assert ranks.gather(0, 1) == [{0: 0, 1: 10, 2: 20}] * 2
        assert late.result() == [{0: 0, 1: 10, 2: 20}]
    assert ranks.logs[0][-1] == "rank 2 is back in a test"
    assert ranks.logs[2] == ["the others did not wait for rank 2 in a test, which takes their result"]


@pytest.mark.exhaustive
def test_a_rank_that_lives_is_waited_for_however_slow_it_is(ranks: Ranks) -> None:
    """If it fails, a healthy rank that writes a large checkpoint is taken for a dead one."""
    with ThreadPoolExecutor() as pool:
        others = pool.submit(ranks.gather, 0, 1)
        assert not poll(others.done, 2 * PATIENCE_S)
        assert ranks.gather(2) == [{0: 0, 1: 10, 2: 20}]
        assert others.result(60) == [{0: 0, 1: 10, 2: 20}] * 2
    assert not any(ranks.logs)


def test_the_store_keeps_nothing_that_all_have_read(ranks: Ranks) -> None:
    for _ in range(3):
        ranks.gather(0, 1, 2)
    before = ranks.store.num_keys()
    for _ in range(5):
        ranks.gather(0, 1, 2)
    assert ranks.store.num_keys() == before


def test_different_collectives_are_an_error(ranks: Ranks) -> None:
    with ThreadPoolExecutor() as pool:
        works = [pool.submit(ranks.all[rank].barrier, what) for rank, what in enumerate(("a", "a", "b"))]
        errors = [work.exception() for work in works]
    assert str(errors[0]).startswith("rank 0 is in a, and rank 2 in b: all ranks must call the same collectives")
    assert all(isinstance(error, MembersError) for error in errors)


def test_a_rank_that_lives_and_does_not_come_is_named() -> None:
    ranks = Ranks(timeout_s=0.2)
    with pytest.raises(MembersError, match=r"rank 0 has waited 0\.2 s in a test for ranks 1, 2, whose processes are"):
        ranks.gather(0)
    for one in ranks.all:
        one._pulse.close()


def test_large_values_travel_in_pieces(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE_BYTES", 1000)
    values = [torch.arange(1000.0 * rank, dtype=torch.float64).reshape(-1, 10) for rank in range(3)]
    with ThreadPoolExecutor() as pool:
        for gathered in pool.map(lambda one: one.tensors(values[one.rank], "a test"), ranks.all):
            assert all(gathered[rank].equal(values[rank]) for rank in range(3))


@pytest.mark.parametrize("shape", [(), (0, 4), (2, 3)])
def test_tensors_of_all_kinds(ranks: Ranks, shape: tuple[int, ...]) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64):
        values = [torch.full(shape, rank, dtype=dtype) for rank in range(3)]
        with ThreadPoolExecutor() as pool:
            for gathered in pool.map(lambda one, values=values: one.tensors(values[one.rank], "a test"), ranks.all):
                found = [(x.dtype, x.shape, x.equal(values[rank])) for rank, x in gathered.items()]
                assert found == [(dtype, shape, True)] * 3


@pytest.mark.parametrize(("method", "key"), [("wait_for_readers", "has_read/1/0"), ("close", "left/0")])
def test_the_host_of_the_store_leaves_last(ranks: Ranks, method: str, key: str) -> None:
    """If it fails, a result that another rank still reads is lost at the end of a fit."""
    with ThreadPoolExecutor() as pool:
        leaving = pool.submit(getattr(ranks.all[0], method))
        getattr(ranks.all[1], method)()
        assert poll(lambda: ranks.store.check([key]), 60)
        assert not leaving.done()
        getattr(ranks.all[2], method)()
        leaving.result(60)


@pytest.mark.parametrize(
    ("op", "expected"),
    [("mean", 3.0), ("AVG", 3.0), ("sum", 9.0), (None, 9.0), ("max", 5.0), (dist.ReduceOp.MIN, 1.0), ("product", 15.0)],
)
def test_reductions(op: Any, expected: float) -> None:
    assert reduced([torch.tensor(x) for x in (1.0, 5.0, 3.0)], op) == expected


def test_other_reductions_are_refused() -> None:
    with pytest.raises(ValueError, match="reduce_op must be one of mean, sum, avg, max, min, product, got 'band'"):
        reduced([torch.ones(1)], "band")
