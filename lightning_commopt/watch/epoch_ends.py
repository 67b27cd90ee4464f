"""EpochEnds: a rank that ends an epoch early waits for the others, and detects ranks that continue."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from lightning_commopt.sync.store import poll
from lightning_commopt.text.formatting import ranks_text
from lightning_commopt.watch import times
from lightning_commopt.watch.uneven_batches import (
    SKIPPED,
    UnevenBatchesError,
    different_ends_message,
    early_end_message,
)

_ABSENT = "-"
"""A value that no key has, so that ``compare_set`` with it returns it for keys that do not exist."""


@dataclass(kw_only=True)
class _Epoch:
    """One pass through the training batches on this rank."""

    run: int = 0  # number of the epoch in this fit, from 1; the same on all ranks
    number: int = 0  # Lightning's number of the epoch, for messages
    num_ended: int = -1  # batches that this rank has completed; -1 before the first one
    has_left: bool = True  # whether this rank has ended the epoch
    reason: str = ""  # why it has ended it before its last batch, see `early_end_message`


class EpochEnds:
    """Keeps ranks from leaving an epoch that others are still in.

    They communicate through the store, since a collective would hang. A rank that ends after the agreed number of
    batches sends nothing and does not wait. While a rank waits, it calls ``check_peers``, which raises if a rank has
    failed.

    Attributes:
        is_meeting: whether this rank waits for the others at the end of an epoch.
    """

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, timeout_s: float, check_peers: Callable[[], None]
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._check_peers = check_peers
        self._epoch = self._previous = _Epoch()
        self.is_meeting = False

    @property
    def position(self) -> tuple[int, int]:
        """The epoch, and the batches that this rank has completed in it."""
        return self._epoch.run, self._epoch.num_ended

    @property
    def is_in_epoch(self) -> bool:
        return not self._epoch.has_left

    def begin(self, number: int) -> None:
        self._previous, self._epoch = self._epoch, _Epoch(run=self._epoch.run + 1, number=number, has_left=False)

    def advance(self, num_batches: int) -> None:
        """Records that the epoch continues after ``num_batches``."""
        self._epoch.num_ended = num_batches

    def leave(self, num_batches: int, agreed: int | None, reason: str = "") -> None:
        """Ends the epoch on this rank, after it has completed ``num_batches``; returns once it has ended on all.

        ``agreed`` is the number of batches of every rank, None if unknown; for ``reason`` see `early_end_message`.

        Raises:
            UnevenBatchesError: another rank continues, or has ended it after another number of batches.
            TimeoutError: ranks have not ended it in time.
        """
        epoch = self._epoch
        if epoch.has_left:
            return
        epoch.num_ended, epoch.has_left, epoch.reason = num_batches, True, reason
        if num_batches != agreed and self._world_size > 1:
            self.is_meeting = True
            self._meet(epoch)
            self.is_meeting = False

    def find_early_rank(self, num_begun: int, is_in_collective: bool, is_training: bool) -> str | None:
        """Notifies a rank that has left an epoch which this rank, after ``num_begun`` batches, is still in.

        ``is_training`` if this rank is in a collective or a backward of a batch.

        Returns:
            The message for it; None if there is no such rank.
        """
        for epoch in (self._epoch, self._previous):
            if epoch.run == 0:
                continue
            # Rank 0 may delete the key at any time, so a look and a `get`, which waits for the key, could wait in vain.
            entry = self._store.compare_set(f"{epoch.run}/left", _ABSENT, _ABSENT).decode()
            if entry == _ABSENT:
                continue
            rank, number, reason = json.loads(entry)
            own = epoch.num_ended if epoch.has_left else num_begun
            # A rank that has continued may find that there is no next batch, but not in a collective, or skip it, too.
            is_skipped = reason == SKIPPED
            is_certain = is_training if is_skipped else is_in_collective
            continues = not epoch.has_left and epoch.num_ended >= number and is_certain
            if rank != self._rank and (own > number + is_skipped or continues):
                self._store.set(f"{epoch.run}/continues", json.dumps([self._rank, own]))
                return early_end_message((rank, number), (self._rank, own), epoch.number, reason)
        return None

    def _meet(self, epoch: _Epoch) -> None:
        store, run, ranks = self._store, epoch.run, range(self._world_size)
        store.set(f"{run}/rank/{self._rank}", str(epoch.num_ended))
        num_come = store.add(f"{run}/come", 1)
        if num_come == 1:
            store.set(f"{run}/left", json.dumps([self._rank, epoch.num_ended, epoch.reason]))
        if num_come == self._world_size:
            store.set(f"{run}/all", json.dumps([int(store.get(f"{run}/rank/{rank}")) for rank in ranks]))
        if not poll(lambda: self._have_all_left(epoch), self._timeout_s):
            missing = [rank for rank in ranks if not store.check([f"{run}/rank/{rank}"])]
            raise TimeoutError(
                f"Rank {self._rank} has ended epoch {epoch.number} after {epoch.num_ended} batches, and"
                f" {ranks_text(missing)} {'has' if len(missing) == 1 else 'have'} not ended it within"
                f" {self._timeout_s:g} s."
            )
        numbers = json.loads(store.get(f"{run}/all"))
        store.add(f"{run}/seen", 1)
        # Rank 0 waits, because its process, and the store with it, may end with the fit before the others have read it.
        if self._rank == 0:
            poll(lambda: store.add(f"{run}/seen", 0) >= self._world_size, times.READ_RESULT_S)
        if len(set(numbers)) > 1:
            raise UnevenBatchesError(different_ends_message(dict(enumerate(numbers)), epoch.number))
        if self._rank == 0 and run > 1:  # nobody waits for the keys of the previous epoch
            for key in ("left", "come", "all", "seen", *(f"rank/{rank}" for rank in ranks)):
                store.delete_key(f"{run - 1}/{key}")

    def _have_all_left(self, epoch: _Epoch) -> bool:
        self._check_peers()
        if self._store.check([f"{epoch.run}/all"]):
            return True
        if self._store.check([f"{epoch.run}/continues"]):
            rank, number = json.loads(self._store.get(f"{epoch.run}/continues"))
            own = self._rank, epoch.num_ended
            raise UnevenBatchesError(early_end_message(own, (rank, number), epoch.number, epoch.reason))
        return False
