"""Runs a module to the end of this process, as ``python -m`` does, but for tearing down what was imported.

The interpreter takes more than a second to free what torch and Lightning consist of, object by object. The kernel frees
their memory at once. What a program can see of its end comes first, in Python's own order: threads are joined, exit
handlers run, files are flushed.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import os
import runpy
import signal
import sys
import threading
from contextlib import suppress
from typing import NoReturn

_STATUS_OF_A_LOST_OUTPUT = 120  # as Python's, where standard output or error cannot be flushed


def run_to_exit(module: str) -> NoReturn:
    """Runs a module as ``__main__``, and ends the process with the status that ``python -m`` would end with.

    Args:
        module: its full name.
    """
    status, is_interrupted = 0, False
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        status = _status_of(stop)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status, is_interrupted = 1, isinstance(error, KeyboardInterrupt)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if not _flush():
        status = _STATUS_OF_A_LOST_OUTPUT
    if is_interrupted:  # so that a shell knows
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 0xFF)


def _status_of(stop: SystemExit) -> int:
    """Returns the exit status; what is not a number is printed, and means failure."""
    if stop.code is None or isinstance(stop.code, int):
        return int(stop.code or 0)
    with suppress(Exception):
        sys.stdout.flush()
    print(stop.code, file=sys.stderr)
    return 1


def _flush() -> bool:
    """Flushes all files that Python has open, and those of C; returns whether standard output and error could be."""
    for file in gc.get_objects():
        if isinstance(file, io.IOBase) and file not in (sys.stdout, sys.stderr):
            with suppress(Exception):
                file.flush()
    ctypes.CDLL(None).fflush(None)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except Exception:
        return False
    return True
