"""Ranks that end an epoch at about the same time, through a store."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import Tensor

from lightning_commopt import CommOptDDP
from lightning_commopt.watch import epoch_ends, times
from lightning_commopt.watch.epoch_ends import EpochEnds
from lightning_commopt.watch.uneven_batches import SKIPPED
from support.ranks import run_ranks
from support.strategy_models import SelfFed, trainer


def _ends(store: dist.Store, rank: int) -> EpochEnds:
    ends = EpochEnds(store, rank, 2, 60, lambda: None)
    ends.begin(0)
    return ends


class Silent(SelfFed):
    """Logs nothing, so that no collective keeps rank 0 at the end of an epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


def _end_slowly_on_rank_1() -> int:
    if dist.get_rank() == 1:
        poll = epoch_ends.poll

        def late(condition: Callable[[], bool], timeout_s: float) -> bool:
            time.sleep(3)
            return poll(condition, timeout_s)

        patch.object(epoch_ends, "poll", late).start()
    fit = trainer(CommOptDDP(), max_steps=2)  # in the middle of an epoch
    fit.fit(Silent())
    return fit.global_step


def test_a_rank_that_is_slow_to_ask_ends_well() -> None:
    """If it fails, rank 0 ends its process, and the store, while a slow rank still asks: that takes it for dead."""
    assert run_ranks(_end_slowly_on_rank_1) == [2, 2]


def test_all_go_on_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a rank that has read everything is waited for until the limit."""
    monkeypatch.setattr(times, "READ_RESULT_S", 3600)
    store = dist.HashStore()
    ends = [_ends(store, rank) for rank in range(2)]
    for number in range(3):
        threads = [threading.Thread(target=one.leave, args=(3, None)) for one in ends]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        for one in ends:
            one.begin(number + 1)


class _Deleting:
    """A store whose keys another rank deletes as soon as they have been found."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def check(self, keys: list[str]) -> bool:
        are_there = self._store.check(keys)
        for key in keys:
            self._store.delete_key(key)
        return are_there

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.mark.parametrize("make", [dist.HashStore, lambda: dist.TCPStore("localhost", 0, is_master=True)])
def test_keys_are_deleted_while_a_rank_looks_for_them(make: Callable[[], dist.Store]) -> None:
    """If it fails, a rank that ends a fit waits 30 minutes for what rank 0 has deleted, and rank 0 for its next fit."""
    store = make()
    store.set_timeout(timedelta(seconds=5))
    ends = _ends(_Deleting(store), 1)  # type: ignore[arg-type]
    assert ends.find_early_rank(4, is_in_collective=False, is_training=False) is None
    store.set("1/left", json.dumps([0, 3, ""]))
    assert "rank 0" in str(ends.find_early_rank(4, is_in_collective=False, is_training=False)).lower()


def test_a_rank_that_is_slow_to_skip_a_batch_is_not_taken_for_one_that_trains() -> None:
    """If it fails, a fit ends whose ranks skip the rest of an epoch together, one of them late."""
    store = dist.HashStore()
    store.set("1/left", json.dumps([0, 3, SKIPPED]))
    ends = _ends(store, 1)
    ends.advance(3)
    assert ends.find_early_rank(4, is_in_collective=True, is_training=False) is None
    for where in ((5, False, False), (4, True, True)):
        assert "Rank 0 has ended epoch 0 after 3 batches" in str(ends.find_early_rank(*where))


def test_a_rank_that_has_died_is_not_waited_for_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "READ_RESULT_S", 0.1)
    store = dist.HashStore()
    store.set("1/rank/1", "3")
    store.add("1/come", 1)
    _ends(store, 0).leave(3, None)
    assert store.add("1/seen", 0) == 1
