"""The network interfaces of a host, which of them gloo and NCCL choose, and why a port cannot be reached."""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_SIOCGIFFLAGS, _SIOCGIFADDR, _SIOCGIFNETMASK = 0x8913, 0x8915, 0x891B  # linux/sockios.h
_IFF_UP = 1  # linux/if.h
_GLOBAL_SCOPE = "00"  # /proc/net/if_inet6 has this for an IPv6 address that hosts of other links can reach
_UNUSABLE_FLAGS = 0x48  # linux/if_addr.h: IFA_F_TENTATIVE, IFA_F_DADFAILED: an IPv6 address not yet, or not, unique
_REQUEST_BYTES = 256  # no smaller than struct ifreq
_ADDRESS = slice(20, 24)  # where struct ifreq with a sockaddr_in has the address
_REASONS = {
    errno.ECONNREFUSED: "refused, though the port is open there: a firewall rejects it",
    errno.EHOSTUNREACH: "no route to that host",
    errno.ENETUNREACH: "no route to that network",
    errno.EACCES: "forbidden on this host",
    errno.EPERM: "forbidden by a firewall on this host",
    errno.EINVAL: "a route on this host discards it",
}


class Interface(NamedTuple):
    """A network interface that is up."""

    name: str  # such as "eth0"
    address: str  # IPv4 address; an IPv6 address if it has none
    prefix_length: int = 32  # number of the address's bits that identify its network

    @property
    def with_prefix(self) -> str:
        """The address as in "10.0.0.1/24"."""
        return f"{self.address}/{self.prefix_length}"


@dataclass(frozen=True, kw_only=True)
class Listening:
    """Where a rank listens for the others."""

    variable: str  # name of the variable that selects the interface
    value: str | None  # the variable's value; None if it is not set
    interface: str | None  # name of the interface; None if none matches
    address: str | None  # address with the length of its prefix, such as "10.0.0.1/24"; None if there is none


def list_interfaces() -> list[Interface]:
    """Returns the interfaces that are up and have an address, in the kernel's order.

    Those with an IPv4 address come first, as for NCCL and gloo; of others the first global IPv6 address counts.
    """
    interfaces, others, of_version_6 = [], [], _ipv6_interfaces()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            # Linux's names of interfaces have at most 15 bytes, and a zero behind them.
            request = struct.pack(f"{_REQUEST_BYTES}s", name.encode()[:15])
            try:
                flags = struct.unpack("H", fcntl.ioctl(probe, _SIOCGIFFLAGS, request)[16:18])[0]
                if flags & _IFF_UP and name in of_version_6:
                    others.append(of_version_6[name])
                address, mask = (
                    socket.inet_ntoa(fcntl.ioctl(probe, code, request)[_ADDRESS])
                    for code in (_SIOCGIFADDR, _SIOCGIFNETMASK)
                )
            except OSError:  # the interface has no IPv4 address
                continue
            if flags & _IFF_UP:
                prefix_length = ipaddress.IPv4Network(f"0.0.0.0/{mask}").prefixlen
                interfaces.append(Interface(name, address, prefix_length))
    names = {interface.name for interface in interfaces}
    return [*interfaces, *(interface for interface in others if interface.name not in names)]


def _ipv6_interfaces(path: Path = Path("/proc/net/if_inet6")) -> dict[str, Interface]:
    """Returns the interfaces that have global IPv6 addresses by name, each with the first one."""
    interfaces: dict[str, Interface] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        digits, _, prefix_length, scope, flags, name = line.split()
        if scope == _GLOBAL_SCOPE and not int(flags, 16) & _UNUSABLE_FLAGS:
            address = str(ipaddress.IPv6Address(int(digits, 16)))
            interfaces.setdefault(name, Interface(name, address, int(prefix_length, 16)))
    return interfaces


def find_listening(
    backend: str, interfaces: Sequence[Interface], environment: Mapping[str, str] = os.environ
) -> Listening:
    """Returns where a rank would listen according to its variables and the host's name.

    NCCL's rules apply if the name of the backend contains "nccl", gloo's otherwise.
    """
    is_nccl = "nccl" in backend
    variable = "NCCL_SOCKET_IFNAME" if is_nccl else "GLOO_SOCKET_IFNAME"
    value = environment.get(variable) or None
    # Without the variable gloo listens on the address of the host's name, or else on the loopback device.
    own = None if is_nccl or value else own_address() or "127.0.0.1"
    chosen = choose_for_nccl(interfaces, environment) if is_nccl else choose_for_gloo(interfaces, environment, own)
    address = chosen.with_prefix if chosen else own and ipaddress.ip_interface(own).with_prefixlen
    return Listening(variable=variable, value=value, interface=chosen and chosen.name, address=address)


def own_address() -> str | None:
    """Returns the address that this host's name resolves to; None if it resolves to nothing."""
    return resolve(socket.gethostname())


def resolve(host: str) -> str | None:
    """Returns the IPv4 address of a host, or else its IPv6 address; None if its name resolves to nothing."""
    for family in (socket.AF_INET, socket.AF_INET6):
        # A name with an empty part, or one that is too long, is a UnicodeError.
        with suppress(OSError, UnicodeError):
            return str(socket.getaddrinfo(host, None, family, socket.SOCK_STREAM)[0][4][0])
    return None


def choose_for_gloo(
    interfaces: Sequence[Interface], environment: Mapping[str, str], own_address: str | None
) -> Interface | None:
    """Returns the interface that gloo uses; None if there is none.

    It is the first one in ``GLOO_SOCKET_IFNAME``, or without that variable the one with ``own_address``.
    """
    name = environment.get("GLOO_SOCKET_IFNAME", "").split(",")[0].strip()
    if name:
        return next((interface for interface in interfaces if interface.name == name), None)
    return next((interface for interface in interfaces if interface.address == own_address), None)


def choose_for_nccl(interfaces: Sequence[Interface], environment: Mapping[str, str]) -> Interface | None:
    """Returns the interface that NCCL uses for bootstrap; None if there is none.

    ``NCCL_SOCKET_IFNAME`` has prefixes, or names after "="; "^" excludes them.

    Source: the guide's page on environment variables. Without the variable NCCL prefers InfiniBand (``ib*``);
    ``docker*``, the loopback interface and ``virbr*`` come last.
    """
    text = environment.get("NCCL_SOCKET_IFNAME", "").strip()
    if text:
        is_out = text.startswith("^")
        listed = text[1:] if is_out else text
        is_exact = listed.startswith("=")
        names = [name.strip() for name in listed.removeprefix("=").split(",") if name.strip()]
        matches = [
            any(interface.name == name if is_exact else interface.name.startswith(name) for name in names)
            for interface in interfaces
        ]
        return next((interface for interface, match in zip(interfaces, matches, strict=True) if match != is_out), None)
    order = {"ib": 0, "docker": 2, "lo": 3, "virbr": 4}  # all other names have 1
    names = [interface.name for interface in interfaces]
    places = [next((order[start] for start in order if name.startswith(start)), 1) for name in names]
    return interfaces[places.index(min(places))] if places else None


class PortFailure(NamedTuple):
    """Why a connection to a port failed."""

    message: str  # a clause that names host, port and the probable obstacle
    is_refused: bool = False  # whether nothing listens there yet


def try_port(host: str, port: int, *, limit_s: float) -> PortFailure | None:
    """Connects to a port once within ``limit_s`` seconds; returns None if something listens there."""
    try:
        socket.create_connection((host, port), timeout=limit_s).close()
    except ConnectionRefusedError:
        return PortFailure(
            f"{host} refuses connections to port {port}: nothing listens there, so rank 0 is not running,"
            " or the port is wrong (MASTER_PORT, --port)",
            is_refused=True,
        )
    except (socket.gaierror, UnicodeError) as error:
        return PortFailure(f"the name {host} cannot be resolved ({error}): check MASTER_ADDR or --hosts")
    except TimeoutError:
        return PortFailure(
            f"{host}:{port} does not answer within {limit_s:g} s, not even with a refusal: probably a firewall"
            " drops what is sent, or the address is of an interface that this host cannot reach"
        )
    except OSError as error:
        return PortFailure(f"{host}:{port} cannot be reached: {explain_os_error(error)}")
    return None


def explain_os_error(error: OSError) -> str:
    """Returns why a connection failed, in words."""
    return _REASONS.get(error.errno or 0, str(error))
