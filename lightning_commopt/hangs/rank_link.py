"""RankLink: a watcher's connection to the rank that has started it, in lines of JSON."""

from __future__ import annotations

import itertools
import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class RankLink:
    """One end of the connection between a rank and its watcher; both use it.

    Args:
        connection: of a pair of sockets.
        receive: called with each message, on a thread of its own, and with None when the other end has closed.
    """

    def __init__(self, connection: socket.socket, receive: Callable[[dict[str, Any] | None], None]) -> None:
        self._connection = connection
        self._receive = receive
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._answers: dict[int, dict[str, Any]] = {}
        self._has_answers = threading.Condition()
        self._thread = threading.Thread(target=self._read, name="commopt-hang-monitor", daemon=True)
        self._thread.start()

    def send(self, **message: Any) -> None:
        """Sends a message; nothing happens if the other end has gone."""
        with suppress(OSError), self._lock:
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def request(self, limit_s: float, **message: Any) -> dict[str, Any] | None:
        """Sends a message, and returns the answer; None if it does not come within the limit."""
        number = next(self._numbers)
        threading.Thread(target=self.send, kwargs=message | {"request": number}, daemon=True).start()
        with self._has_answers:
            self._has_answers.wait_for(lambda: number in self._answers, limit_s)
            return self._answers.pop(number, None)

    def close(self) -> None:
        """Closes this end."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=1)
        self._connection.close()

    def _read(self) -> None:
        with suppress(OSError, ValueError), self._connection.makefile("rb") as reader:
            for line in reader:
                message = json.loads(line)
                if "answer" in message:
                    with self._has_answers:
                        self._answers[message["answer"]] = message
                        self._has_answers.notify_all()
                else:
                    self._receive(message)
        self._receive(None)
