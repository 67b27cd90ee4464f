"""Messages of watchers: lines of JSON, to their rank over a socket pair, to each other over TCP.

The watchers of a run share a secret key, which is never sent. A server begins each connection with a nonce; from a
client that cannot sign it, it reads at most `_HELLO_BYTES` within `times.HELLO_S`. There are `_MAX_STRANGERS` such
clients at a time: a new one takes the place of the oldest, so that clients that send nothing do not keep watchers out.
Questions and answers are signed too, with nonces of both sides, so that they cannot be replayed. Nothing is encrypted.
"""

from __future__ import annotations

import hmac
import itertools
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from lightning_commopt.watch import times
from lightning_commopt.watch.own_errors import log_own_errors

_MAX_STRANGERS = 64
"""Maximum number of connected clients that have not identified themselves. It is a judgement: it must be more than the
watchers that connect at the same moment (`PeerWatchers` asks 32 at a time), and few enough threads for a host that is
scanned."""

_MAX_BYTES = 64 * 2**20
"""Maximum length of a message. It is a judgement: several times a snapshot with thousands of collectives and all
stacks, and a limit for the memory that a damaged message can take."""

_PART_BYTES = 2**16
"""Size of the parts in which a socket is read, which is usually the most that it holds."""

_NONCE_BYTES = 32
"""Length of a nonce. It is that of a SHA-256 signature, so that neither is easier to guess."""

_HELLO_BYTES = 64
"""Length of a client's first line, which is a signature in hexadecimal digits."""

_Answer = Callable[[dict[str, Any]], dict[str, Any]]


class Address(NamedTuple):
    """Where a watcher listens, and whose it is."""

    ip: str
    port: int
    host: str


class GoneError(OSError):
    """The host answers, but nothing listens there any more."""


class UnreachableError(OSError):
    """The host does not answer."""


def ask(address: Address, key: str, question: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """Returns a watcher's answer.

    Args:
        address: where the watcher listens.
        key: shared by all watchers of a run.
        question: any JSON object.
        limit_s: seconds to wait for the answer, once connected.

    Raises:
        GoneError: its process has ended.
        UnreachableError: there is no answer with a valid signature within the limit, or no route to the host.
    """
    try:
        with socket.create_connection((address.ip, address.port), timeout=times.CONNECT_S) as connection:
            nonces = receive_line(connection, 2 * _NONCE_BYTES, limit_s) + secrets.token_hex(_NONCE_BYTES).encode()
            body = json.dumps(question).encode()
            own_nonce = nonces[2 * _NONCE_BYTES :]
            hello, signature = _sign(key, b"hello", nonces[: 2 * _NONCE_BYTES]), _sign(key, b"ask", nonces + body)
            connection.sendall(b"\n".join((hello, own_nonce + signature + body, b"")))
            line = receive_line(connection, _MAX_BYTES, limit_s)
    except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError, EOFError) as error:
        raise GoneError(f"its monitor at {address.ip}:{address.port} has ended") from error
    except OSError as error:
        raise UnreachableError(f"{address.host} does not answer at {address.ip}:{address.port}") from error
    signature, body = line[:64], line[64:]
    if not hmac.compare_digest(signature, _sign(key, b"answer", nonces + body)):
        raise UnreachableError(f"another program answers at {address.ip}:{address.port}")
    answer: dict[str, Any] = json.loads(body)
    return answer


class Server:
    """Answers other watchers, each on a thread of its own.

    Attributes:
        port: the server's port.
    """

    def __init__(self, ip: str, key: str, answer: _Answer) -> None:
        self._key, self._answer = key, answer
        self._places = threading.BoundedSemaphore(_MAX_STRANGERS)
        self._strangers: dict[socket.socket, None] = {}  # clients that have not identified themselves, the oldest first
        self._lock = threading.Lock()
        family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        self._listening = socket.create_server((ip, 0), family=family, backlog=1024)
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:  # this process has too many descriptors
                time.sleep(times.ACCEPT_AGAIN_S)
                continue
            if not self._places.acquire(blocking=False):
                self._drop_oldest()
                self._places.acquire()
            with self._lock:
                self._strangers[connection] = None
            try:
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            except RuntimeError:  # this process has too many threads
                self._forget(connection)
                connection.close()
                time.sleep(times.ACCEPT_AGAIN_S)

    def _drop_oldest(self) -> None:
        with self._lock, suppress(OSError, StopIteration):
            next(iter(self._strangers)).shutdown(socket.SHUT_RDWR)  # its thread then ends

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            del self._strangers[connection]
        self._places.release()

    def _serve(self, connection: socket.socket) -> None:
        # The other side sees that the connection is closed.
        with log_own_errors("HangMonitor's answer to another rank"), suppress(OSError, EOFError), connection:
            nonce = secrets.token_hex(_NONCE_BYTES).encode()
            try:
                connection.settimeout(times.HELLO_S)
                connection.sendall(nonce + b"\n")
                hello = receive_line(connection, _HELLO_BYTES, times.HELLO_S)
            finally:
                self._forget(connection)
            if not hmac.compare_digest(hello, _sign(self._key, b"hello", nonce)):
                return
            line = receive_line(connection, _MAX_BYTES, times.QUESTION_S)
            nonces, signature, body = nonce + line[:64], line[64:128], line[128:]
            if hmac.compare_digest(signature, _sign(self._key, b"ask", nonces + body)):
                answered = json.dumps(self._answer(json.loads(body))).encode()
                connection.settimeout(times.QUESTION_S)
                connection.sendall(_sign(self._key, b"answer", nonces + answered) + answered + b"\n")


class RankLink:
    """One end of the connection between a rank and its watcher, over a socket pair."""

    def __init__(self, connection: socket.socket) -> None:
        # A sender must not hang because the other end is stopped.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", times.SEND_S, 0))
        self._connection = connection
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        # Each open request has an entry by its number, which is None until the answer has come.
        self._answers: dict[int, dict[str, Any] | None] = {}
        self._has_answers, self._has_ended = threading.Condition(), False

    def start(self, answer: _Answer, on_end: Callable[[], None] = lambda: None) -> None:
        """Starts a thread that answers each message, and calls ``on_end`` when the other end has closed."""
        reading = (answer, on_end)
        threading.Thread(target=self._read, args=reading, name="commopt-hang-monitor", daemon=True).start()

    def send(self, **message: Any) -> None:
        """Sends a message; gives up if the other end has closed, or does not read for `times.SEND_S`."""
        with suppress(OSError), self._lock:
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def request(self, limit_s: float | None, **message: Any) -> dict[str, Any] | None:
        """Sends a message, and returns the answer; None if there is none in time, or once the other end closes."""
        number = next(self._numbers)
        self._answers[number] = None
        threading.Thread(target=self.send, kwargs=message | {"request": number}, daemon=True).start()
        with self._has_answers:
            self._has_answers.wait_for(lambda: self._answers[number] is not None or self._has_ended, limit_s)
            return self._answers.pop(number)

    def close(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _read(self, answer: _Answer, on_end: Callable[[], None]) -> None:
        with suppress(OSError, ValueError), self._connection.makefile("rb") as reader:
            for line in reader:
                message = json.loads(line)
                if "answer" in message:
                    with self._has_answers:
                        if message["answer"] in self._answers:  # otherwise it has come too late
                            self._answers[message["answer"]] = message
                            self._has_answers.notify_all()
                    continue
                answered: dict[str, Any] = {}
                with log_own_errors("HangMonitor's answer within a rank"):
                    answered = answer(message)
                if "request" in message:
                    self.send(answer=message["request"], **answered)
        with self._has_answers:
            self._has_ended = True
            self._has_answers.notify_all()
        on_end()


def find_own_ip(towards: str, port: int = 0) -> str:
    """Returns the address of this host's interface towards another host; loopback's if there is no route."""
    with suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(towards, port or 1, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # sends nothing
                return str(probe.getsockname()[0])
    return "127.0.0.1"


def receive_line(connection: socket.socket, max_bytes: int, limit_s: float) -> bytes:
    """Returns what comes up to the end of a line, without that end.

    Args:
        connection: its other end sends one line, and then waits for an answer.
        max_bytes: the longest line that is accepted.
        limit_s: seconds for all of it, not for each part.

    Raises:
        EOFError: the other end has closed the connection, or has sent more than ``max_bytes``.
        TimeoutError: the line was not complete in time.
    """
    received, deadline = bytearray(), time.monotonic() + limit_s
    while not received.endswith(b"\n"):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"no line within {limit_s:g} s")
        connection.settimeout(left_s)
        part = connection.recv(min(_PART_BYTES, max_bytes + 1 - len(received)))
        if not part:
            raise EOFError
        received += part
    return bytes(received[:-1])


def _sign(key: str, purpose: bytes, message: bytes) -> bytes:
    return hmac.new(key.encode(), purpose + message, "sha256").hexdigest().encode()
