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
        interface: that it is on.
        address: of the interface.
        port: that the kernel gave.
        users: who would take that interface, such as "gloo and NCCL".
    """

    interface: str
    address: str
    port: int
    users: str


class UnreachablePort(NamedTuple):
    """A port that a host could not connect to.

    Attributes:
        from_host: who tried.
        to_host: whose it is.
        door: the port.
        reason: what happened.
    """

    from_host: str
    to_host: str
    door: ListeningPort
    reason: str


@contextlib.contextmanager
def listen_on_ports(interfaces: Mapping[str, Interface | None]) -> Iterator[list[ListeningPort]]:
    """Listens on each interface until the end of the ``with`` statement; the kernel accepts connections by itself.

    Args:
        interfaces: by who would take them.
    """
    users: dict[Interface, list[str]] = {}
    for user, interface in interfaces.items():
        if interface is not None:
            users.setdefault(interface, []).append(user)
    with contextlib.ExitStack() as closing:
        doors = []
        for interface, names in users.items():
            server = closing.enter_context(socket.create_server((interface.address, 0), backlog=1024))
            port = server.getsockname()[1]
            doors.append(ListeningPort(interface.name, interface.address, port, " and ".join(names)))
        yield doors


def find_unreachable(
    own_host: str,
    doors: Mapping[str, Sequence[ListeningPort]],
    *,
    limit_s: float,
    connect: Any = socket.create_connection,
) -> list[UnreachablePort]:
    """Tries all doors of other hosts at the same time.

    Args:
        own_host: this host, whose own doors are left out.
        doors: by host.
        limit_s: seconds for each.
        connect: as ``socket.create_connection``.

    Returns:
        Those that could not be reached.
    """

    def why_closed(door: ListeningPort) -> str | None:
        try:
            connect((door.address, door.port), timeout=limit_s).close()
        except TimeoutError:
            return f"no answer within {limit_s:g} s: probably a firewall drops it"
        except OSError as error:
            return explain_os_error(error)
        return None

    tried = [(host, door) for host, theirs in doors.items() if host != own_host for door in theirs]
    with ThreadPoolExecutor(max_workers=_MAX_THREADS) as pool:
        reasons = list(pool.map(why_closed, [door for _, door in tried]))
    return [
        UnreachablePort(own_host, host, door, reason)
        for (host, door), reason in zip(tried, reasons, strict=True)
        if reason is not None
    ]
