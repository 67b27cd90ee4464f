"""Programs of several ranks that are forked from this process, which has imported what they need.

Each ends as an interpreter does that was started for it: an uncaught exception is printed, `sys.exit` sets the status,
threads are joined, and the interpreter is finalized, in which hooks and handlers of C++ can still crash.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

_start_program: Any = subprocess.Popen


def start(program: Callable[[], None], output: Path, environment: dict[str, str]) -> ForkedProcess:
    """Runs a program in a process and a session of its own; ranks that Lightning's launcher starts in it run it too."""

    def begin() -> None:
        os.setsid()
        stream = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for number in (1, 2):
            os.dup2(stream, number)

        def start_rank(command: Any, *args: Any, env: Any = None, **kwargs: Any) -> Any:
            is_rank = env is not None and env.get("LOCAL_RANK") != os.environ.get("LOCAL_RANK") and "MASTER_PORT" in env
            if is_rank and command[0] == sys.executable and "LOCAL_RANK" in env:
                return ForkedProcess(lambda: _run_as_interpreter(program), env)
            return _start_program(command, *args, env=env, **kwargs)

        subprocess.Popen = start_rank  # type: ignore[assignment, misc]
        _run_as_interpreter(program)

    return ForkedProcess(begin, environment)


class ForkedProcess:
    """A forked process with what Lightning uses of `subprocess.Popen`."""

    def __init__(self, begin: Callable[[], None], environment: dict[str, str]) -> None:
        self.returncode: int | None = None
        self._lock = threading.Lock()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.environ.clear()
            os.environ.update(environment)
            try:
                begin()
            finally:
                os._exit(70)  # it has not come to its own end

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run_as_interpreter(program: Callable[[], None]) -> None:
    status = 0
    try:
        program()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        status = 1
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.pythonapi.Py_Exit(status)
