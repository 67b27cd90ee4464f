"""Which rank this process is among the hosts that are checked, and where they meet."""

from __future__ import annotations

import itertools
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

DEFAULT_PORT = 29511
"""Of ``--hosts``, which nobody communicates."""

_SLURM_PORTS = range(20_000, 30_000)  # below the ports that Linux gives to clients
_MAX_HOSTS = 100_000


@dataclass(frozen=True, kw_only=True)
class RankIdentity:
    """A rank among others.

    Attributes:
        rank: its number.
        world_size: of all ranks.
        local_rank: on its host.
        ranks_per_node: ranks on its host.
        host: its name.
        address: name or address where ranks meet.
        port: likewise.
        hosts_store: this process opens that port.
        peers: names of the hosts, as far as they are known before.
        rank_hosts: host of each rank; empty if they are not known before.
        is_of_launcher: torchrun or srun gave it; False for a list.
    """

    rank: int
    world_size: int
    local_rank: int = 0
    ranks_per_node: int = 1
    host: str
    address: str
    port: int
    hosts_store: bool
    peers: tuple[str, ...] = ()
    rank_hosts: tuple[str, ...] = ()
    is_of_launcher: bool = True

    def name_of(self, rank: int) -> str:
        """Returns what to call a rank that has said nothing yet."""
        if rank >= len(self.rank_hosts):
            return f"rank {rank}"
        return f"rank {rank} of {self.rank_hosts[rank]}" if self.is_of_launcher else self.rank_hosts[rank]


def find_place(
    hosts: str | None = None, port: int | None = None, environment: Mapping[str, str] = os.environ
) -> RankIdentity | None:
    """Returns the place of this process: of the list, or as torchrun or srun has started it.

    Args:
        hosts: the list that a user gave on each host, the meeting place first; None for a launcher.
        port: where to meet; None for the launcher's, or `DEFAULT_PORT`.
        environment: variables of this process.

    Returns:
        None for a process without others.

    Raises:
        ValueError: this host is not in the list, or is there twice; a list and a launcher; a variable is missing.
    """
    is_rank = bool(environment.get("RANK"))
    is_step = bool(environment.get("SLURM_STEP_ID")) and _number(environment, "SLURM_STEP_NUM_TASKS", 1) > 1
    if hosts is not None:
        if is_rank or is_step:
            launcher = "torchrun" if is_rank else "srun"
            raise ValueError(f"--hosts is for hosts without a launcher: {launcher} knows them, leave --hosts out")
        return _place_in_list(hosts, DEFAULT_PORT if port is None else port)
    if is_rank:
        return _place_of_torchrun(environment, port)
    if is_step:
        return _place_of_slurm(environment, port)
    return None


def _place_of_torchrun(environment: Mapping[str, str], port: int | None) -> RankIdentity:
    numbers = {name: environment.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    for name, text in numbers.items():
        if not text.isdecimal():
            raise ValueError(f"RANK is set, so {name} must be a number, got {text!r}; without RANK one host is checked")
    if not environment.get("MASTER_ADDR"):
        raise ValueError("RANK is set, so MASTER_ADDR must be where rank 0 is; without RANK one host is checked")
    rank = int(numbers["RANK"])
    return RankIdentity(
        rank=rank,
        world_size=int(numbers["WORLD_SIZE"]),
        local_rank=_number(environment, "LOCAL_RANK", 0),
        ranks_per_node=_number(environment, "LOCAL_WORLD_SIZE", 1),
        host=socket.gethostname(),
        address=environment["MASTER_ADDR"],
        port=int(numbers["MASTER_PORT"]) if port is None else port,
        hosts_store=rank == 0 and (port is not None or environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"),
    )


def _place_of_slurm(environment: Mapping[str, str], port: int | None) -> RankIdentity:
    """Reads a step's variables; ranks meet on its first host, at a port that its number gives."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or ""
    hosts = expand_node_list(nodes)
    per_node = [
        int(number)
        for part in re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
        for number in [part[0]] * min(int(part[1] or 1), _MAX_HOSTS)
    ]
    world_size = _number(environment, "SLURM_STEP_NUM_TASKS", 1)
    rank_hosts = [host for host, number in zip(hosts, per_node, strict=False) for _ in range(min(number, world_size))]
    is_block = environment.get("SLURM_DISTRIBUTION", "block").startswith("block")
    node = _number(environment, "SLURM_NODEID", 0)
    job = 64 * _number(environment, "SLURM_JOB_ID", 0) + _number(environment, "SLURM_STEP_ID", 0)
    rank = _number(environment, "SLURM_PROCID", 0)
    return RankIdentity(
        rank=rank,
        world_size=world_size,
        local_rank=_number(environment, "SLURM_LOCALID", 0),
        ranks_per_node=per_node[node] if node < len(per_node) else 1,
        host=environment.get("SLURMD_NODENAME") or socket.gethostname(),
        address=environment.get("MASTER_ADDR") or hosts[0],
        port=_number(environment, "MASTER_PORT", _SLURM_PORTS[job % len(_SLURM_PORTS)]) if port is None else port,
        hosts_store=rank == 0,
        peers=tuple(hosts),
        rank_hosts=tuple(rank_hosts) if is_block and len(rank_hosts) == world_size else (),
    )


def expand_node_list(text: str) -> list[str]:
    """Returns the hosts of a list as SLURM writes it.

    Raises:
        ValueError: it is empty, or no such list.

    >>> expand_node_list("node[01-03,7],gpu-a")
    ['node01', 'node02', 'node03', 'node7', 'gpu-a']
    """
    parts = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    hosts = [host for part in parts for host in itertools.islice(_expand(part.strip()), _MAX_HOSTS)]
    if not hosts or not all(hosts) or text.count("[") != text.count("]"):
        raise ValueError(f"SLURM_STEP_NODELIST must be a list of hosts such as node[01-03], got {text!r}")
    return hosts


def _expand(part: str) -> Iterator[str]:
    found = re.search(r"\[([^\[\]]*)\]", part)
    if found is None:
        yield part
        return
    for stretch in found[1].split(","):
        ends = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", stretch)
        if ends is None:
            raise ValueError(f"SLURM_STEP_NODELIST has the range {stretch!r}, which must be such as 01-03")
        for number in range(int(ends[1]), int(ends[2] or ends[1]) + 1):
            yield from _expand(f"{part[: found.start()]}{number:0{len(ends[1])}d}{part[found.end() :]}")


def _place_in_list(text: str, port: int) -> RankIdentity:
    hosts = [host.strip() for host in text.split(",")]
    if not all(hosts) or len(set(hosts)) < len(hosts) or len(hosts) < 2:
        raise ValueError(f"--hosts must be two or more different names or addresses, such as a,b; got {text!r}")
    names = {socket.gethostname(), socket.getfqdn()}
    names |= {name.partition(".")[0] for name in names}
    own = [index for index, host in enumerate(hosts) if host in names] or [
        index for index, host in enumerate(hosts) if _is_own_address(host)
    ]
    if len(own) != 1:
        problem = "is not this host" if not own else "has this host twice"
        which = ", ".join(hosts[index] for index in own) or ", ".join(hosts)
        raise ValueError(
            f"--hosts {text} {problem} ({which}): its name is {socket.gethostname()}; write the name or address of each"
            " host once"
        )
    return RankIdentity(
        rank=own[0],
        world_size=len(hosts),
        host=hosts[own[0]],
        address=hosts[0],
        port=port,
        hosts_store=own[0] == 0,
        peers=tuple(hosts),
        rank_hosts=tuple(hosts),
        is_of_launcher=False,
    )


def _is_own_address(host: str) -> bool:
    """Returns whether a name or address is of this host: then a socket can be bound to it."""
    for address in _addresses(host):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.bind((address, 0))
            except OSError:
                continue
            return True
    return False


def _addresses(host: str) -> Sequence[str]:
    try:
        return list(dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(host, None)))
    except OSError:
        return []


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    value = environment.get(name, "")
    return int(value) if value.isdecimal() else default
