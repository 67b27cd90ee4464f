"""Ranks that end an epoch at about the same time, through a store."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from lightning_commopt.watch import epoch_ends
from lightning_commopt.watch.epoch_ends import EpochEnds


def _ends(store: dist.Store, rank: int) -> EpochEnds:
    ends = EpochEnds(store, rank, 2, 60, lambda: None)
    ends.begin(0)
    return ends


def test_rank_0_stays_until_the_others_know_that_all_have_come() -> None:
    """If it fails, rank 0 ends its process, and the store, while a slow rank still asks: that takes it for dead."""
    store = dist.HashStore()
    first = threading.Thread(target=_ends(store, 0).leave, args=(3, None), kwargs={"was_stopped": True}, daemon=True)
    first.start()
    store.set("1/rank/1", "3")
    while not store.check(["1/come"]):
        pass
    store.add("1/come", 1)
    store.set("1/all", "[3, 3]")
    first.join(0.5)
    assert first.is_alive()
    store.add("1/seen", 1)
    first.join(60)
    assert not first.is_alive()


def test_all_go_on_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a rank that has read everything is waited for until the limit."""
    monkeypatch.setattr(epoch_ends, "_SEEN_S", 3600)
    store = dist.HashStore()
    ends = [_ends(store, rank) for rank in range(2)]
    for number in range(3):
        threads = [threading.Thread(target=one.leave, args=(3, None), kwargs={"was_stopped": False}) for one in ends]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        for one in ends:
            one.begin(number + 1)


def test_a_rank_that_has_died_is_not_waited_for_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epoch_ends, "_SEEN_S", 0.1)
    store = dist.HashStore()
    store.set("1/rank/1", "3")
    store.add("1/come", 1)
    _ends(store, 0).leave(3, None, was_stopped=True)
    assert store.add("1/seen", 0) == 1
