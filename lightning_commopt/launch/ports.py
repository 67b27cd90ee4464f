"""Connects to a port, and explains why it cannot be reached."""

from __future__ import annotations

import errno
import socket
from typing import Literal, NamedTuple

_REASONS = {
    errno.ECONNREFUSED: "refused, though the port is open there: a firewall rejects it",
    errno.EHOSTUNREACH: "no route to that host",
    errno.ENETUNREACH: "no route to that network",
    errno.EACCES: "forbidden on this host",
    errno.EPERM: "forbidden by a firewall on this host",
    errno.EINVAL: "a route on this host discards it",
}


class PortFailure(NamedTuple):
    """Why a connection to a port failed.

    Attributes:
        kind: "refused" where nothing listens; "silent" without any answer; "unknown" for a name without an address.
        message: a clause that names host, port and the probable obstacle.
    """

    kind: Literal["refused", "silent", "unknown", "other"]
    message: str


def try_port(host: str, port: int, *, limit_s: float) -> PortFailure | None:
    """Connects to a port once within ``limit_s`` seconds; returns None if something listens there."""
    try:
        socket.create_connection((host, port), timeout=limit_s).close()
    except ConnectionRefusedError:
        return PortFailure(
            "refused",
            f"{host} refuses connections to port {port}: nothing listens there, so rank 0 does not run,"
            " or the port is wrong (MASTER_PORT, --port)",
        )
    except socket.gaierror as error:
        return PortFailure(
            "unknown", f"the name {host} cannot be resolved: is it right (MASTER_ADDR, --hosts)? ({error})"
        )
    except TimeoutError:
        return PortFailure(
            "silent",
            f"{host}:{port} does not answer within {limit_s:g} s, not even with a refusal: probably a firewall"
            " drops what is sent, or the address is of an interface that this host cannot reach",
        )
    except OSError as error:
        return PortFailure("other", f"{host}:{port} cannot be reached: {explain_os_error(error)}")
    return None


def explain_os_error(error: OSError) -> str:
    """Returns why a connection failed, in words."""
    return _REASONS.get(error.errno or 0, str(error))
