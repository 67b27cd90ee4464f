"""Network interfaces of this host, and the one on which a backend would listen."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass

_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B
_REQUEST_BYTES = 256
_ADDRESS = slice(20, 24)  # of struct ifreq with a sockaddr_in
_NEVER_BY_ITSELF = ("lo", "docker", "virbr")
"""Prefixes of interfaces that NCCL takes only where there is no other."""


@dataclass(frozen=True, kw_only=True)
class Listening:
    """Where a rank listens for the others.

    Attributes:
        variable: which chooses the interface.
        value: of the variable; None if it is not set.
        interface: its name; None if none fits, or none has the address.
        address: IPv4 address with the length of its prefix, such as "10.0.0.1/24"; None if there is none.
    """

    variable: str
    value: str | None
    interface: str | None
    address: str | None


def read_interfaces() -> dict[str, str]:
    """Returns the IPv4 address and prefix of each interface that has one, such as ``{"eth0": "10.0.0.1/24"}``."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack(f"{_REQUEST_BYTES}s", name.encode()[:15])
            try:
                parts = [fcntl.ioctl(probe, code, request)[_ADDRESS] for code in (_SIOCGIFADDR, _SIOCGIFNETMASK)]
            except OSError:  # it has no IPv4 address
                continue
            found[name] = ipaddress.IPv4Interface("/".join(map(socket.inet_ntoa, parts))).with_prefixlen
    return found


def find_listening(
    backend: str, interfaces: Mapping[str, str], environment: Mapping[str, str] = os.environ
) -> Listening:
    """Returns where a rank would listen, as far as variables and the host's name decide that.

    Args:
        backend: of the process group: NCCL chooses where its name has "nccl" in it, gloo otherwise.
        interfaces: from `read_interfaces`.
        environment: with the variables.
    """
    if "nccl" in backend:
        return _nccl_listening(interfaces, environment.get("NCCL_SOCKET_IFNAME") or None)
    value = environment.get("GLOO_SOCKET_IFNAME") or None
    if value is not None:
        name = value.split(",")[0]  # torch takes a list, and makes the connections of the group over the first
        return Listening(
            variable="GLOO_SOCKET_IFNAME",
            value=value,
            interface=name if name in interfaces else None,
            address=interfaces.get(name),
        )
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = "127.0.0.1"  # as gloo does
    for name, with_prefix in interfaces.items():
        if with_prefix.partition("/")[0] == address:
            return Listening(variable="GLOO_SOCKET_IFNAME", value=None, interface=name, address=with_prefix)
    return Listening(variable="GLOO_SOCKET_IFNAME", value=None, interface=None, address=f"{address}/32")


def _nccl_listening(interfaces: Mapping[str, str], value: str | None) -> Listening:
    """Chooses as NCCL's documentation of ``NCCL_SOCKET_IFNAME`` says."""
    sign = value[0] if value is not None and value[0] in "^=" else ""
    names = [] if value is None else value[len(sign) :].split(",")
    if value is None:
        named = [name for name in interfaces if not name.startswith(_NEVER_BY_ITSELF)] or list(interfaces)
    elif sign == "^":
        named = [name for name in interfaces if not name.startswith(tuple(names))]
    elif sign == "=":
        named = [name for name in interfaces if name in names]
    else:
        named = [name for name in interfaces if name.startswith(tuple(names))]
    interface = named[0] if named else None
    return Listening(
        variable="NCCL_SOCKET_IFNAME",
        value=value,
        interface=interface,
        address=interfaces[interface] if interface is not None else None,
    )
