"""Strangers at a port that this package opens: connections and bytes that are not ours, and what holds meanwhile."""

import gc
import random
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple
from unittest import mock

from lightning_commopt.watch.hangs import transport

LIMIT_S = 60
_MAX_MEMORY_BYTES = 4 * 2**20


class Port(NamedTuple):
    """A port of ours, and what its owner does meanwhile."""

    number: int
    update: Callable[[], object]  # what the owner calls regularly
    works: Callable[[], object]  # asserts that a rank of the run is understood


def sent_by_strangers(chance: random.Random, num_random: int) -> list[bytes]:
    """Returns what strangers send: what has ended a watch before, parts of our protocols, and random bytes."""
    token = "é" * 16
    known = [b"", b"\n\n", b"1 ", f"1 {token}".encode(), b"2 \xff\xfe", b"\xff\xfe 2", b"2 " + b"x" * 5000, b"2\x002 a"]
    known += [
        b"\xd9\xa2 token",
        b"0" * 65 + b"{}\n",
        b"\n" * 65,
        b"GET / HTTP/1.1\r\n\r\n",
        b"9" * 5000 + b" a",
        b"-1 a",
    ]
    lengths = [chance.choice([1, 3, 64, 65, 66, 300, 10**5]) for _ in range(num_random)]
    return known + [chance.randbytes(length) for length in lengths]


@contextmanager
def no_thread_fails() -> Iterator[None]:
    failures: list[Any] = []
    with mock.patch.object(threading, "excepthook", failures.append):
        yield
    assert not failures


def send_as_strangers(port: Port, seed: int) -> None:
    """Sends what is known to have hurt, and random bytes, from connections that stay, half close or end.

    Asserts that threads and memory stay bounded, and that the port still works for its own.
    """
    chance = random.Random(seed)
    with no_thread_fails(), ExitStack() as open_connections:
        gc.collect()
        tracemalloc.start()
        open_connections.callback(tracemalloc.stop)
        num_threads, before = threading.active_count(), tracemalloc.get_traced_memory()[0]
        for content in sent_by_strangers(chance, 60):
            stranger = socket.create_connection(("127.0.0.1", port.number), timeout=LIMIT_S)
            with suppress(OSError):  # it has hung up
                stranger.settimeout(0.2)
                stranger.sendall(content)
            match chance.randrange(4):
                case 0:  # stays, and sends no more
                    open_connections.enter_context(stranger)
                case 1:  # half open: it reads on
                    with suppress(OSError):
                        stranger.shutdown(socket.SHUT_WR)
                    open_connections.enter_context(stranger)
                case _:
                    stranger.close()
            port.update()
        assert threading.active_count() <= num_threads + transport._MAX_STRANGERS
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < _MAX_MEMORY_BYTES
        port.works()


def connect_as_strangers(port: Port) -> None:
    """Opens 300 connections that send nothing; asserts what `send_as_strangers` does."""
    with no_thread_fails(), ExitStack() as open_connections:
        num_threads = threading.active_count()
        for number in range(300):
            connection = socket.create_connection(("127.0.0.1", port.number), timeout=LIMIT_S)
            open_connections.enter_context(connection)
            if number % 10 == 0:
                port.update()
        assert threading.active_count() <= num_threads + transport._MAX_STRANGERS
        port.works()
