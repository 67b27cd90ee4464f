"""Why ranks do not come together, from what is known of those that came and of processes that start."""

from __future__ import annotations

import ipaddress
import json
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_commopt.launch.interfaces import Listening
from lightning_commopt.text.formatting import list_some, ranks_text
from lightning_commopt.watch.hangs.process import descendants, process_state

_MOST_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A rank that has reached the store.

    Attributes:
        rank: its number.
        host: the name of its host.
        network: what tells its network namespace from all others.
        listening: where it listens for the other ranks.
        interfaces: of its host, with their addresses.
    """

    rank: int
    host: str
    network: str
    listening: Listening
    interfaces: dict[str, str]

    @classmethod
    def from_json(cls, text: str) -> Arrival:
        """Reads what `to_json` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "listening": Listening(**fields["listening"])})

    def to_json(self) -> str:
        """Returns it as text for the store."""
        return json.dumps(asdict(self))

    @property
    def place(self) -> str:
        """Where it listens, in words."""
        at = self.listening
        variable = f"{at.variable} is not set" if at.value is None else f"{at.variable}={at.value}"
        if at.address is None:
            return f"has no IPv4 address to listen on ({variable})"
        interface = "" if at.interface is None else f"{at.interface}, "
        return f"listens on {at.address.partition('/')[0]} ({interface}{variable})"


def missing_text(address: str, arrivals: Sequence[Arrival], missing: Sequence[int], starting: Mapping[int, int]) -> str:
    """Returns which ranks have not come.

    Args:
        address: host and port where rank 0 waits.
        arrivals: of the ranks that came, rank 0 first.
        missing: the others.
        starting: processes of ranks that are missing, from `find_starting`.
    """
    here = [arrival.rank for arrival in arrivals]
    those = f"only {ranks_text(here)} is" if len(here) == 1 else f"{ranks_text(here)} are"
    hosts = list(dict.fromkeys(arrival.host for arrival in arrivals))
    on_hosts = f" ({', '.join(hosts[:_MOST_SHOWN])})" if len(hosts) > 1 else ""
    text = f"rank 0 on {hosts[0]} waits at {address} for {ranks_text(missing)}; {those} here{on_hosts}"
    shown = [
        f"Rank {rank} still starts: its process {pid} on this host has not come to init_process_group (imports, data,"
        " or code before the Trainer)"
        for rank, pid in [*starting.items()][:_MOST_SHOWN]
    ]
    unknown = [rank for rank in missing if rank not in starting]
    if unknown:
        was, its = ("it was", "its") if len(unknown) == 1 else ("they were", "their")
        who = f" of {ranks_text(unknown)}" if starting else ""
        shown.append(
            f"Look whether {was} started at all, ended early, or cannot reach {address}: {its} own output{who} shows it"
        )
    return ". ".join((text, *shown))


def unconnected_text(address: str, arrivals: Sequence[Arrival], joined: Collection[int], master: str | None) -> str:
    """Returns why ranks that have all come do not connect to each other, as far as their addresses tell.

    Args:
        address: host and port of the store.
        arrivals: of all ranks.
        joined: ranks whose process group is there.
        master: IPv4 address of the store; None if it is not known.
    """
    waiting = [arrival.rank for arrival in arrivals if arrival.rank not in joined]
    start = (
        f"all {len(arrivals)} ranks have come to {address}, but {ranks_text(waiting)}"
        f" {'has' if len(waiting) == 1 else 'have'} not connected to the others"
    )
    odd, why = find_odd(arrivals, master)
    if not odd:
        places = _places(arrivals)
        return (
            f"{start}: {places}. Their addresses fit each other: probably a firewall blocks ports between them other"
            f" than that of {address}, or NCCL and gloo should use another interface"
            f" ({arrivals[0].listening.variable})"
        )
    others = [arrival for arrival in arrivals if arrival not in odd]
    beside = f" The others: {_places(others)}." if others else ""
    return f"{start}: {_places(odd)}, {why}.{beside} {_remedy(odd, arrivals, master)}"


def find_odd(arrivals: Sequence[Arrival], master: str | None) -> tuple[list[Arrival], str]:
    """Returns the ranks that listen where others cannot reach them, and why; none and "" if all places fit.

    Args:
        arrivals: of all ranks.
        master: IPv4 address of the store; None if it is not known.
    """
    nowhere = [arrival for arrival in arrivals if arrival.listening.address is None]
    if nowhere:
        return nowhere, "so the interface that the variable names is not there, or is down"
    if len({arrival.network for arrival in arrivals}) == 1:
        return [], ""
    loopback = [arrival for arrival in arrivals if _interface(arrival).is_loopback]
    if loopback:
        return loopback, "which other hosts cannot reach"
    doubled = [arrival for arrival in arrivals if _is_doubled(arrival, arrivals)]
    if doubled:
        return doubled, "an address that several hosts have, as that of a bridge within each"
    right = _right_network(arrivals, master)
    outside = [arrival for arrival in arrivals if right is not None and _interface(arrival).ip not in right]
    return outside, f"which is not in {right} as the others' addresses are" if outside else ""


def _remedy(odd: Sequence[Arrival], everybody: Sequence[Arrival], master: str | None) -> str:
    right = _right_network(everybody, master)
    settings: dict[str, list[int]] = {}
    for arrival in odd:
        fitting = [
            name
            for name, address in arrival.interfaces.items()
            if right is not None and ipaddress.IPv4Interface(address).ip in right
        ]
        what = f"={fitting[0]}" if fitting else " to the interface that the other hosts reach"
        settings.setdefault(f"{arrival.listening.variable}{what}", []).append(arrival.rank)
    return "Set " + "; ".join(f"{setting} on {ranks_text(ranks)}" for setting, ranks in settings.items())


def _right_network(arrivals: Sequence[Arrival], master: str | None) -> ipaddress.IPv4Network | None:
    """Returns the network with the store's address if a host has it, else that in which most ranks listen."""
    for arrival in arrivals:
        for address in arrival.interfaces.values():
            interface = ipaddress.IPv4Interface(address)
            if str(interface.ip) == master and not interface.is_loopback:
                return interface.network
    listening = [_interface(arrival) for arrival in arrivals if arrival.listening.address is not None]
    networks = Counter(each.network for each in listening if not each.is_loopback)
    return networks.most_common(1)[0][0] if networks else None


def _is_doubled(arrival: Arrival, everybody: Sequence[Arrival]) -> bool:
    return any(
        _interface(other).ip == _interface(arrival).ip and other.network != arrival.network for other in everybody
    )


def _interface(arrival: Arrival) -> ipaddress.IPv4Interface:
    assert arrival.listening.address is not None
    return ipaddress.IPv4Interface(arrival.listening.address)


def _places(arrivals: Sequence[Arrival]) -> str:
    return list_some([f"rank {each.rank} on {each.host} {each.place}" for each in arrivals], _MOST_SHOWN)


def activity_text(starting: Mapping[int, int]) -> str:
    """Returns what processes do at this moment, behind a sentence; "" if there are none."""
    states = [(pid, process_state(pid)) for pid in [*starting.values()][:_MOST_SHOWN]]
    each = ", ".join(f"{pid} is {state.state}, {state.cpu_s:.0f} s of CPU time" for pid, state in states)
    return f". Now: process {each}" if each else ""


def find_starting(missing: Collection[int], ranks_here: range, port: int) -> dict[int, int]:
    """Returns the processes of ranks that have not come, where their environment shows which rank they are.

    Args:
        missing: ranks.
        ranks_here: the ranks on this host.
        port: of the store, which distinguishes this job from others.
    """
    found: dict[int, int] = {}
    # torchrun and srun have started this process and the others, Lightning's own launcher starts them from this one.
    for pid in descendants(os.getppid()) if missing else ():
        rank = _rank_of(pid, ranks_here, port)
        if rank in missing and pid != os.getpid():
            found.setdefault(rank, pid)
    return found


def _rank_of(pid: int, ranks_here: range, port: int) -> int:
    """Returns the rank that a process is, by its environment; -1 if that does not show it."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "replace")
    except OSError:
        return -1
    environment = dict(item.split("=", 1) for item in text.split("\0") if "=" in item)
    if environment.get("MASTER_PORT", str(port)) != str(port):
        return -1
    for name, first in (("RANK", 0), ("SLURM_PROCID", 0), ("LOCAL_RANK", ranks_here.start)):
        if environment.get(name, "").isdecimal():
            return first + int(environment[name])
    return -1
