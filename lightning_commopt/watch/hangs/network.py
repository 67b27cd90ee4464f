"""How watchers talk: one line of JSON there, one back, over a connection for each question."""

from __future__ import annotations

import json
import socket
import socketserver
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

_CONNECT_S = 2.0
_MAX_BYTES = 64 * 2**20


class Address(NamedTuple):
    """Where a watcher listens."""

    ip: str
    port: int
    host: str


class GoneError(OSError):
    """The host answers, but nothing listens there any more."""


class UnreachableError(OSError):
    """The host does not answer."""


def ask(address: Address, token: str, question: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """Returns a watcher's answer.

    Args:
        address: of the watcher.
        token: that it knows.
        question: to ask.
        limit_s: seconds to wait for the answer, once connected.

    Raises:
        GoneError: its process has ended.
        UnreachableError: there is no answer within the limit, or no way to the host.
    """
    try:
        with socket.create_connection((address.ip, address.port), timeout=_CONNECT_S) as connection:
            connection.settimeout(limit_s)
            connection.sendall(json.dumps(question | {"token": token}).encode() + b"\n")
            with connection.makefile("rb") as reader:
                answer = json.loads(reader.readline(_MAX_BYTES) or b"{}")
    except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError) as error:
        raise GoneError(f"its monitor at {address.ip}:{address.port} is gone") from error
    except (OSError, ValueError) as error:
        raise UnreachableError(f"{address.host} does not answer at {address.ip}:{address.port}") from error
    if not isinstance(answer, dict) or not answer:
        raise GoneError(f"its monitor at {address.ip}:{address.port} is about to end")
    return answer


class Server:
    """Answers other watchers, each in a thread of its own.

    Args:
        token: that questions must bring.
        answer: called with a question.

    Attributes:
        port: that it listens at, on all interfaces.
    """

    def __init__(self, token: str, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        class Handler(socketserver.StreamRequestHandler):
            timeout = 10

            def handle(self) -> None:
                try:
                    question = json.loads(self.rfile.readline(_MAX_BYTES))
                except (OSError, ValueError):
                    return
                if isinstance(question, dict) and question.get("token") == token:
                    self.wfile.write(json.dumps(answer(question)).encode() + b"\n")

        class ThreadingServer(socketserver.ThreadingTCPServer):
            daemon_threads = True
            request_queue_size = 1024
            address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET

            def server_bind(self) -> None:
                if self.address_family == socket.AF_INET6:
                    self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                super().server_bind()

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Says nothing: who asked has gone."""

        self._server = ThreadingServer(("", 0), Handler)
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()


def own_ip(towards: str, port: int) -> str:
    """Returns the address by which other ranks reach this host: that of the interface towards rank 0's."""
    with suppress(OSError):  # no address, or no way to it
        family, kind, protocol, _, address = socket.getaddrinfo(towards, port or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    return "127.0.0.1"
