"""What tests on several ranks rely on: answers in order, and failures that say what happened instead of a wait."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from lightning_commopt.testing import ranks
from support.ranks import RankError, run_ranks, run_ranks_or_raise


def _sum(value: float) -> tuple[int, float, int]:
    total = torch.tensor(value + dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), total.item(), os.getpid()


def test_ranks_answer_in_order_from_processes_of_their_own() -> None:
    first, second = run_ranks(_sum, 1.0), run_ranks(_sum, 2.0)
    assert [answer[:2] for answer in first] == [(0, 3.0), (1, 3.0)]
    assert [answer[:2] for answer in second] == [(0, 5.0), (1, 5.0)]
    assert len({pid for *_, pid in first + second} | {os.getpid()}) == 5


def _fail_on_rank_1(deadly: bool) -> None:
    if dist.get_rank() == 1:
        if deadly:
            os._exit(3)
        raise ValueError("no gradient")
    time.sleep(1000)


@pytest.mark.parametrize(
    ("deadly", "message"),
    [
        (False, "rank 1 raised(.|\n)*ValueError: no gradient"),
        pytest.param(True, "rank 1 raised\nit died", marks=pytest.mark.exhaustive),
    ],
)
def test_a_failure_is_told_while_the_other_rank_waits(
    deadly: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "_SECONDS_AFTER_A_FAILURE", 0.5)
    with pytest.raises(RankError, match=message):
        run_ranks(_fail_on_rank_1, deadly)


def _wait_on_rank_1() -> int:
    if dist.get_rank() == 1:
        time.sleep(1000)
    return 0


@pytest.mark.exhaustive
def test_a_silent_rank_is_named() -> None:
    with pytest.raises(RankError, match=r"only ranks \[0\] answered within 3 s"):
        run_ranks_or_raise(_wait_on_rank_1, world_size=2, limit_s=3)
