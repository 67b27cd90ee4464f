"""The interfaces of hosts that have only IPv6, and why a port cannot be reached."""

import errno
import socket
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from lightning_commopt.launch import interfaces
from lightning_commopt.launch.interfaces import Interface, _ipv6_interfaces, find_listening, resolve, try_port
from lightning_commopt.watch.join_texts import Arrival, find_misplaced
from support.known import known


@pytest.mark.parametrize("name", ["trainer..svc", "x" * 64])
def test_a_name_that_no_host_can_have(name: str) -> None:
    """If it fails, a MASTER_ADDR with an empty part ends what would explain that it cannot be resolved."""
    failure = known(try_port(name, 29500, limit_s=1))
    assert not failure.is_refused
    assert f"the name {name} cannot be resolved" in failure.message
    assert resolve(name) is None


@pytest.mark.parametrize(
    ("error", "words", "is_refused"),
    [
        (ConnectionRefusedError(), "a refuses connections to port 1: nothing listens there", True),
        (TimeoutError(), "a:1 does not answer within 2 s, not even with a refusal: probably a firewall", False),
        (OSError(errno.EHOSTUNREACH, ""), "a:1 cannot be reached: no route to that host", False),
    ],
)
def test_why_a_port_cannot_be_reached(
    error: OSError, words: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it fails, one looks for a firewall where rank 0 does not run, or the other way around."""
    monkeypatch.setattr(socket, "create_connection", mock.Mock(side_effect=error))
    failure = known(try_port("a", 1, limit_s=2))
    assert failure.is_refused == is_refused
    assert failure.message.startswith(words)


_TABLE = """fe8000000000000000fc00fffe000001 06 40 20 80     eth0
fd770000000000000000000000000009 06 40 00 48     eth0
fd770000000000000000000000000001 06 40 00 80     eth0
fd770000000000000000000000000002 06 40 00 80     eth0
00000000000000000000000000000001 01 80 10 80       lo
"""


def test_an_interface_with_ipv6_only_has_its_first_usable_address(tmp_path: Path) -> None:
    """If it fails, a host without IPv4 counts as one without an interface, though its jobs work."""
    (tmp_path / "if_inet6").write_text(_TABLE)
    assert _ipv6_interfaces(tmp_path / "if_inet6") == {"eth0": Interface("eth0", "fd77::1", 64)}
    assert _ipv6_interfaces(tmp_path / "none") == {}
    assert resolve("::1") == "::1"


@pytest.mark.parametrize(("own", "address"), [("fd77::1", "fd77::1/64"), ("fd77::9", "fd77::9/128")])
def test_where_a_host_with_ipv6_only_listens(monkeypatch: pytest.MonkeyPatch, own: str, address: str) -> None:
    """If it fails, ranks that are slow to join are told that they listen on no address, or on the loopback."""
    monkeypatch.setattr(interfaces, "own_address", lambda: own)
    listening = find_listening("gloo", [Interface("lo", "127.0.0.1", 8), Interface("eth0", "fd77::1", 64)], {})
    assert listening.address == address
    there = {"lo": "127.0.0.1/8", "eth0": "fd77::1/64"}
    first = Arrival(rank=0, host="a", network="a", listening=listening, interfaces=there)
    others = replace(listening, address="fd77::2/64")
    assert find_misplaced([first, replace(first, rank=1, network="b", listening=others)], "fd77::1") == ([], "")
