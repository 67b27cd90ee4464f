"""Warns if a program ends before ranks have exchanged or saved what they trained last."""

from __future__ import annotations

import os
import sys
import weakref

from lightning_commopt.sync.diloco.rounds import Rounds
from lightning_commopt.text.validation import warn


class Unfinished:
    """Counts the steps of a loop that are neither in the global weights nor in a checkpoint yet.

    Warns on rank 0 if there are any when the strategy is deleted, or when the program ends without an error.

    Args:
        strategy: the strategy of the loop, which is not kept alive.
    """

    def __init__(self, strategy: object) -> None:
        self._num_steps = 0
        weakref.finalize(strategy, self._warn, os.getpid())

    def note_step(self, rounds: Rounds) -> None:
        """Records a counted step."""
        self._num_steps = rounds.num_steps if rounds.changed or rounds.under_way else 0

    def note_kept(self) -> None:
        """Records that the training was finished, or saved so that it resumes exactly."""
        self._num_steps = 0

    def _warn(self, pid: int) -> None:
        has_failed = hasattr(sys, "last_value")  # the traceback that ended the program is what matters then
        if self._num_steps and os.getpid() == pid and not has_failed:
            warn(
                f"DiLoCo: the training has ended after {self._num_steps} steps without strategy.finish(). What ranks"
                " have trained since their last exchange is lost, unless a checkpoint has it; model.state_dict() has"
                " each rank's own weights."
            )
