"""SigtermNotice: a SIGTERM that any rank has received ends a fit on all ranks together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lightning_commopt.compat.sigterm import (
    around_broadcasts,
    around_validations,
    note_sigterm,
    on_sigterm,
    raise_sigterm,
)
from lightning_commopt.sync.store import poll
from lightning_commopt.watch import times

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_LOOK_S = 1.0
"""Time between two looks of rank 0 into the store. A thread looks, since the store's host may not answer."""
_RECEIVED, _WAY = "received", "way"


class SigtermNotice:
    """Tells all ranks of a SIGTERM by the broadcast that Lightning makes before every batch; adds no collective.

    Lightning's own handler broadcasts as well, wherever its rank is. Ranks that are in different places then meet in
    different collectives, and wait until they are killed. Here the handler notes the signal, on this rank and in the
    store, into which rank 0 looks once a second. By rank 0's next broadcast, all ranks raise Lightning's
    ``SIGTERMException``. A validation may take longer than a launcher waits before it kills, so in there each rank
    raises after its next batch if all have received the signal. The ranks agree on one of these two ways.

    All ranks must create it, for the same fit, with a Lightning that broadcasts. It lasts until `close`.

    Args:
        trainer: a Trainer that is about to fit.
        store: part of a store that nothing else uses.
        rank: number of this rank.
        world_size: number of ranks.
    """

    def __init__(self, trainer: Trainer, store: dist.Store, rank: int, world_size: int) -> None:
        self._trainer, self._store, self._rank = trainer, store, rank
        self._of_all = [f"{_RECEIVED}/{other}" for other in range(world_size)]
        self._has_received = self._has_another_received = False
        self._stop = threading.Event()
        if rank == 0:
            threading.Thread(target=self._look, name="commopt-sigterm", daemon=True).start()
        self._undo = [
            on_sigterm(trainer, self._receive),
            around_broadcasts(trainer, self._before_batch),
            around_validations(trainer, self._run_validation),
        ]

    def close(self) -> None:
        self._stop.set()
        while self._undo:
            self._undo.pop()()

    def _receive(self) -> None:
        self._has_received = True
        with suppress(RuntimeError):  # the store has ended with rank 0, and so does this fit
            self._store.set(self._of_all[self._rank], "")
            self._store.set(_RECEIVED, "")
            if not self._trainer.training:
                self._end_validation()

    def _before_batch(self, inner: Callable[[], None]) -> None:
        if self._has_received and not self._decide("training"):
            raise_sigterm(self._trainer)
        if self._rank == 0 and (self._has_received or self._has_another_received):
            note_sigterm(self._trainer)
        try:
            inner()
        except SystemExit:  # Lightning's SIGTERMException; only rank 0 knows of the signal yet
            note_sigterm(self._trainer)
            raise

    def _run_validation(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._has_received:
            self._end_validation()
        return inner(*args, **kwargs)

    def _end_validation(self) -> None:
        if poll(lambda: self._store.check(self._of_all), times.STALLED_S) and self._decide("validation"):
            note_sigterm(self._trainer)

    def _look(self) -> None:
        with suppress(RuntimeError):  # the store is lost, and this fit ends without it
            while not (self._stop.wait(_LOOK_S) or self._has_another_received):
                self._has_another_received = self._store.check([_RECEIVED])

    def _decide(self, way: str) -> bool:
        """Returns whether the ranks end in this way; the first rank that asks decides."""
        return self._store.compare_set(_WAY, "", way).decode() == way
