"""Bytes of strangers at each port that this package opens: its own connections still work afterwards."""

import gc
import json
import random
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from lightning_commopt.commands.doctor.meeting import find_unreachable, listen_on_ports
from lightning_commopt.launch.interfaces import Interface
from lightning_commopt.watch import peers
from lightning_commopt.watch.hangs import transport
from lightning_commopt.watch.hangs.nccl_ras import RasError, ask_ras
from lightning_commopt.watch.hangs.transport import Address, Server, ask
from lightning_commopt.watch.peers import Lifelines

_LIMIT_S = 60
_KEY = "a key that nobody else has"
_MAX_MEMORY_BYTES = 4 * 2**20


class Port(NamedTuple):
    """A port of ours, and what its owner does meanwhile."""

    number: int
    update: Callable[[], object]  # what the owner calls regularly
    works: Callable[[], object]  # asserts that a rank of the run is understood


@contextmanager
def lifeline() -> Iterator[Port]:
    store = dist.HashStore()
    first, other = Lifelines(store, 0, (0, 2), "127.0.0.1"), Lifelines(store, 2, (0, 2), "127.0.0.1")

    def works() -> None:
        deadline = time.monotonic() + _LIMIT_S
        while not (first.connections and other.connections) and time.monotonic() < deadline:
            first.update()
            other.update()
            time.sleep(0.005)
        assert [*first.connections] == [2]
        assert not first.ended
        other.close()
        while not first.ended and time.monotonic() < deadline:
            first.update()
        assert first.ended == {2}

    yield Port(json.loads(store.get("lifeline"))[1], first.update, works)
    first.close()
    other.close()


@contextmanager
def watcher() -> Iterator[Port]:
    server = Server("127.0.0.1", _KEY, lambda question: question)

    def works() -> None:
        assert ask(Address("127.0.0.1", server.port, "a"), _KEY, {"state": True}, _LIMIT_S) == {"state": True}

    yield Port(server.port, lambda: None, works)


@contextmanager
def doctor() -> Iterator[Port]:
    loopback = Interface("lo", "127.0.0.1", 8)
    with listen_on_ports({"gloo": loopback}) as ports:

        def works() -> None:
            assert find_unreachable("a", {"b": ports}, limit_s=_LIMIT_S) == []

        yield Port(ports[0].port, lambda: None, works)


PORTS = {"lifeline": lifeline, "watcher": watcher, "doctor": doctor}


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


@pytest.fixture
def failed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    failures: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    return failures


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 9))])
@pytest.mark.parametrize("name", PORTS)
def test_bytes_of_strangers(name: str, seed: int, failed: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    """If it fails, a stranger ends a watch, makes it hold memory or threads, or keeps the ranks of the run out."""
    chance = random.Random(seed)
    with PORTS[name]() as port, ExitStack() as open_connections:
        gc.collect()
        tracemalloc.start()
        open_connections.callback(tracemalloc.stop)
        num_threads, before = threading.active_count(), tracemalloc.get_traced_memory()[0]
        for content in sent_by_strangers(chance, 60):
            stranger = socket.create_connection(("127.0.0.1", port.number), timeout=_LIMIT_S)
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
    assert not failed
    assert not caplog.records


@pytest.mark.parametrize("name", PORTS)
def test_many_strangers_that_send_nothing(name: str, failed: list[Any]) -> None:
    """If it fails, whoever opens connections keeps the ranks of a run out."""
    with PORTS[name]() as port, ExitStack() as open_connections:
        num_threads = threading.active_count()
        for number in range(300):
            connection = socket.create_connection(("127.0.0.1", port.number), timeout=_LIMIT_S)
            open_connections.enter_context(connection)
            if number % 10 == 0:
                port.update()
        assert threading.active_count() <= num_threads + transport._MAX_STRANGERS
        port.works()
    assert not failed


def test_strangers_hold_few_descriptors_of_a_rank() -> None:
    """If it fails, a stranger uses up the descriptors of a process that trains."""
    store = dist.HashStore()
    first = Lifelines(store, 0, (0, 2), "127.0.0.1")
    port = json.loads(store.get("lifeline"))[1]
    with ExitStack() as open_connections:
        for _ in range(3 * peers._MAX_STRANGERS):
            open_connections.enter_context(socket.create_connection(("127.0.0.1", port), timeout=_LIMIT_S))
        for _ in range(4):
            first.update()
            assert len(first._unidentified) <= peers._MAX_STRANGERS
    first.close()


@contextmanager
def other_program(answer: Callable[[socket.socket], object]) -> Iterator[int]:
    """Listens where one of our processes did before, and does something else."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def run() -> None:
            with suppress(OSError), server.accept()[0] as connection:
                answer(connection)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        thread.join(_LIMIT_S)
        assert not thread.is_alive()


def drip(connection: socket.socket) -> None:
    """Sends a byte at a time for as long as somebody reads, and never ends a line."""
    with suppress(OSError):
        while True:
            connection.sendall(b"0")
            time.sleep(0.01)


@pytest.mark.parametrize("seed", range(4))
def test_another_program_answers_a_watcher(seed: int) -> None:
    """If it fails, a port that another program has taken over ends a watcher, or keeps it for ever."""
    content = random.Random(seed).randbytes(500)
    answers = [drip, lambda connection: connection.sendall(content), lambda connection: None]
    for answer in answers:
        with other_program(answer) as port, pytest.raises(OSError, match=r"ended|does not answer|another program"):
            ask(Address("127.0.0.1", port, "a"), _KEY, {"hello": True}, 0.3)
        with other_program(answer) as port, pytest.raises(RasError):
            ask_ras(("127.0.0.1", port), limit_s=0.3)
