"""What watchers take from each other over TCP, and what from anybody else."""

import socket
import threading
from contextlib import suppress
from typing import Any

import pytest

from lightning_commopt.watch import times
from lightning_commopt.watch.hangs.transport import (
    Address,
    GoneError,
    RankLink,
    Server,
    UnreachableError,
    ask,
    find_own_ip,
)

KEY = "a key that nobody else has"


class Relay:
    """Passes one connection on to a server, and keeps what goes through it.

    Args:
        port: of the server.
    """

    def __init__(self, port: int) -> None:
        self.to_server, self.to_client = bytearray(), bytearray()
        self._port = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with self._listening:
            client, _ = self._listening.accept()
        with client, socket.create_connection(("127.0.0.1", self._port)) as server:
            ways = ((client, server, self.to_server), (server, client, self.to_client))
            threads = [threading.Thread(target=pass_on, args=way, daemon=True) for way in ways]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()


def pass_on(source: socket.socket, sink: socket.socket, seen: bytearray) -> None:
    while part := source.recv(2**16):
        seen += part
        sink.sendall(part)
    sink.shutdown(socket.SHUT_WR)


@pytest.fixture
def asked() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def server(asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr(times, "HELLO_S", 60)  # this process may stand still for longer than watchers wait

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        asked.append(question)
        return {"seen": len(asked)}

    return Server("127.0.0.1", KEY, answer)


def address(port: int) -> Address:
    return Address("127.0.0.1", port, "a")


def receive_all(connection: socket.socket) -> bytes:
    """Returns what comes until the other end hangs up."""
    connection.settimeout(60)
    received = b""
    with suppress(ConnectionResetError):
        while part := connection.recv(2**16):
            received += part
    return received


def test_a_question_and_its_answer(server: Server, asked: list[dict[str, Any]]) -> None:
    """If it fails, watchers cannot talk."""
    question = {"notice": {"text": "x" * 10**6}}
    assert ask(address(server.port), KEY, question, 60) == {"seen": 1}
    assert asked == [question]


def test_a_recorded_abort_cannot_be_sent_again(server: Server, asked: list[dict[str, Any]]) -> None:
    """If it fails, whoever listens to one abort can end every later run of the same watchers."""
    relay = Relay(server.port)
    assert ask(address(relay.port), KEY, {"abort": True}, 60) == {"seen": 1}
    assert b"abort" in relay.to_server  # nothing is encrypted
    assert KEY.encode() not in relay.to_server + relay.to_client
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(bytes(relay.to_server))
        receive_all(connection)
    assert asked == [{"abort": True}]


def test_a_recorded_answer_is_not_believed(server: Server) -> None:
    """If it fails, who takes over the port of a watcher decides what its rank seems to do."""
    relay = Relay(server.port)
    ask(address(relay.port), KEY, {"state": True}, 60)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def replay() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(bytes(relay.to_client))

        threading.Thread(target=replay, daemon=True).start()
        with pytest.raises(UnreachableError, match="another program answers"):
            ask(address(listening.getsockname()[1]), KEY, {"state": True}, 60)


@pytest.mark.parametrize("sent", [b"0" * 64 + b"\n", b"x" * 10**6, b'{"abort": true}\n'])
def test_a_stranger_is_not_answered(sent: bytes, server: Server, asked: list[dict[str, Any]]) -> None:
    """If it fails, anybody on the network can ask where a run is, or end it."""
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        with suppress(OSError):  # it has hung up in the middle
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
        received = receive_all(connection)
    assert len(received) <= 65  # its random number
    with pytest.raises(GoneError):
        ask(address(server.port), "another key", {"abort": True}, 60)
    assert asked == []


def test_it_listens_at_one_interface_only(server: Server) -> None:
    """If it fails, a run on one host can be reached from others."""
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", server.port), timeout=60)


def test_the_interface_towards_another_host() -> None:
    """If it fails, watchers listen where the others do not look for them."""
    assert find_own_ip("127.0.0.1", 29500) == "127.0.0.1"
    assert find_own_ip("localhost") in ("127.0.0.1", "::1")
    assert find_own_ip("no-such-host.invalid") == "127.0.0.1"


@pytest.mark.skipif(not socket.has_ipv6, reason="this host has no IPv6")
def test_it_listens_at_an_ipv6_address() -> None:
    """If it fails, runs whose MASTER_ADDR is an IPv6 address are not watched."""
    try:
        server = Server("::1", KEY, lambda question: {"is_watching": True})
    except OSError:
        pytest.skip("::1 is not configured here")
    assert ask(Address("::1", server.port, "a"), KEY, {"hello": True}, 60) == {"is_watching": True}


def test_an_answer_that_comes_too_late_is_dropped() -> None:
    own, others = map(RankLink, socket.socketpair())
    may_answer = threading.Event()
    others.start(lambda question: {"may": may_answer.wait(60)} if question.get("waits") else {})
    own.start(lambda question: {})
    assert own.request(0.05, waits=True) is None
    may_answer.set()
    assert own.request(60, waits=False) is not None  # it is answered after the first one
    assert own._answers == {}
    own.close()
    others.close()
