"""Runs commands, and leaves none of their processes behind, whatever happens."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import wait
from typing import Any

_POLL_S = 0.1  # output is forwarded at once; only ends, signals and time limits are noticed this much later
_PIPE_BYTES = 2**20  # one read of this size empties any pipe of Linux
_LINES_IN_MESSAGE = 40  # a screenful: a traceback, and some lines before it
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_GROUP_SIGNALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class InterruptedRun(BaseException):
    """This process received ``signal``, which asks it to stop; like `KeyboardInterrupt` it is not an error."""

    def __init__(self, received: signal.Signals) -> None:
        super().__init__(f"interrupted by {received.name}")
        self.signal = received


class RankError(RuntimeError):
    """A rank failed, or exceeded the time limit; the message has the rank's last output.

    Attributes:
        rank: the first rank that failed, or the lowest that still ran.
        status: its exit status, negative for the signal that ended it; None if it still ran.
        outputs: the output of each rank, by rank.
    """

    def __init__(self, rank: int, status: int | None, timeout_s: float | None, outputs: list[str]) -> None:
        outcome = f"still ran after {timeout_s:g} s" if status is None else f"ended with status {status}"
        tail = "\n".join(outputs[rank].splitlines()[-_LINES_IN_MESSAGE:])
        super().__init__(f"rank {rank} {outcome}; its last output:\n{tail}")
        self.rank = rank
        self.status = status
        self.outputs = outputs


def run_ranks(
    programs: Iterable[tuple[Sequence[str], Mapping[str, str]]],
    *,
    on_output: Callable[[int, bytes], None],
    timeout_s: float | None = None,
) -> list[str]:
    """Runs a program as each rank, as the leader of a session, and waits for all of them.

    No process of the ranks' process groups is left when this returns or raises.

    Args:
        programs: the command and the whole environment of each rank.
        on_output: called with a rank and a part of its standard output and error.
        timeout_s: seconds the ranks may take; None for no limit.

    Returns:
        The output of each rank, by rank.

    Raises:
        RankError: a rank failed, or exceeded the limit.
        InterruptedRun: a signal arrived while ranks were started.
    """
    ranks: list[_Program] = []
    outputs: list[bytearray] = []

    def collect(rank: int, chunk: bytes) -> None:
        outputs[rank] += chunk
        on_output(rank, chunk)

    with ExitStack() as closing:
        try:
            # Signals are collected here, as an exception could lose a process that was just started.
            with collect_signals() as received:
                for rank, (command, env) in enumerate(programs):
                    outputs.append(bytearray())
                    ranks.append(_Program(command, env, partial(collect, rank)))
                    closing.callback(ranks[-1].close)
            if received:
                raise InterruptedRun(received[0])
            stopped = _follow(ranks, timeout_s=timeout_s)
            status = None if stopped is None else stopped.process.returncode
        finally:
            # Ranks are killed before their last output is read: what they print when others end is not the cause.
            for program in ranks:
                program.kill()
    texts = [output.decode(errors="replace") for output in outputs]
    if stopped is not None:
        raise RankError(ranks.index(stopped), status, timeout_s, texts)
    return texts


class _Program:
    """A running program, the leader of a session, and its output."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], on_output: Callable[[bytes], None]) -> None:
        self.process = start_program(command, env)
        assert self.process.stdout is not None
        self.pipe, self.is_open = self.process.stdout.fileno(), True
        self._on_output = on_output

    def read(self) -> None:
        """Waits for output and forwards it, or notes that there will be no more."""
        chunk = os.read(self.pipe, _PIPE_BYTES)
        self.is_open = bool(chunk)
        if chunk:
            self._on_output(chunk)

    def is_running(self) -> bool:
        """Returns whether its first process runs; once it has ended, the rest of its group is killed."""
        if self.process.returncode is not None:
            return False
        # WNOWAIT leaves the process to be reaped later. Until then no other group can have its number.
        if os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return True
        self.kill()
        self.process.wait()
        return False

    def kill(self) -> None:
        """Kills its group, unless its first process has ended and been reaped."""
        if self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kills its group, and forwards the output that is left."""
        self.kill()
        with self.process:  # closes the pipe
            self.process.wait()
            if self.is_open and wait([self.pipe], 0):
                self.read()


def _follow(
    programs: Sequence[_Program],
    *,
    timeout_s: float | None = None,
    received: Sequence[signal.Signals] = (),
    grace_s: float = 0.0,
) -> _Program | None:
    """Forwards the output of programs until they end, one fails, or they may be killed.

    Returns:
        None if all have succeeded, else the first that failed, or the lowest that still runs.
    """
    end = math.inf if timeout_s is None else time.monotonic() + timeout_s
    kill_at = math.inf
    while True:
        ready = wait([program.pipe for program in programs if program.is_open], _POLL_S)
        for program in programs:
            if program.pipe in ready:
                program.read()
        running = [program for program in programs if program.is_running()]
        failed = [program for program in programs if program.process.returncode not in (None, 0)]
        if failed or not running or len(received) > 1 or time.monotonic() > min(end, kill_at):
            return next(iter((*failed, *running)), None)
        if received and kill_at == math.inf:
            kill_at = time.monotonic() + grace_s
            # A program that inherits an ignored SIGINT, as from nohup, ignores it too.
            inherits_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            for program in running:
                os.killpg(program.process.pid, signal.SIGTERM if inherits_ignored else signal.SIGINT)


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
        program = _Program(command, env, on_output)
        try:
            _follow([program], received=received, grace_s=grace_s)
        finally:
            program.close()
    if received:
        raise InterruptedRun(received[0])
    return program.process.returncode


def run_beneath(command: Sequence[str], env: Mapping[str, str]) -> int:
    """Runs a command in this process group, with our input and output; how it handles a signal is up to the command.

    Terminals and schedulers send signals to the whole group, so we only wait until the command has handled them.
    SIGTERM is passed on, because we may be the only process that receives it: containers send it to their first one.

    Returns:
        The exit status as a shell has it: 128 more than the number of the signal that ended the command.

    Raises:
        OSError: the command cannot be started.
    """
    started: list[subprocess.Popen[bytes]] = []
    early: list[int] = []  # signals that arrived while the command was being started

    def handle(number: int, _: Any) -> None:
        if number == signal.SIGTERM and started:
            started[0].send_signal(number)
        elif number == signal.SIGTERM:
            early.append(number)

    with _handle_signals(handle, (signal.SIGTERM, *_GROUP_SIGNALS)):
        process = subprocess.Popen(command, env=env)
        started.append(process)
        if early:
            process.send_signal(signal.SIGTERM)
        status = process.wait()
    return status if status >= 0 else 128 - status


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


@contextmanager
def collect_signals() -> Iterator[list[signal.Signals]]:
    """Collects the signals that ask us to stop, for code in which an exception could lose a process just started."""
    received: list[signal.Signals] = []
    with _handle_signals(lambda number, _: received.append(signal.Signals(number))):
        yield received


@contextmanager
def _handle_signals(
    handler: Callable[[int, Any], None], signals: Sequence[signal.Signals] = _STOP_SIGNALS
) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handled = [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
