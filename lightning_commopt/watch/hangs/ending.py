"""How a rank and all that it has started are ended for certain."""

from __future__ import annotations

import os
import signal
import time

from lightning_commopt.watch.hangs.native import descendants, is_alive
from lightning_commopt.watch.hangs.rank_link import RankLink

_POLL_S = 0.05


def end_rank(pid: int, link: RankLink, orderly_s: float) -> None:
    """Ends a rank's process with a status that is not zero, and the processes that it has started.

    It is asked to end itself, with status 1, then killed. Its dataloader's workers, which may sleep, are killed.

    Args:
        pid: of its process.
        link: to it.
        orderly_s: seconds that it has to end by itself.
    """
    children = descendants(pid)
    link.send(abort=True)
    deadline = time.monotonic() + orderly_s
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    for each in (pid, *children):
        try:
            os.kill(each, signal.SIGKILL)
        except OSError:
            continue
