"""The process groups of a fit: records their collectives, and borrows one to gather measurements over."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning_commopt.compat.collectives import CollectiveHooks, has_collective_hooks
from lightning_commopt.compat.sigterm import around_broadcasts
from lightning_commopt.measure.recorder import StepRecorder, issued_by
from lightning_commopt.sync.groups import BorrowedGroups, borrow_host_group
from lightning_commopt.text.validation import info, warn

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class CollectiveWatch:
    """Observes the collectives of a fit until `close`, where torch has hooks for that: from 2.14 on.

    Args:
        trainer: in a fit; its process group exists.
        recorder: of its steps.
    """

    def __init__(self, trainer: Trainer, recorder: StepRecorder) -> None:
        self._hooks: CollectiveHooks | None = None
        if not has_collective_hooks():
            info("CommTimeMonitor: before torch 2.14 only gradient sync is observed, and no other collective.")
            return
        is_cpu = trainer.strategy.root_device.type == "cpu"
        self._hooks = CollectiveHooks(recorder.issue, sees_end=is_cpu)
        self._unwrap = around_broadcasts(trainer, _broadcast)

    def update(self) -> None:
        """Observes process groups that were made since the last call."""
        if self._hooks is not None:
            self._hooks.update()

    def close(self) -> None:
        if self._hooks is not None:
            self._hooks.close()
            self._hooks = None
            self._unwrap()


def _broadcast(inner: Callable[[], None]) -> None:
    with issued_by("lightning"):
        inner()


def borrow_gathering_group() -> BorrowedGroups | None:
    """Returns a gloo group of all ranks; None, with a warning, if they cannot connect over gloo."""
    try:
        return borrow_host_group()
    except RuntimeError as error:
        warn(
            f"CommTimeMonitor: the ranks cannot connect over gloo ({error}), so each logs its own times; perhaps"
            " GLOO_SOCKET_IFNAME must name the network device.",
            on_every_rank=True,
        )
        return None
