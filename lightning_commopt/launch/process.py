"""Runs commands so that no process of them is left afterwards, whatever happens."""

from __future__ import annotations

import os
import select
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

_POLL_S = 0.1
_CHUNK_BYTES = 65536
_LINES_IN_MESSAGE = 40
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class InterruptedRun(BaseException):
    """This process received ``signal``, which asks it to stop; like `KeyboardInterrupt` it is not an error."""

    def __init__(self, received: signal.Signals) -> None:
        super().__init__(f"interrupted by {received.name}")
        self.signal = received


class RankError(RuntimeError):
    """A rank failed, or exceeded the time limit; the message has the rank's last output.

    Attributes:
        rank: the first that failed, or the lowest that still ran.
        status: its exit status, negative for the signal that ended it; None if it still ran.
        outputs: of all ranks, by rank.
    """

    def __init__(self, rank: int, status: int | None, timeout_s: float | None, outputs: list[str]) -> None:
        how = f"still ran after {timeout_s:g} s" if status is None else f"ended with status {status}"
        tail = "\n".join(outputs[rank].splitlines()[-_LINES_IN_MESSAGE:])
        super().__init__(f"rank {rank} {how}; its last output:\n{tail}")
        self.rank = rank
        self.status = status
        self.outputs = outputs


def run_ranks(
    programs: Iterable[tuple[Sequence[str], Mapping[str, str]]],
    *,
    on_output: Callable[[int, bytes], None],
    timeout_s: float | None = None,
    end: Callable[[], None] | None = None,
) -> list[str]:
    """Runs a program as each rank, as the leader of a session, and waits for all of them.

    No process of the ranks is left when this returns or raises.

    Args:
        programs: the command and the whole environment of each rank.
        on_output: called with a rank and a part of its standard output and error.
        timeout_s: seconds the ranks may take; None for no limit.
        end: ends all processes of the ranks; None to kill the sessions of those that still run.

    Returns:
        The output of each rank, by rank.

    Raises:
        RankError: a rank failed, or exceeded the limit.
        InterruptedRun: a signal arrived while ranks were started.
    """
    ranks: list[_Rank] = []
    with ExitStack() as closing:
        try:
            with collect_signals() as received:  # an exception could lose a process that was just started
                for command, env in programs:
                    ranks.append(_Rank(len(ranks), start_program(command, env), on_output))
                    closing.callback(ranks[-1].close)
            if received:
                raise InterruptedRun(received[0])
            stopped = _watch(ranks, timeout_s)
            status = None if stopped is None else stopped.process.returncode
        finally:
            if end is not None:
                end()
            for rank in ranks if end is None else ():
                if rank.process.poll() is None:
                    _kill_group(rank.process.pid)
    outputs = [rank.output.decode(errors="replace") for rank in ranks]
    if stopped is not None:
        raise RankError(stopped.number, status, timeout_s, outputs)
    return outputs


class _Rank:
    """A process and its output so far."""

    def __init__(self, number: int, process: subprocess.Popen[bytes], on_output: Callable[[int, bytes], None]) -> None:
        assert process.stdout is not None
        self.number, self.process, self.pipe = number, process, process.stdout
        self.output = bytearray()
        self._on_output = on_output

    def read(self) -> bool:
        """Waits for output and reads it; returns whether there can be more."""
        chunk = os.read(self.pipe.fileno(), _CHUNK_BYTES)
        self.output += chunk
        if chunk:
            self._on_output(self.number, chunk)
        return bool(chunk)

    def close(self) -> None:
        """Reads the rest of the output; no process may be left that could write to it."""
        try:
            while self.read():
                pass
        finally:
            self.pipe.close()
            self.process.wait()


def _watch(ranks: Sequence[_Rank], timeout_s: float | None) -> _Rank | None:
    """Reads the output of all ranks until they end.

    Returns:
        None if all have succeeded, else the first that failed, or the lowest that still runs at the limit.
    """
    end = None if timeout_s is None else time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.pipe, selectors.EVENT_READ, rank)
        while True:
            for key, _ in selector.select(_POLL_S):
                if not key.data.read():
                    selector.unregister(key.fd)
            running = [rank for rank in ranks if rank.process.poll() is None]
            failed = [rank for rank in ranks if rank.process.returncode not in (None, 0)]
            if failed:
                return failed[0]
            if not running:
                return None
            if end is not None and time.monotonic() > end:
                return running[0]


def start_program(command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts a program as the leader of a session, with no input and with its output in a pipe."""
    return subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


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
