"""Connections between nodes, which the kernel closes when a process ends for any reason."""

from __future__ import annotations

import hmac
import json
import secrets
import socket
from collections.abc import Collection
from contextlib import suppress

import torch.distributed as dist

_KEY = "lifeline"
_CONNECT_S = 2.0
_MAX_TRIES = 3
_MAX_HELLO_BYTES = 256


class Lifelines:
    """Shows rank 0 which nodes' first ranks have ended, and these whether rank 0 has.

    The first rank of every other node keeps a connection to rank 0, on which only a token is sent at the start. Only
    the orderly end of a connection counts: closed by a process, or by the kernel at the end of the process. A
    connection that is reset, or a host that does not answer, shows nothing. If a firewall blocks the port there are no
    connections.

    Attributes:
        ended: ranks whose connection has ended.
        connections: by rank, those that are open.
    """

    def __init__(self, store: dist.Store, rank: int, first_ranks: Collection[int], main_address: str) -> None:
        self._store = store
        self._rank = rank
        self._expected = {other for other in first_ranks if other} if rank == 0 else set()
        self._is_client = rank != 0 and rank in first_ranks
        self._num_tries = 0
        self._server: socket.socket | None = None
        self._unidentified: list[socket.socket] = []
        self.connections: dict[int, socket.socket] = {}
        self.ended: set[int] = set()
        if self._expected:
            self._listen(main_address)

    def update(self) -> None:
        """Makes missing connections, and records those that have ended. For one thread; mostly takes no time."""
        if self._server is not None:
            self._accept(self._server)
        elif self._is_client and not self.connections and self._num_tries < _MAX_TRIES:
            self._connect()
        for rank, connection in [*self.connections.items()]:
            try:
                has_ended = connection.recv(1) == b""
            except BlockingIOError:
                continue
            except OSError:
                has_ended = False
            if has_ended:
                self.ended.add(rank)
            connection.close()
            del self.connections[rank]

    def close(self) -> None:
        for connection in (self._server, *self._unidentified, *self.connections.values()):
            if connection is not None:
                connection.close()

    def _listen(self, address: str) -> None:
        with suppress(OSError):  # the address is not this host's: there are no connections
            self._server = socket.create_server((socket.gethostbyname(address), 0), backlog=len(self._expected))
            self._server.setblocking(False)
            self._token = secrets.token_hex(16)
            self._store.set(_KEY, json.dumps([*self._server.getsockname(), self._token]))

    def _accept(self, server: socket.socket) -> None:
        for connection in self._unidentified:  # accepted in the last update: their tokens have arrived
            self._identify(connection)
        self._unidentified.clear()
        with suppress(OSError):
            for _ in range(len(self._expected) - len(self.connections)):
                connection, _ = server.accept()
                connection.setblocking(False)
                self._unidentified.append(connection)

    def _identify(self, connection: socket.socket) -> None:
        with suppress(OSError, ValueError):
            rank, token = connection.recv(_MAX_HELLO_BYTES).decode().split()
            if int(rank) in self._expected - set(self.connections) and hmac.compare_digest(token, self._token):
                self.connections[int(rank)] = connection
                return
        connection.close()

    def _connect(self) -> None:
        try:
            if not self._store.check([_KEY]):
                return
            ip, port, token = json.loads(self._store.get(_KEY))
        except RuntimeError:  # the store has ended with rank 0
            self._num_tries = _MAX_TRIES
            return
        self._num_tries += 1
        with suppress(OSError):
            connection = socket.create_connection((ip, port), timeout=_CONNECT_S)
            connection.sendall(f"{self._rank} {token}".encode())
            connection.setblocking(False)
            self.connections[0] = connection
