"""What tests on several ranks rely on: answers in order, and failures that say what happened instead of a wait."""

import os
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from lightning_commopt.testing import ranks
from lightning_commopt.testing.places import candidates
from support import warm_ranks
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


_RANKS = """
import torch.distributed as dist
from lightning_commopt.testing.ranks import run_ranks
print(run_ranks(dist.get_rank))
"""


@pytest.mark.exhaustive
def test_ranks_answer_without_standard_error() -> None:
    """If it fails, ``commopt selftest 2>&-`` does."""
    command = ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-c", _RANKS]
    assert subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=120).stdout == "[0, 1]\n"


def _random_sum(world_size: int) -> tuple[int, float, bool]:
    is_new = os.environ.setdefault("LEFT_BEHIND", "1") == "1" and not os.path.exists("left_behind")
    os.environ["LEFT_BEHIND"] = "2"
    dist.barrier()
    open("left_behind", "w").close()
    total = torch.rand(1)
    dist.all_reduce(total)
    assert dist.get_world_size() == world_size
    return os.getpid(), total.item() / world_size, is_new


def test_warm_ranks_stay_and_forget() -> None:
    """If it fails, a test depends on those before it, or each starts ranks of its own."""
    first, second, third = (warm_ranks.run_ranks(_random_sum, num, world_size=num) for num in (2, 3, 2))
    pids = [[pid for pid, *_ in answers] for answers in (first, second, third)]
    assert pids[0] == pids[1][:2] == pids[2]
    assert len({(total, is_new) for _, total, is_new in first + third}) == 1
    assert all(is_new for _, _, is_new in second)
    with pytest.raises(RankError, match="integer division"):
        warm_ranks.run_ranks(divmod, 1, 0)
    assert not {*pids[1]} & {pid for pid, *_ in warm_ranks.run_ranks(_random_sum, 2)}


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
    monkeypatch.setattr(ranks, "SECONDS_AFTER_A_FAILURE", 0.5)
    with pytest.raises(RankError, match=message):
        run_ranks(_fail_on_rank_1, deadly)


def _wait_on_rank_1() -> int:
    if dist.get_rank() == 1:
        time.sleep(1000)
    return 0


@pytest.mark.exhaustive
def test_a_silent_rank_is_named() -> None:
    with pytest.raises(RankError, match=r"only ranks \[0\] answered within 15 s"):
        run_ranks_or_raise(_wait_on_rank_1, world_size=2, limit_s=15)


_BOTH = "cpu:gloo,cuda:nccl"
_GLOO: tuple[str, str, tuple[int, int], dict[str, object]] = ("2 ranks on one GPU, gloo", "gloo", (0, 0), {})
_AS_HOSTS = (
    *("2 ranks on one GPU as 2 hosts, NCCL over sockets", _BOTH, (0, 0)),
    {"0": {"NCCL_HOSTID": "host0"}, "1": {"NCCL_HOSTID": "host1"}},
)
_SHARED = "2 ranks on one GPU, NCCL", _BOTH, (0, 0), {rank: {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} for rank in "01"}


@pytest.mark.parametrize(
    ("num_gpus", "nccl", "places"),
    [
        (0, (2, 30, 0), [("2 ranks on the CPU, gloo", "gloo", (0, 0), {})]),
        (1, None, [_GLOO]),
        (1, (2, 29, 9), [_AS_HOSTS, _GLOO]),
        (1, (2, 30, 0), [_SHARED, _AS_HOSTS, _GLOO]),
        (2, (2, 30, 0), [("2 ranks on 2 GPUs, NCCL", _BOTH, (0, 1), {}), _GLOO]),
    ],
)
def test_ranks_have_gpus_of_their_own_where_there_are_enough(
    num_gpus: int, nccl: tuple[int, ...] | None, places: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it fails, ``commopt selftest`` or ``check_compressor`` checks another device than it says, or none."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: nccl)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl is not None)
    found = candidates("auto")
    assert [(place.name, place.backend, place.indices, place.environment) for place in found] == places
    assert {place.device_type for place in found} == {"cuda" if num_gpus else "cpu"}
