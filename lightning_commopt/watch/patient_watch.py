"""PatientWatch: compares the batches of ranks in a fit that continues without ranks that have failed."""

from __future__ import annotations

from lightning_commopt.compat.loops import LoopEvents, num_begun
from lightning_commopt.sync.diloco.living import LivingRanks
from lightning_commopt.sync.strategies import WatchedStrategy, trainer_of
from lightning_commopt.watch.peers import ORDERLY
from lightning_commopt.watch.uneven_batches import RESIZING, UnevenBatchesError, different_ends_message, make_even


class PatientWatch:
    """Replaces `FitWatch` in fits in which no rank must be ended because another one has failed.

    All ranks wait for each other at the end of an epoch, so that one that was frozen catches up before the others
    validate, save and end the fit.

    Args:
        strategy: the strategy of a Trainer that is about to fit.
        living: the ranks that take part. If this rank fails, the others continue.
        compares: whether to compare numbers of batches, so that different numbers are an error, or are made even.
    """

    def __init__(self, strategy: WatchedStrategy, living: LivingRanks, *, compares: bool) -> None:
        self._trainer, self._living = trainer_of(strategy), living
        self._policy = strategy.uneven_batches if compares else "allow"
        self._is_in_epoch = False
        self._events = LoopEvents(
            self._trainer,
            on_data=self._make_even,
            on_epoch_start=self._begin_epoch,
            on_epoch_end=self._leave_epoch,
            on_error=self.fail,
            resizes=self._policy in RESIZING,
        )

    def fail(self, exception: BaseException) -> None:
        """Lets the others continue, unless all ranks end the fit with this exception."""
        if type(exception).__name__ not in ORDERLY:
            self._living.leave()

    def close(self) -> None:
        self._events.close()

    def _make_even(self) -> None:
        make_even(
            self._trainer, self._policy, self._living.rank, lambda number: self._gather(number, "the setup of data")
        )

    def _begin_epoch(self) -> None:
        self._is_in_epoch = True

    def _leave_epoch(self) -> None:
        if self._is_in_epoch:
            self._is_in_epoch = False
            numbers = self._gather(num_begun(self._trainer), "the end of an epoch")
            if self._policy != "allow" and len({*numbers.values()}) > 1:
                raise UnevenBatchesError(different_ends_message(numbers, self._trainer.current_epoch))

    def _gather(self, number: int, key: str) -> dict[int, int]:
        numbers = self._living.objects(number, key)
        return {**numbers, self._living.rank: number}  # a rank that comes late counts for itself
