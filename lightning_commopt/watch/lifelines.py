"""Connections between nodes that the kernel closes when a process ends, whatever has ended it."""

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

    The first rank of every other node keeps a connection to rank 0 on which nothing is sent but a word at the start.
    Only the orderly end of a connection counts: a process has closed it, or the kernel has as the process ended. A
    connection that is reset, or a host that does not answer, shows nothing. Where a firewall blocks the port there are
    none.

    Args:
        store: of the ranks of one fit.
        rank: this rank.
        first_ranks: the first rank of each node.
        main_address: of rank 0's host, as other nodes reach it.

    Attributes:
        ended: ranks whose connection has ended.
    """

    def __init__(self, store: dist.Store, rank: int, first_ranks: Collection[int], main_address: str) -> None:
        self._store = store
        self._rank = rank
        self._expected = {other for other in first_ranks if other} if rank == 0 else set()
        self._is_client = rank != 0 and rank in first_ranks
        self._num_tries = 0
        self._server: socket.socket | None = None
        self._unknown: list[socket.socket] = []
        self._connections: dict[int, socket.socket] = {}
        self.ended: set[int] = set()
        if self._expected:
            self._listen(main_address)

    def update(self) -> None:
        """Makes connections that are missing, and notes those that have ended. For one thread; takes no time mostly."""
        if self._server is not None:
            self._accept(self._server)
        elif self._is_client and not self._connections and self._num_tries < _MAX_TRIES:
            self._connect()
        for rank, connection in [*self._connections.items()]:
            try:
                has_ended = connection.recv(1) == b""
            except BlockingIOError:
                continue
            except OSError:
                has_ended = False
            if has_ended:
                self.ended.add(rank)
            connection.close()
            del self._connections[rank]

    def close(self) -> None:
        """Ends all connections."""
        for each in (self._server, *self._unknown, *self._connections.values()):
            if each is not None:
                each.close()

    def _listen(self, address: str) -> None:
        with suppress(OSError):  # the address is none of this host's: there are no lifelines
            self._server = socket.create_server((socket.gethostbyname(address), 0), backlog=len(self._expected))
            self._server.setblocking(False)
            self._word = secrets.token_hex(16)
            self._store.set(_KEY, json.dumps([*self._server.getsockname(), self._word]))

    def _accept(self, server: socket.socket) -> None:
        for connection in self._unknown:  # those of the last time, which have had the time to send their word
            self._identify(connection)
        self._unknown.clear()
        with suppress(OSError):
            for _ in range(len(self._expected) - len(self._connections)):
                connection, _ = server.accept()
                connection.setblocking(False)
                self._unknown.append(connection)

    def _identify(self, connection: socket.socket) -> None:
        with suppress(OSError, ValueError):
            rank, word = connection.recv(_MAX_HELLO_BYTES).decode().split()
            if int(rank) in self._expected - set(self._connections) and hmac.compare_digest(word, self._word):
                self._connections[int(rank)] = connection
                return
        connection.close()

    def _connect(self) -> None:
        try:
            if not self._store.check([_KEY]):
                return
            ip, port, word = json.loads(self._store.get(_KEY))
        except RuntimeError:  # the store has gone, and with it rank 0
            self._num_tries = _MAX_TRIES
            return
        self._num_tries += 1
        with suppress(OSError):
            connection = socket.create_connection((ip, port), timeout=_CONNECT_S)
            connection.sendall(f"{self._rank} {word}".encode())
            connection.setblocking(False)
            self._connections[0] = connection
