"""Connections that show which processes have ended, and nothing else."""

import json
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from lightning_commopt.watch.lifelines import Lifelines

_LIMIT_S = 30
Make = Callable[[int, tuple[int, ...]], Lifelines]


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


@pytest.fixture
def make(store: dist.Store) -> Iterator[Make]:
    made = []

    def make(rank: int, first_ranks: tuple[int, ...]) -> Lifelines:
        made.append(Lifelines(store, rank, first_ranks, "127.0.0.1"))
        return made[-1]

    yield make
    for each in made:
        each.close()


def _until(condition: Callable[[], object], *lifelines: Lifelines) -> bool:
    deadline = time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline:
        for each in lifelines:
            each.update()
        if condition():
            return True
        time.sleep(0.005)
    return False


def _connected(make: Make) -> tuple[Lifelines, Lifelines]:
    first, other = make(0, (0, 2)), make(2, (0, 2))
    assert _until(lambda: first.connections and other.connections, first, other)
    return first, other


@pytest.mark.parametrize("ends", [0, 1])
def test_a_rank_that_has_ended_is_seen_on_the_other_node(make: Make, ends: int) -> None:
    """If it fails, a rank waits for one that died on another host."""
    both = _connected(make)
    both[ends].close()
    assert _until(lambda: both[1 - ends].ended, both[1 - ends])
    assert both[1 - ends].ended == {(0, 2)[ends]}


def test_a_forked_process_does_not_outlive_its_rank(make: Make) -> None:
    """If it fails, a rank that was killed seems to live until its dataloader's workers have noticed."""
    first, other = _connected(make)
    reader, writer = os.pipe()
    if (worker := os.fork()) == 0:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    other.close()
    assert _until(lambda: first.ended, first)
    os.close(writer)
    os.waitpid(worker, 0)
    os.close(reader)


def test_a_connection_that_is_reset_is_no_death(make: Make) -> None:
    """If it fails, a firewall that drops idle connections ends healthy jobs."""
    first, other = _connected(make)
    other.connections[0].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    other.close()
    assert _until(lambda: not first.connections, first)
    assert not first.ended


def test_a_connection_that_is_refused_is_no_death(make: Make, store: dist.Store) -> None:
    """If it fails, a rank whose token comes late, as its process was suspended, takes rank 0 for dead."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        store.set("lifeline", json.dumps([*server.getsockname(), "token"]))
        other = make(2, (0, 2))
        other.update()
        connection, _ = server.accept()
        assert connection.recv(64) == b"2 token"
        connection.close()
        assert _until(lambda: not other.connections, other)
        assert not other.ended
        other.update()
        with server.accept()[0] as connection:
            assert connection.recv(64) == b"2 token"  # it tries again


def test_one_node_opens_no_port(make: Make, store: dist.Store) -> None:
    """If it fails, every job listens at a port for nothing."""
    make(0, (0,))
    assert not store.check(["lifeline"])
