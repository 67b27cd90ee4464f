"""Python stacks of a process that may be stuck: it writes them in a signal handler, which needs no GIL.

``faulthandler`` does that, in every process that has called `make_dumpable` and in those forked from it, such as the
workers of a dataloader.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from dataclasses import dataclass
from functools import cache
from typing import Any

from lightning_commopt.watch.hangs.marks import anonymous_file
from lightning_commopt.watch.hangs.native import catches

SIGNAL = getattr(signal, "SIGRTMIN", 34) + 7
_POLL_S = 0.01
_QUIET_S = 0.1

_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_DISTRIBUTED = f"{os.sep}torch{os.sep}distributed{os.sep}"
_COMPILERS = tuple(f"{os.sep}torch{os.sep}{name}{os.sep}" for name in ("_dynamo", "_inductor", "_functorch"))
_TRAINERS = ("/pytorch_lightning/trainer/", "/lightning/pytorch/trainer/")
_LIBRARIES = (
    "site-packages",
    "dist-packages",
    "/lib/python",
    "<frozen",
    "/lightning_commopt/",
)


@dataclass(frozen=True)
class Frame:
    """A function that has been called and has not returned."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        """The place as "file:line in function", with the last two parts of the path."""
        return f"{os.sep.join(self.file.split(os.sep)[-2:])}:{self.line} in {self.function}"


def make_dumpable() -> int:
    """Has this process write all its threads' stacks to a file whenever it gets `SIGNAL`.

    Returns:
        The file's descriptor; it stays open until the process ends.
    """
    fd = _stacks_fd()
    faulthandler.unregister(SIGNAL)  # the end of a Trainer's run takes away all handlers that it does not know
    faulthandler.register(SIGNAL, file=fd, all_threads=True, chain=False)
    return fd


@cache
def _stacks_fd() -> int:
    return anonymous_file("commopt-stacks")


def dump_stacks(pid: int, fd: int, limit_s: float) -> str:
    """Makes a process write its stacks, and returns them.

    Args:
        pid: of the process.
        fd: of the file that it writes to.
        limit_s: how long to wait for it.

    Returns:
        What it has written; "" if it does not within the limit, or would not have known the signal.
    """
    if not catches(pid, SIGNAL):
        return ""
    start = end = os.fstat(fd).st_size
    try:
        os.kill(pid, SIGNAL)
    except OSError:
        return ""
    deadline = time.monotonic() + limit_s
    changed_at = 0.0
    while (now := time.monotonic()) < deadline and not (changed_at and now - changed_at > _QUIET_S):
        time.sleep(_POLL_S)
        if (size := os.fstat(fd).st_size) != end:
            end, changed_at = size, now
    return os.pread(fd, end - start, start).decode("utf-8", "replace")


def parse_stacks(text: str) -> dict[int, list[Frame]]:
    """Returns the frames of every thread by its ident, the innermost first."""
    stacks: dict[int, list[Frame]] = {}
    frames: list[Frame] = []
    for line in text.splitlines():
        if match := _THREAD.match(line):
            frames = stacks.setdefault(int(match[1], 16), [])
        elif match := _FRAME.match(line):
            number = int(match[2]) if match[2].isdecimal() else 0
            frames.append(Frame(match[1], number, match[3]))
    return stacks


def collective_in(frames: list[Frame]) -> str | None:
    """Returns the function of torch's distributed package that a thread has called; None if it is in none."""
    called = None
    for frame in frames:
        if _DISTRIBUTED in frame.file and frame.function != "wrapper":
            called = frame.function
    return called


def is_compiling(frames: list[Frame]) -> bool:
    """Returns whether a thread is inside torch's compilers."""
    return any(part in frame.file for frame in frames[:30] for part in _COMPILERS)


def user_place(frames: list[Frame]) -> Frame | None:
    """Returns the innermost frame of the user's own code that the Trainer has called; None if there is none."""
    is_outside = True
    found = None
    for frame in reversed(frames):
        is_outside = is_outside and not any(part in frame.file for part in _TRAINERS)
        if not is_outside and not any(part in frame.file for part in _LIBRARIES):
            found = frame
    return found


def plain(stacks: dict[int, list[Frame]]) -> dict[str, Any]:
    """Returns stacks as JSON has them."""
    return {hex(ident): [str(frame) for frame in frames] for ident, frames in stacks.items()}
