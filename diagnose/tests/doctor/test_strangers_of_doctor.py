"""Bytes of strangers at the port at which hosts try connections: those of the other hosts still work afterwards."""

from collections.abc import Iterator

import pytest

from commopt_diagnose.doctor.meeting import find_unreachable, listen_on_ports
from lightning_commopt.launch.interfaces import Interface
from support.strangers import LIMIT_S, Port, connect_as_strangers, send_as_strangers


@pytest.fixture
def open_port() -> Iterator[Port]:
    loopback = Interface("lo", "127.0.0.1", 8)
    with listen_on_ports({"gloo": loopback}) as ports:

        def works() -> None:
            assert find_unreachable("a", {"b": ports}, limit_s=LIMIT_S) == []

        yield Port(ports[0].port, lambda: None, works)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 9))])
def test_bytes_of_strangers(open_port: Port, seed: int) -> None:
    """If it fails, a stranger makes the doctor hold memory or threads, or keeps hosts from trying a connection."""
    send_as_strangers(open_port, seed)


def test_many_strangers_that_send_nothing(open_port: Port) -> None:
    connect_as_strangers(open_port)
