"""ForkedProcess: a process that a server has forked for this one, in the terms of ``subprocess.Popen``."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import threading
import time

_POLL_S = 0.02


class ForkedProcess:
    """A child of this process that a server has forked; what of ``subprocess.Popen`` is needed of it.

    Attributes:
        pid: its number.
        returncode: as ``Popen`` has it; None until it has been waited for.
        stdout: where its output can be read; None if it has ours.
    """

    def __init__(self, pid: int, stdout: io.FileIO | None) -> None:
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None
        self._waiting = threading.RLock()

    def poll(self) -> int | None:
        """Returns ``returncode``, which is known once the process has ended."""
        return self._wait(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end.

        Raises:
            subprocess.TimeoutExpired: it still runs after ``timeout`` seconds.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while self._wait(0 if end is None else os.WNOHANG) is None:
            if timeout is not None and end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(_POLL_S)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal, if the process has not been waited for."""
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
