"""An exchange that has begun, and its errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lightning_commopt.measure.observer import ARRIVE, END, SEND, START, BucketSync
from lightning_commopt.measure.recorder import issued_by
from lightning_commopt.sync.diloco.errors import UnequalStepsError
from lightning_commopt.sync.diloco.exchange import Arrived, LocalWeights
from lightning_commopt.sync.diloco.fragments import Fragment
from lightning_commopt.sync.executors import BucketFuture
from lightning_commopt.text.formatting import list_some


class DiLoCoError(RuntimeError):
    """An exchange failed; the message names the fragment and its parameters."""


@dataclass(eq=False)
class UnderWay:
    """An exchange that has begun.

    Attributes:
        index: index of the fragment.
        due: number of steps after which the result is applied.
        arrived: the result, once the exchange has ended.
        error: the exception that the exchange has raised, if any.
        future: completes when the exchange ends; None if its result is from a checkpoint.
        sync: notifies observers; None if the result is from a checkpoint.
    """

    index: int
    due: int
    arrived: Arrived | None = None
    error: Exception | None = None
    future: BucketFuture | None = None
    sync: BucketSync | None = None

    def run(self, local: LocalWeights, exchange: Callable[[], Arrived], bytes_sent: Callable[[], int]) -> None:
        """Carries the exchange out, and keeps its result, or the error that it raises.

        Args:
            local: this worker's weights; copying them may still be under way.
            exchange: carries the exchange out.
            bytes_sent: returns the payload bytes that this rank has sent so far.
        """
        assert self.sync is not None
        bytes_before = bytes_sent()
        try:
            with torch.no_grad(), issued_by("exchange"):
                local.wait()
                self.sync.note(START)
                self.sync.note(SEND)
                self.arrived = exchange()
        except Exception as error:
            self.error = error
            raise
        self.sync.note(ARRIVE)
        self.sync.note(END, bytes_sent() - bytes_before)

    def wait(self, fragment: Fragment) -> Arrived:
        """Waits for the result; raises a DiLoCoError, or an UnequalStepsError, if the exchange failed."""
        if self.future is not None:
            try:
                self.future.future.wait()
            except Exception as error_of_future:
                error = self.error or error_of_future  # the future's error has its thread's stack in the message
                if isinstance(error, UnequalStepsError):
                    raise error from None
                raise DiLoCoError(
                    f"the exchange of fragment {self.index} failed ({type(error).__name__}: {error}); its parameters:"
                    f" {list_some([*fragment.parameters], 8)}"
                ) from error
        assert self.arrived is not None
        return self.arrived
