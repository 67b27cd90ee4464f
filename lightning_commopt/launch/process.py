"""Runs a command so that no process of it is left afterwards, whatever happens."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from lightning_commopt.launch.lab.ranks import start_program

_POLL_S = 0.1
_CHUNK_BYTES = 65536
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class InterruptedRun(BaseException):
    """This process received ``signal``, which asks it to stop; like `KeyboardInterrupt` it is not an error."""

    def __init__(self, received: signal.Signals) -> None:
        super().__init__(f"interrupted by {received.name}")
        self.signal = received


def run_in_group(
    command: Sequence[str], env: Mapping[str, str], on_output: Callable[[bytes], None], grace_s: float = 5
) -> int:
    """Runs a command in a process group of its own and waits for it.

    When its first process has ended, the rest of the group is killed. When we receive SIGINT, SIGTERM or SIGHUP, the
    group receives SIGINT, and SIGKILL after ``grace_s`` seconds (a rank in a hung collective obeys nothing else), or at
    once when a second signal arrives. Signals that we ignore, as under nohup, stay ignored. ``env`` is the whole
    environment; ``on_output`` receives standard output and error.

    Returns:
        The exit status of the first process; the negative number of the signal that ended it.

    Raises:
        InterruptedRun: we received one of the signals.
    """
    with collect_signals() as received:
        process = start_program(command, env)
        try:
            _follow(process, on_output, received, grace_s)
        finally:
            _kill_group(process.pid)
            status = process.wait()
            assert process.stdout is not None
            process.stdout.close()
    if received:
        raise InterruptedRun(received[0])
    return status


@contextmanager
def raise_signals() -> Iterator[None]:
    """Raises `InterruptedRun` at the first signal that asks us to stop; later ones do not disturb the clean-up.

    For code that an exception may leave at any line. Signals that we ignore stay ignored.
    """
    received: list[int] = []

    def interrupt(number: int, _: Any) -> None:
        received.append(number)
        if len(received) == 1:
            raise InterruptedRun(signal.Signals(number))

    with _handle_signals(interrupt):
        yield


def _follow(
    process: subprocess.Popen[bytes],
    on_output: Callable[[bytes], None],
    received: list[signal.Signals],
    grace_s: float,
) -> None:
    """Forwards output until the first process has ended or may be killed."""
    assert process.stdout is not None
    pipe = process.stdout.fileno()
    is_open, kill_at = True, None
    while True:
        # The process stays to be reaped: until then nobody else can get the number of its group.
        has_ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        if has_ended:
            _kill_group(process.pid)  # one that still writes would keep us here
        readable = is_open and select.select([pipe], [], [], 0 if has_ended else _POLL_S)[0]
        if readable:
            chunk = os.read(pipe, _CHUNK_BYTES)
            is_open = bool(chunk)
            if chunk:
                on_output(chunk)
        elif has_ended:
            return
        elif not is_open:
            time.sleep(_POLL_S)
        if received and kill_at is None:
            kill_at = time.monotonic() + grace_s
            inherits_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            os.killpg(process.pid, signal.SIGTERM if inherits_ignored else signal.SIGINT)
        if len(received) > 1 or (kill_at is not None and time.monotonic() > kill_at):
            return


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # macOS refuses where only a zombie is left
        os.killpg(pid, signal.SIGKILL)


@contextmanager
def collect_signals() -> Iterator[list[signal.Signals]]:
    """Collects the signals that ask us to stop, where an exception could lose a process that was just started."""
    received: list[signal.Signals] = []
    with _handle_signals(lambda number, _: received.append(signal.Signals(number))):
        yield received


@contextmanager
def _handle_signals(handler: Callable[[int, Any], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handled = [number for number in _STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
