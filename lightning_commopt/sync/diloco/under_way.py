"""An exchange that has begun, and its errors."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_commopt.measure.observer import BucketSync
from lightning_commopt.sync.diloco.exchange import Arrived
from lightning_commopt.sync.diloco.fragments import Fragment
from lightning_commopt.sync.executors import BucketFuture
from lightning_commopt.text.formatting import list_some


class DiLoCoError(RuntimeError):
    """An exchange failed; the message names the fragment and its parameters."""


@dataclass(eq=False)
class UnderWay:
    """An exchange that has begun.

    Attributes:
        index: number of the fragment.
        due: number of steps after which its result is applied.
        arrived: its result, once the exchange has ended.
        error: what it raised.
    """

    index: int
    due: int
    arrived: Arrived | None = None
    error: Exception | None = None
    future: BucketFuture | None = None  # None for one that was resumed
    sync: BucketSync | None = None  # its observers; None for one that was resumed

    def wait(self, fragment: Fragment) -> Arrived:
        """Waits for the result; raises a DiLoCoError if the exchange failed."""
        if self.future is not None:
            try:
                self.future.future.wait()
            except Exception as error_of_future:
                error = self.error or error_of_future  # a future adds the stack of its thread to the message
                raise DiLoCoError(
                    f"the exchange of fragment {self.index} failed ({type(error).__name__}: {error}); its parameters:"
                    f" {list_some([*fragment.parameters], 8)}"
                ) from error
        assert self.arrived is not None
        return self.arrived
