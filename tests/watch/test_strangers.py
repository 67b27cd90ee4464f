"""Bytes of strangers at each port that this package opens: its own connections still work afterwards."""

import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
import torch.distributed as dist

from lightning_commopt.watch import lifelines
from lightning_commopt.watch.hangs.nccl_ras import RasError, ask_ras
from lightning_commopt.watch.hangs.transport import Address, Server, ask
from lightning_commopt.watch.lifelines import Lifelines
from support.strangers import LIMIT_S, Port, connect_as_strangers, send_as_strangers

_KEY = "a key that nobody else has"


@contextmanager
def lifeline() -> Iterator[Port]:
    store = dist.HashStore()
    first, other = Lifelines(store, 0, (0, 2), "127.0.0.1"), Lifelines(store, 2, (0, 2), "127.0.0.1")

    def works() -> None:
        deadline = time.monotonic() + LIMIT_S
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
        assert ask(Address("127.0.0.1", server.port, "a"), _KEY, {"state": True}, LIMIT_S) == {"state": True}

    yield Port(server.port, lambda: None, works)


PORTS = {"lifeline": lifeline, "watcher": watcher}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 9))])
@pytest.mark.parametrize("name", PORTS)
def test_bytes_of_strangers(name: str, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """If it fails, a stranger ends a watch, makes it hold memory or threads, or keeps the ranks of the run out."""
    with PORTS[name]() as port:
        send_as_strangers(port, seed)
    assert not caplog.records


@pytest.mark.parametrize("name", PORTS)
def test_many_strangers_that_send_nothing(name: str) -> None:
    """If it fails, whoever opens connections keeps the ranks of a run out."""
    with PORTS[name]() as port:
        connect_as_strangers(port)


def test_strangers_hold_few_descriptors_of_a_rank() -> None:
    """If it fails, a stranger uses up the descriptors of a process that trains."""
    store = dist.HashStore()
    first = Lifelines(store, 0, (0, 2), "127.0.0.1")
    port = json.loads(store.get("lifeline"))[1]
    with ExitStack() as open_connections:
        for _ in range(3 * lifelines._MAX_STRANGERS):
            open_connections.enter_context(socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S))
        for _ in range(4):
            first.update()
            assert len(first._unidentified) <= lifelines._MAX_STRANGERS
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
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def drip(connection: socket.socket) -> None:
    """Sends a byte at a time for as long as somebody reads, and never ends a line."""
    with suppress(OSError):
        while True:
            connection.sendall(b"0")
            time.sleep(0.01)


def test_another_program_answers_a_watcher() -> None:
    """If it fails, a port that another program has taken over ends a watcher, or keeps it for ever."""
    content = random.Random(0).randbytes(500)
    answers = [drip, lambda connection: connection.sendall(content), lambda connection: None]
    for answer in answers:
        with other_program(answer) as port, pytest.raises(OSError, match=r"ended|does not answer|another program"):
            ask(Address("127.0.0.1", port, "a"), _KEY, {"hello": True}, 0.3)
        with other_program(answer) as port, pytest.raises(RasError):
            ask_ras(("127.0.0.1", port), limit_s=0.3)
