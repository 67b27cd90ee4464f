"""Follows the processes of ranks until all have ended, one has failed or a limit is exceeded."""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

_POLL_S = 0.05
_CHUNK_BYTES = 65536
_LINES_IN_MESSAGE = 40


class RankError(RuntimeError):
    """A rank failed, or exceeded the time limit; the message has the rank's last output.

    Attributes:
        rank: the first that failed, or the lowest that still ran.
        status: its exit status, negative for the signal that ended it; None if it still ran.
        outputs: of all ranks, by rank.
    """

    def __init__(self, message: str, rank: int, status: int | None, outputs: list[str]) -> None:
        super().__init__(message)
        self.rank = rank
        self.status = status
        self.outputs = outputs


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


class RankProcess:
    """One rank: a process and its output so far."""

    def __init__(
        self, rank: int, process: subprocess.Popen[bytes], on_output: Callable[[int, bytes], None] | None
    ) -> None:
        self.rank = rank
        self.process = process
        self._on_output = on_output
        self._output = bytearray()

    @property
    def pipe(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    @property
    def output(self) -> str:
        return self._output.decode(errors="replace")

    def read(self) -> bool:
        """Waits for output and reads it; returns whether there can be more."""
        chunk = os.read(self.pipe, _CHUNK_BYTES)
        self._output += chunk
        if chunk and self._on_output is not None:
            self._on_output(self.rank, chunk)
        return bool(chunk)

    def close(self) -> None:
        """Reads the rest of the output; no process may be left that could write to it."""
        assert self.process.stdout is not None
        try:
            while self.read():
                pass
        finally:
            self.process.stdout.close()
            self.process.wait()


def watch(ranks: Sequence[RankProcess], timeout_s: float | None) -> RankProcess | None:
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


def error_of(
    stopped: RankProcess, status: int | None, timeout_s: float | None, ranks: Sequence[RankProcess]
) -> RankError:
    """Returns the error to raise for a rank that `watch` returned."""
    how = f"still ran after {timeout_s:g} s" if status is None else f"ended with status {status}"
    tail = "\n".join(stopped.output.splitlines()[-_LINES_IN_MESSAGE:])
    outputs = [rank.output for rank in ranks]
    return RankError(f"rank {stopped.rank} {how}; its last output:\n{tail}", stopped.rank, status, outputs)
