"""Explains why ranks do not join, from those that have arrived and from processes that start."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from lightning_commopt.launch.interfaces import Listening
from lightning_commopt.text.formatting import list_some, ranks_text
from lightning_commopt.watch.hangs.process import process_state

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_MAX_SHOWN = 8
"""Maximum number of ranks, hosts or processes in a message, so that it stays readable in a terminal."""


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A rank that has reached the store."""

    rank: int
    host: str  # name of its host
    network: str  # name of its network namespace, which no other has
    listening: Listening  # where it listens for the other ranks
    interfaces: dict[str, str]  # names of its host's interfaces, with their addresses

    def text(self) -> str:
        """Returns rank, host, and where it listens, in words."""
        at = self.listening
        variable = f"{at.variable} is not set" if at.value is None else f"{at.variable}={at.value}"
        if at.address is None:
            return f"rank {self.rank} on {self.host} has no address to listen on ({variable})"
        interface = "" if at.interface is None else f"{at.interface}, "
        return f"rank {self.rank} on {self.host} listens on {at.address.partition('/')[0]} ({interface}{variable})"


def missing_text(address: str, arrivals: Sequence[Arrival], missing: Sequence[int], starting: Mapping[int, int]) -> str:
    """Returns which ranks have not arrived at ``address``; ``starting`` has processes of such ranks."""
    arrived = [arrival.rank for arrival in arrivals]
    present = f"only {ranks_text(arrived)} is" if len(arrived) == 1 else f"{ranks_text(arrived)} are"
    hosts = list(dict.fromkeys(arrival.host for arrival in arrivals))
    on_hosts = f" ({', '.join(hosts[:_MAX_SHOWN])})" if len(hosts) > 1 else ""
    text = f"rank 0 on {hosts[0]} waits at {address} for {ranks_text(missing)}; {present} here{on_hosts}"
    shown = [
        f"Rank {rank} still starts: its process {pid} on this host has not reached init_process_group (imports, data,"
        " or code before the Trainer)"
        for rank, pid in [*starting.items()][:_MAX_SHOWN]
    ]
    unknown = [rank for rank in missing if rank not in starting]
    if unknown:
        was, its = ("it was", "its") if len(unknown) == 1 else ("they were", "their")
        whose = f" of {ranks_text(unknown)}" if starting else ""
        shown.append(
            f"Check whether {was} started, ended early, or cannot reach {address}: {its} own output{whose} shows it"
        )
    return ". ".join((text, *shown))


def unconnected_text(address: str, arrivals: Sequence[Arrival], joined: Collection[int], master: str | None) -> str:
    """Returns why ranks that have all arrived do not connect to each other, according to their addresses.

    ``joined`` ranks have their process group; ``master`` is the address of the store, if known.
    """
    waiting = [arrival.rank for arrival in arrivals if arrival.rank not in joined]
    start = (
        f"all {len(arrivals)} ranks have reached {address}, but {ranks_text(waiting)}"
        f" {'has' if len(waiting) == 1 else 'have'} not connected to the others"
    )
    misplaced, reason = find_misplaced(arrivals, master)
    if not misplaced:
        return (
            f"{start}: {_text_of(arrivals)}. Their addresses match: probably a firewall blocks ports between them,"
            f" except {address}, or NCCL and gloo should use another interface"
            f" ({arrivals[0].listening.variable})"
        )
    others = [arrival for arrival in arrivals if arrival not in misplaced]
    rest = f" The others: {_text_of(others)}." if others else ""
    return f"{start}: {_text_of(misplaced)}, {reason}.{rest} {_remedy(misplaced, arrivals, master)}"


def find_misplaced(arrivals: Sequence[Arrival], master: str | None) -> tuple[list[Arrival], str]:
    """Returns the ranks that listen where others cannot reach them, and why; none and "" if all can."""
    nowhere = [arrival for arrival in arrivals if arrival.listening.address is None]
    if nowhere:
        return nowhere, "so the interface that the variable names does not exist, or is down"
    if len({arrival.network for arrival in arrivals}) == 1:
        return [], ""
    loopback = [arrival for arrival in arrivals if _interface(arrival).is_loopback]
    if loopback:
        return loopback, "which other hosts cannot reach"
    networks = {(_interface(arrival).ip, arrival.network) for arrival in arrivals}
    times = Counter(ip for ip, _ in networks)
    repeated = [arrival for arrival in arrivals if times[_interface(arrival).ip] > 1]
    if repeated:
        return repeated, "an address that several hosts have, such as the address of a bridge on each of them"
    right = _right_network(arrivals, master)
    outside = [arrival for arrival in arrivals if right is not None and _interface(arrival).ip not in right]
    return outside, f"which is not in {right} as the others' addresses are" if outside else ""


def _remedy(misplaced: Sequence[Arrival], arrivals: Sequence[Arrival], master: str | None) -> str:
    right = _right_network(arrivals, master)
    settings: dict[str, list[int]] = {}
    for arrival in misplaced:
        fitting = [
            name
            for name, address in arrival.interfaces.items()
            if right is not None and ipaddress.ip_interface(address).ip in right
        ]
        value = f"={fitting[0]}" if fitting else " to the interface that the other hosts reach"
        settings.setdefault(f"{arrival.listening.variable}{value}", []).append(arrival.rank)
    return "Set " + "; ".join(f"{setting} on {ranks_text(ranks)}" for setting, ranks in settings.items())


def _right_network(arrivals: Sequence[Arrival], master: str | None) -> _Network | None:
    """Returns the network of the store's address if a host is in it, else that in which most ranks listen."""
    for arrival in arrivals:
        for address in arrival.interfaces.values():
            interface = ipaddress.ip_interface(address)
            if str(interface.ip) == master and not interface.is_loopback:
                return interface.network
    listening = [_interface(arrival) for arrival in arrivals if arrival.listening.address is not None]
    networks = Counter(interface.network for interface in listening if not interface.is_loopback)
    return networks.most_common(1)[0][0] if networks else None


def _interface(arrival: Arrival) -> ipaddress.IPv4Interface | ipaddress.IPv6Interface:
    assert arrival.listening.address is not None
    return ipaddress.ip_interface(arrival.listening.address)


def _text_of(arrivals: Sequence[Arrival]) -> str:
    return list_some([arrival.text() for arrival in arrivals], _MAX_SHOWN)


def activity_text(starting: Mapping[int, int]) -> str:
    """Returns what processes do now, to be appended to a sentence; "" if there are none."""
    states = [(pid, process_state(pid)) for pid in [*starting.values()][:_MAX_SHOWN]]
    shown = ", ".join(f"{pid} is {state.state}, {state.cpu_s:.0f} s of CPU time" for pid, state in states)
    return f". Now: process {shown}" if shown else ""
