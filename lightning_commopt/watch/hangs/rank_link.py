"""RankLink: a watcher's connection to the rank that has started it, in lines of JSON."""

from __future__ import annotations

import itertools
import json
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_SEND_S = 5


class RankLink:
    """One end of the connection between a rank and its watcher; both use it.

    Args:
        connection: of a pair of sockets.
    """

    def __init__(self, connection: socket.socket) -> None:
        # Whoever sends must not hang because the other end has been stopped.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_S, 0))
        self._connection = connection
        self._receive: Callable[[dict[str, Any]], None] = lambda message: None
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._answers: dict[int, dict[str, Any]] = {}
        self._has_answers = threading.Condition()
        self._thread = threading.Thread(target=self._read, name="commopt-hang-monitor", daemon=True)

    def start(self, receive: Callable[[dict[str, Any]], None]) -> None:
        """Begins to receive.

        Args:
            receive: called with each message, on a thread of its own.
        """
        self._receive = receive
        self._thread.start()

    def send(self, **message: Any) -> None:
        """Sends a message; nothing happens if the other end has gone, or takes nothing for some seconds."""
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
