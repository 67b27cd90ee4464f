"""Ranks whose parameters change before a batch, through a store."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_commopt.compat.lightning import MisconfigurationException
from lightning_commopt.watch.changed_parameters import ChangedParameters


def _ranks(num: int = 2, timeout_s: float = 60) -> list[ChangedParameters]:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=60))
    return [ChangedParameters(store, rank, num, timeout_s, lambda: None) for rank in range(num)]


def _start(waiting: ChangedParameters, place: tuple[int, int], names: list[str]) -> tuple[threading.Thread, list[str]]:
    ends: list[str] = []

    def run() -> None:
        try:
            waiting.agree(place, names)
            ends.append("agreed")
        except MisconfigurationException as error:
            ends.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    return thread, ends


def test_ranks_that_change_together_go_on() -> None:
    """If it fails, a change that all ranks make ends the fit, if one is slow or has made one before."""
    first, second = _ranks()
    for number in (1, 2, 7):
        thread, ends = _start(first, (1, number), ["a", "b"])
        second.notify_waiting_ranks((1, number - 1), is_in_batch=True)
        second.notify_waiting_ranks((1, number), is_in_batch=False)
        second.agree((1, number), ["a", "b"])
        thread.join()
        assert ends == ["agreed"]
        second.notify_waiting_ranks((1, number), is_in_batch=True)


def test_other_parameters_on_another_rank() -> None:
    """If it fails, ranks average gradients of different parameters."""
    first, second = _ranks(timeout_s=0.1)
    thread, ends = _start(first, (1, 1), ["a"])
    thread.join()
    assert "a on this rank, but on another rank nothing within 0.1 s" in ends[0]
    with pytest.raises(MisconfigurationException, match="a, b on this rank, but a on rank 0"):
        second.agree((1, 1), ["a", "b"])


@pytest.mark.parametrize("place", [(1, 3), (1, 4), (2, 1)])
def test_a_rank_that_has_passed_is_named(place: tuple[int, int]) -> None:
    """If it fails, a rank waits for one that trains on without its parameters."""
    *_, passing, waiting = _ranks(3)
    thread, ends = _start(waiting, (1, 3), ["a"])
    while thread.is_alive():
        thread.join(0.01)
        passing.notify_waiting_ranks(place, is_in_batch=True)
    assert "a on this rank, but nothing on rank 1" in ends[0]
