"""What NCCL's RAS answers, from a server that answers as ``src/ras/client_support.cc`` does."""

import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lightning_commopt.watch.hangs.nccl_ras import RasError, ask_ras, ras_address

_STATUS = {"nccl_version": "2.29.1", "communicators": [{"size": 2, "missing_ranks": [{"rank": 1}]}]}
_TEXT = "Job summary\n===========\n"


class Nccl(socketserver.StreamRequestHandler):
    """Answers as NCCL 2.29 does; ``has_json`` is False for versions before 2.28.7."""

    has_json = True
    status = json.dumps(_STATUS, indent=1)

    def handle(self) -> None:
        is_json = False
        for line in self.rfile:
            command = line.decode().rstrip("\n").lower()
            if command.startswith("client protocol "):
                self.wfile.write(b"SERVER PROTOCOL 2\n")
            elif command.startswith("timeout "):
                self.wfile.write(b"OK\n" if command.removeprefix("timeout ").isdecimal() else b"ERROR: Invalid\n")
            elif command == "set format json" and self.has_json:
                is_json = True
                self.wfile.write(b"OK\n")
            elif command == "verbose status":
                self.wfile.write((self.status if is_json else _TEXT).encode())
                return
            else:
                self.wfile.write(f"ERROR: Unknown command {command}\n".encode())


class OldNccl(Nccl):
    has_json = False


class DeepNccl(Nccl):
    """Sends what Python's parser of JSON gives up on."""

    status = "[" * 10**5


class Silent(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        self.rfile.readline()
        self.rfile.readline()  # until the other side gives up


class Other(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        self.rfile.readline()
        self.wfile.write(b"220 mail\n")


@contextmanager
def listening(handler: type[socketserver.StreamRequestHandler]) -> Iterator[tuple[str, int]]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield "127.0.0.1", server.server_address[1]
        server.shutdown()


def test_answers() -> None:
    """If it fails, a report lacks what NCCL knows of its ranks, or a version without JSON is not understood."""
    with listening(Nccl) as address:
        assert ask_ras(address, limit_s=60) == _STATUS
    with listening(DeepNccl) as address:
        assert ask_ras(address, limit_s=60) == "[" * 10**5
    with listening(OldNccl) as address:
        assert ask_ras(address, limit_s=60) == _TEXT


def test_what_is_missing_is_reported() -> None:
    """If it fails, a report waits for a job that is stuck, or breaks on another program's port."""
    with listening(Silent) as address, pytest.raises(RasError, match=r"no answer from 127\.0\.0\.1:\d+ within 0\.05 s"):
        ask_ras(address, limit_s=0.05)
    with pytest.raises(RasError, match=r"nothing listens at 127\.0\.0\.1"):
        ask_ras(address, limit_s=60)
    with listening(Other) as address, pytest.raises(RasError, match="is not NCCL"):
        ask_ras(address, limit_s=60)


def test_address() -> None:
    """If it fails, NCCL is looked for where the user does not have it listen."""
    assert ras_address({}) == ("localhost", 28028)
    assert ras_address({"NCCL_RAS_ADDR": "[::1]:12345"}) == ("::1", 12345)
    for environment, message in (
        ({"NCCL_RAS_ENABLE": "0"}, "NCCL_RAS_ENABLE is 0"),
        ({"NCCL_RAS_ADDR": "localhost"}, "NCCL_RAS_ADDR must be an address with a port, got 'localhost'"),
    ):
        with pytest.raises(RasError, match=message):
            ras_address(environment)
