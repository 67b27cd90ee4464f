"""Hooks of process groups: listeners come and go beside other threads, and no hook outlives Python."""

import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_commopt.compat.collectives import CollectiveHooks, has_collective_hooks
from support.ranks import run_ranks

pytestmark = pytest.mark.skipif(not has_collective_hooks(), reason="hooks of process groups need torch 2.14")

_NUM_ROUNDS = 300


class _Count:
    """A listener, which counts the collectives that it is notified of."""

    def __init__(self) -> None:
        self.issued = self.ended = 0

    def __call__(self, operation: str, num_bytes: int) -> "_Count":
        self.issued += 1
        return self

    def end(self) -> None:
        self.ended += 1


def _close_beside_another_thread() -> int:
    group: Any = dist.new_group([0])
    is_over = threading.Event()

    def issue() -> None:
        while not is_over.is_set():
            dist.all_reduce(torch.ones(4), group=group)

    threads = [threading.Thread(target=issue) for _ in range(2)]
    for thread in threads:
        thread.start()
    count = _Count()
    for _ in range(_NUM_ROUNDS):
        CollectiveHooks(count, sees_end=True).close()
    is_over.set()
    for thread in threads:
        thread.join()
    before = count.issued
    dist.all_reduce(torch.ones(4), group=group)
    return count.issued - before


def test_listeners_go_while_another_thread_issues_collectives() -> None:
    """If it fails, a fit that ends beside an asynchronous checkpoint, or an exception in backward, is a crash."""
    assert run_ranks(_close_beside_another_thread, world_size=1) == [0]


def _listen_in_turns() -> list[tuple[int, int, int]]:
    seen = []
    for _ in range(3):
        with_end, without = _Count(), _Count()
        both = [CollectiveHooks(with_end, sees_end=True), CollectiveHooks(without, sees_end=False)]
        work = dist.all_reduce(torch.ones(4), async_op=True)
        assert work is not None
        work.wait()
        while not with_end.ended:  # else the test ends at its time limit
            time.sleep(0.001)
        for hooks in both:
            hooks.close()
        seen.append((with_end.issued, without.issued, with_end.ended))
        dist.all_reduce(torch.ones(4))
    return seen


def test_each_listener_hears_from_its_start_to_its_end() -> None:
    assert run_ranks(_listen_in_turns, world_size=1, limit_s=60) == [[(1, 1, 1)] * 3]


_ENDS = """
import sys, torch, torch.distributed as dist
from lightning_commopt.compat.collectives import CollectiveHooks, listen

def fit(group):
    dist.all_reduce(torch.ones(4), group=group)
    raise ValueError("mine") if END == "raise" else SystemExit(3)

END = sys.argv[1]
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
hooks = CollectiveHooks(lambda operation, num_bytes: None, sees_end=True)
listen(dist.new_group([0]), lambda operation, num_bytes: None, sees_end=True)
fit(dist.group.WORLD)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(("end", "status"), [("raise", 1), ("exit", 3)])
def test_hooks_are_gone_before_python_has_ended(end: str, status: int) -> None:
    """If it fails, a user's exception is a segmentation fault, and a launcher shows that instead."""
    ended = subprocess.run([sys.executable, "-c", _ENDS, end], capture_output=True, text=True, timeout=240)
    assert ended.returncode == status, ended.stderr
    assert ("ValueError: mine" in ended.stderr) == (end == "raise")
