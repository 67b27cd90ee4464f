"""Tries whether hosts can open TCP connections to each other at any port, as gloo and NCCL will."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from lightning_commopt.launch.interfaces import Interface
from lightning_commopt.launch.ports import explain_os_error

_MAX_THREADS = 64


class ListeningPort(NamedTuple):
    """An open port of a host.

    Attributes:
        interface: name of the interface that it is on.
        address: of the interface.
        port: drawn by the kernel.
        users: libraries that would use that interface, such as "gloo and NCCL".
    """

    interface: str
    address: str
    port: int
    users: str


class UnreachablePort(NamedTuple):
    """A port of ``to_host`` that ``from_host`` could not connect to."""

    from_host: str
    to_host: str
    port: ListeningPort
    reason: str


@contextlib.contextmanager
def listen_on_ports(interfaces: Mapping[str, Interface | None]) -> Iterator[list[ListeningPort]]:
    """Listens once on each interface inside a ``with`` statement; the kernel accepts connections by itself."""
    users: dict[Interface, list[str]] = {}
    for user, interface in interfaces.items():
        if interface is not None:
            users.setdefault(interface, []).append(user)
    with contextlib.ExitStack() as closing:
        ports = []
        for interface, names in users.items():
            server = closing.enter_context(socket.create_server((interface.address, 0), backlog=1024))
            number = server.getsockname()[1]
            ports.append(ListeningPort(interface.name, interface.address, number, " and ".join(names)))
        yield ports


def find_unreachable(
    own_host: str,
    ports: Mapping[str, Sequence[ListeningPort]],
    *,
    limit_s: float,
    connect: Any = socket.create_connection,
) -> list[UnreachablePort]:
    """Connects to all ports of other hosts at the same time, and returns those that could not be reached."""

    def why_unreachable(port: ListeningPort) -> str | None:
        try:
            connect((port.address, port.port), timeout=limit_s).close()
        except TimeoutError:
            return f"no answer within {limit_s:g} s: probably a firewall drops it"
        except OSError as error:
            return explain_os_error(error)
        return None

    tried = [(host, port) for host, theirs in ports.items() if host != own_host for port in theirs]
    with ThreadPoolExecutor(max_workers=_MAX_THREADS) as pool:
        reasons = list(pool.map(why_unreachable, [port for _, port in tried]))
    return [
        UnreachablePort(own_host, host, port, reason)
        for (host, port), reason in zip(tried, reasons, strict=True)
        if reason is not None
    ]
