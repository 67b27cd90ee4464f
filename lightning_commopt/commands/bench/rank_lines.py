"""What rank 0 prints, read by the process that has started it."""

from __future__ import annotations

import json
from collections.abc import Callable

MODULE = "lightning_commopt.commands.bench.rank"
"""What each rank runs."""

PROGRESS = "COMMOPT PROGRESS "
"""Begins a line with the progress, as JSON."""


def progress_line(num_done: int, total: int, label: str) -> str:
    """Returns the line for a `LineReader`."""
    return PROGRESS + json.dumps([num_done, total, label])


class LineReader:
    """Puts output together to lines, and hands on the progress in them.

    Attributes:
        on_progress: called with the blocks that are done, those that there are, and the name of the next one.
    """

    def __init__(self) -> None:
        self.on_progress: Callable[[int, int, str], None] = lambda num_done, total, label: None
        self._rest = b""

    def read(self, output: bytes) -> None:
        """Takes in a part of the output, which may end within a line."""
        *lines, self._rest = (self._rest + output).split(b"\n")
        for line in lines:
            if line.startswith(PROGRESS.encode()):
                self.on_progress(*json.loads(line[len(PROGRESS) :]))
