"""ForkedProcess: a process that a `ForkServer` has forked for this one, with the interface of ``subprocess.Popen``."""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import NoReturn

_POLL_S = 0.02


class ForkedProcess:
    """A child of this process that a server has forked: the part of ``subprocess.Popen`` that we need.

    ``stdout`` is None if it shares our output.
    """

    def __init__(self, pid: int, stdout: io.FileIO | None) -> None:
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None
        self._waiting = threading.RLock()

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while self._wait(0 if end is None else os.WNOHANG) is None:
            if timeout is not None and end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(_POLL_S)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _wait(self, options: int) -> int | None:
        with self._waiting:  # Lightning polls its ranks on a thread
            if self.returncode is None:
                try:
                    pid, status = os.waitpid(self.pid, options)
                except ChildProcessError:  # reaped by the system, as where SIGCHLD is ignored; as in Popen
                    pid, status = self.pid, 0
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode


_FLUSH_FAILED = 120  # Python's status if standard output or error cannot be flushed


def run_to_exit(module: str) -> NoReturn:
    """Runs a module as ``__main__``, and ends the process with the status of ``python -m``."""
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
        status = _FLUSH_FAILED
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
    """Flushes all files of Python and of C; returns whether standard output and error could be flushed."""
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
