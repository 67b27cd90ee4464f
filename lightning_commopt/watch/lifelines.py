"""Lifelines: connections between the first ranks of nodes, whose end shows the end of a rank."""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
from collections.abc import Collection
from contextlib import suppress
from weakref import WeakSet

import torch.distributed as dist

from lightning_commopt.watch import times

_KEY = "lifeline"

_MAX_TRIES = 3
"""Maximum number of attempts of a node's first rank to connect to rank 0: some packets may be lost, while a firewall
that drops all packets delays only this many looks."""

_MAX_HELLO_BYTES = 256
"""Maximum number of bytes that are read from a connection that has not identified itself; a number and a token of 32
digits are far shorter."""

_MAX_STRANGERS = 64
"""Maximum number of connections that one update accepts; the next update reads their tokens. It is a judgement: nodes
connect within a second or two, and strangers never hold more descriptors than this."""

_BACKLOG = 1024
"""Number of connections that may wait to be accepted, so that strangers do not keep ranks out."""


class Lifelines:
    """Shows rank 0 which nodes' first ranks have ended, and shows these ranks whether rank 0 has.

    The first rank of every other node keeps a connection to rank 0, on which only a token and its confirmation are
    sent. After that only the orderly end of a connection means something: a process has closed it, or the kernel has at
    the end of the process. A connection that is reset, or a host that does not answer, proves nothing. If a firewall
    blocks the port, there are no connections.

    Attributes:
        ended: ranks whose connection has ended.
        connections: the open ones, by rank.
    """

    def __init__(self, store: dist.Store, rank: int, first_ranks: Collection[int], main_address: str) -> None:
        self._store = store
        self._rank = rank
        self._expected = {other for other in first_ranks if other} if rank == 0 else set()
        self._is_client = rank != 0 and rank in first_ranks
        self._num_tries = 0
        self._server: socket.socket | None = None
        self._unidentified: list[socket.socket] = []
        self._is_confirmed = rank == 0  # rank 0 knows its connections; the others wait for its answer
        self.connections: dict[int, socket.socket] = {}
        self.ended: set[int] = set()
        if self._expected:
            self._listen(main_address)
        _open.add(self)

    def update(self) -> None:
        """Makes missing connections, and records those that have ended. For one thread; mostly takes no time."""
        if self._server is not None:
            self._accept(self._server)
        elif self._is_client and not self.connections and self._num_tries < _MAX_TRIES:
            self._connect()
        for rank, connection in [*self.connections.items()]:
            received: bytes | None = None
            try:
                received = connection.recv(1)
            except BlockingIOError:
                continue
            except OSError:  # the connection was reset
                pass
            if received:
                self._is_confirmed = True
                continue
            if received == b"" and self._is_confirmed:
                self.ended.add(rank)
            connection.close()
            del self.connections[rank]

    def close(self) -> None:
        for connection in (self._server, *self._unidentified, *self.connections.values()):
            if connection is not None:
                connection.close()

    def _listen(self, address: str) -> None:
        with suppress(OSError):  # if the address is not this host's there are no connections
            self._server = socket.create_server((socket.gethostbyname(address), 0), backlog=_BACKLOG)
            self._server.setblocking(False)
            token = secrets.token_hex(16)
            self._token = token.encode()
            self._store.set(_KEY, json.dumps([*self._server.getsockname(), token]))

    def _accept(self, server: socket.socket) -> None:
        # The tokens of those that were accepted in the last update have arrived.
        for connection in self._unidentified:
            self._identify(connection)
        self._unidentified.clear()
        with suppress(OSError):  # no more connections wait
            for _ in range(_MAX_STRANGERS if len(self.connections) < len(self._expected) else 0):
                connection, _ = server.accept()
                connection.setblocking(False)
                self._unidentified.append(connection)

    def _identify(self, connection: socket.socket) -> None:
        with suppress(OSError, ValueError):
            rank, token = connection.recv(_MAX_HELLO_BYTES).split()
            if int(rank) in self._expected - set(self.connections) and hmac.compare_digest(token, self._token):
                connection.sendall(b"1")
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
        self._is_confirmed = False
        with suppress(OSError):
            connection = socket.create_connection((ip, port), timeout=times.LIFELINE_CONNECT_S)
            connection.sendall(f"{self._rank} {token}".encode())
            connection.setblocking(False)
            self.connections[0] = connection


_open: WeakSet[Lifelines] = WeakSet()


def _close_copies() -> None:
    for lifelines in _open:
        lifelines.close()


# A worker of a dataloader would keep the connections of its rank open after that has died.
os.register_at_fork(after_in_child=_close_copies)
