"""Stacks of the threads of a process, without its help. Linux only.

``faulthandler`` writes a stack in a signal handler, which needs no GIL, in every process that has called
`make_dumpable` and in those forked from it, such as the workers of a dataloader. It reads frames as they are: in a
thread that runs Python they change meanwhile, and the process can crash. So only threads get the signal that sleep in
the kernel or hold the GIL inside a C function; each writes its own stack.
"""

from __future__ import annotations

import ctypes
import faulthandler
import itertools
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from lightning_commopt.compat.hooks import waited_in
from lightning_commopt.watch import times
from lightning_commopt.watch.hangs.marks import anonymous_file
from lightning_commopt.watch.hangs.process import catches

MAX_FRAMES = 200
"""Maximum number of frames of a thread that are sent, the innermost ones. The stack of a fit has some tens; an endless
recursion would fill the report."""

SIGNAL = getattr(signal, "SIGRTMIN", 34) + 7
"""The signal in whose handler a thread writes its stack. Real-time signals have no predefined meaning, and other
programs use the first ones first."""

_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$', re.MULTILINE)
_COMPILERS = tuple(f"/torch/{name}/" for name in ("_dynamo", "_inductor", "_functorch"))
_TRAINERS = ("/pytorch_lightning/trainer/", "/lightning/pytorch/trainer/")
_LIBRARIES = ("site-packages", "dist-packages", "/lib/python", "<frozen", "/lightning_commopt/")


@dataclass(frozen=True)
class Frame:
    """A function on a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        """Returns "file:line in function", with the last two parts of the path."""
        return f"{os.sep.join(self.file.split(os.sep)[-2:])}:{self.line} in {self.function}"


def make_dumpable() -> int:
    """Makes each thread of this process write its stack to a file at `SIGNAL`; returns the file's descriptor."""
    fd = _stacks_fd()
    # The Trainer removes handlers that it does not know at the end of a run, and faulthandler does not notice that.
    faulthandler.unregister(SIGNAL)
    faulthandler.register(SIGNAL, file=fd, all_threads=False, chain=False)
    return fd


@cache
def _stacks_fd() -> int:
    return anonymous_file("commopt-stacks")


def own_stacks() -> dict[int, list[tuple[str, int, str]]]:
    """Returns file, line and name of the innermost functions of each thread but the caller's, by its ident."""
    stacks = {}
    # Sleeping starts a new turn with the GIL. Until it is over no other thread runs, so none returns from a frame.
    time.sleep(0)
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            walked = itertools.islice(traceback.walk_stack(frame), MAX_FRAMES)
            stacks[ident] = [(caller.f_code.co_filename, line or 0, caller.f_code.co_name) for caller, line in walked]
    return stacks


def dump_stack(pid: int, thread: int, fd: int, limit_s: float) -> list[Frame]:
    """Makes a thread write its stack to ``fd``. It must not run Python code: it could crash.

    Returns:
        Its frames, the innermost first; none if it writes nothing within the limit, or its process has no handler.
    """
    if not catches(pid, SIGNAL):
        return []
    start = end = os.fstat(fd).st_size
    try:
        ctypes.CDLL(None).tgkill(pid, thread, int(SIGNAL))
    except AttributeError:  # the C library is older than glibc 2.30
        return []
    deadline = time.monotonic() + limit_s
    changed_at = 0.0
    while (now := time.monotonic()) < deadline and not (changed_at and now - changed_at > times.QUIET_S):
        time.sleep(times.PROCESS_POLL_S)
        if (size := os.fstat(fd).st_size) != end:
            end, changed_at = size, now
    matches = _FRAME.finditer(os.pread(fd, end - start, start).decode("utf-8", "replace"))
    return [Frame(match[1], int(match[2]) if match[2].isdecimal() else 0, match[3]) for match in matches]


def collective_in(frames: Sequence[Frame]) -> str | None:
    """Returns the collective that a thread is in; None if there is none."""
    called = None
    for depth, frame in enumerate(frames):
        called = waited_in(frame.file, frame.function, is_innermost=depth == 0) or called
    return called


def is_compiling(frames: Sequence[Frame]) -> bool:
    """Returns whether a thread is inside torch's compilers."""
    return any(part in frame.file for frame in frames[:30] for part in _COMPILERS)


def user_place(frames: Sequence[Frame]) -> Frame | None:
    """Returns the innermost frame of the user's own code that the Trainer has called; None if there is none."""
    is_outside = True
    innermost = None
    for frame in reversed(frames):
        is_outside = is_outside and not any(part in frame.file for part in _TRAINERS)
        if not is_outside and not any(part in frame.file for part in _LIBRARIES):
            innermost = frame
    return innermost
