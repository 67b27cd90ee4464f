"""The network interfaces of a host, and which of them gloo and NCCL would take."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915  # linux/sockios.h
_IFF_UP = 1


class Interface(NamedTuple):
    """A network interface that is up.

    Attributes:
        name: such as "eth0".
        address: IPv4.
    """

    name: str
    address: str


def list_interfaces() -> list[Interface]:
    """Returns the interfaces that are up and have an IPv4 address, in the kernel's order."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                flags = struct.unpack("H", fcntl.ioctl(probe, _SIOCGIFFLAGS, request)[16:18])[0]
                address = socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
            except OSError:
                continue
            if flags & _IFF_UP:
                found.append(Interface(name, address))
    return found


def choose_for_gloo(
    interfaces: Sequence[Interface], environment: Mapping[str, str], own_address: str | None
) -> Interface | None:
    """Returns the interface that torch gives to gloo; None if there is none.

    Args:
        interfaces: from `list_interfaces`.
        environment: ``GLOO_SOCKET_IFNAME`` names one, or several, of which the first is taken here.
        own_address: what the host's name resolves to, which counts without that variable.
    """
    name = environment.get("GLOO_SOCKET_IFNAME", "").split(",")[0].strip()
    if name:
        return next((each for each in interfaces if each.name == name), None)
    return next((each for each in interfaces if each.address == own_address), None)


def choose_for_nccl(interfaces: Sequence[Interface], environment: Mapping[str, str]) -> Interface | None:
    """Returns the interface that NCCL meets over; None if there is none.

    Args:
        interfaces: from `list_interfaces`.
        environment: ``NCCL_SOCKET_IFNAME`` has prefixes, names with "=", and "^" to leave them out.

    Source: the guide's page on environment variables. Without the variable NCCL prefers InfiniBand (``ib*``), and takes
    ``docker*``, the loopback interface and ``virbr*`` last.
    """
    text = environment.get("NCCL_SOCKET_IFNAME", "").strip()
    if text:
        is_out = text.startswith("^")
        listed = text[1:] if is_out else text
        is_exact = listed.startswith("=")
        names = [name.strip() for name in listed.removeprefix("=").split(",") if name.strip()]
        matches = [
            any(each.name == name if is_exact else each.name.startswith(name) for name in names) for each in interfaces
        ]
        return next((each for each, match in zip(interfaces, matches, strict=True) if match != is_out), None)
    last = ("docker", "lo", "virbr")
    tests: list[Callable[[str], bool]] = [
        lambda name: name.startswith("ib"),
        lambda name: not name.startswith(last),
        *(lambda name, prefix=prefix: name.startswith(prefix) for prefix in last),
    ]
    return next((each for test in tests for each in interfaces if test(each.name)), None)
