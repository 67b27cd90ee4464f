"""Finds out which rank this process is and where ranks meet, from launchers' variables or a list of hosts."""

from __future__ import annotations

import ipaddress
import itertools
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

DEFAULT_PORT = 29511
"""Where a list of hosts, and mpirun's ranks, meet by default, as there is no launcher to choose a port."""

_SLURM_PORTS = range(20_000, 30_000)  # these are below the ports that Linux gives to clients
# Open MPI sets the first four, Intel MPI and MPICH the others: rank, number of ranks, and the same of the host.
_OF_MPIRUN = (
    tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
_MAX_HOSTS = 100_000  # more than a cluster has; a damaged list of hosts must not fill the memory


@dataclass(frozen=True, kw_only=True)
class RankIdentity:
    """One of several ranks."""

    rank: int  # global rank
    world_size: int  # number of ranks
    local_rank: int = 0  # rank on its host
    ranks_per_node: int = 1  # number of ranks on its host
    host: str  # name of its host
    address: str  # name or address of the host where ranks meet
    port: int  # port where ranks meet
    hosts_store: bool  # whether this process opens the port
    rank_hosts: tuple[str, ...] = ()  # host of each rank; empty if it is unknown before they meet
    is_of_launcher: bool = True  # whether a launcher started it; False for a list of hosts

    def label(self, rank: int) -> str:
        """Returns how messages name a rank that has not been heard from."""
        if rank >= len(self.rank_hosts):
            return f"rank {rank}"
        return f"rank {rank} of {self.rank_hosts[rank]}" if self.is_of_launcher else self.rank_hosts[rank]


def find_rank_identity(
    hosts: str | None = None, port: int | None = None, environment: Mapping[str, str] = os.environ
) -> RankIdentity | None:
    """Returns which rank this process is.

    Args:
        hosts: comma-separated hosts, one rank each, which meet on the first; None to ask the launcher.
        port: port where ranks meet; None for the launcher's, or `DEFAULT_PORT` with ``hosts``.
        environment: variables of this process.

    Returns:
        None for a process without a launcher and without ``hosts``, and for the only rank of srun or mpirun.

    Raises:
        ValueError: this host is not in ``hosts``, or twice; there is a launcher as well; a variable is missing.
    """
    is_torchrun = bool(environment.get("RANK"))
    is_srun = bool(environment.get("SLURM_STEP_ID")) and _number(environment, "SLURM_STEP_NUM_TASKS", 1) > 1
    if hosts is not None:
        if is_torchrun or is_srun:
            launcher = "torchrun" if is_torchrun else "srun"
            raise ValueError(
                f"--hosts is for hosts without a launcher; {launcher} knows its hosts, so leave --hosts out"
            )
        return _from_list(hosts, DEFAULT_PORT if port is None else port)
    if is_torchrun:
        return _from_torchrun(environment, port)
    # Within a job of SLURM, mpirun may use srun, whose variables then count mpirun's own processes.
    for names in _OF_MPIRUN:
        if all(environment.get(name, "").isdecimal() for name in names):
            return _from_mpirun(names, environment, port)
    return _from_slurm(environment, port) if is_srun else None


def _from_torchrun(environment: Mapping[str, str], port: int | None) -> RankIdentity:
    numbers = {name: environment.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    for name, text in numbers.items():
        if not text.isdecimal():
            raise ValueError(f"RANK is set, so {name} must be a number, got {text!r}; unset RANK to run on one host")
    if not environment.get("MASTER_ADDR"):
        raise ValueError(
            "RANK is set, so MASTER_ADDR must be the address of rank 0's host; unset RANK to run on one host"
        )
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


def _from_mpirun(names: Sequence[str], environment: Mapping[str, str], port: int | None) -> RankIdentity | None:
    """Returns a rank of mpirun, which does not tell ranks on several hosts where to meet."""
    rank, world_size, local_rank, ranks_per_node = (int(environment[name]) for name in names)
    if world_size < 2:
        return None
    address = environment.get("MASTER_ADDR") or ("localhost" if ranks_per_node == world_size else "")
    if not address:
        raise ValueError(
            f"mpirun started {world_size} ranks on several hosts, and does not tell them where rank 0 is: set"
            " MASTER_ADDR for all ranks, with -x MASTER_ADDR=HOST in Open MPI, -genv MASTER_ADDR HOST in Intel MPI and"
            " MPICH"
        )
    return RankIdentity(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        ranks_per_node=ranks_per_node,
        host=socket.gethostname(),
        address=address,
        port=_number(environment, "MASTER_PORT", DEFAULT_PORT) if port is None else port,
        hosts_store=rank == 0,
    )


def _from_slurm(environment: Mapping[str, str], port: int | None) -> RankIdentity:
    """Reads the variables of a step, whose ranks meet on its first host, at a port derived from job and step."""
    hosts = expand_node_list(environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or "")
    per_node = [
        int(number)
        for number, repeats in re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
        for _ in range(min(int(repeats or 1), _MAX_HOSTS))
    ]
    world_size = _number(environment, "SLURM_STEP_NUM_TASKS", 1)
    rank_hosts = [host for host, number in zip(hosts, per_node, strict=False) for _ in range(min(number, world_size))]
    is_block = environment.get("SLURM_DISTRIBUTION", "block").startswith("block")
    node = _number(environment, "SLURM_NODEID", 0)
    # Steps of one job, and of the jobs after it, get different ports: they may run on one host at the same time.
    step = 64 * _number(environment, "SLURM_JOB_ID", 0) + _number(environment, "SLURM_STEP_ID", 0)
    rank = _number(environment, "SLURM_PROCID", 0)
    return RankIdentity(
        rank=rank,
        world_size=world_size,
        local_rank=_number(environment, "SLURM_LOCALID", 0),
        ranks_per_node=per_node[node] if node < len(per_node) else 1,
        host=environment.get("SLURMD_NODENAME") or socket.gethostname(),
        address=environment.get("MASTER_ADDR") or hosts[0],
        port=_number(environment, "MASTER_PORT", _SLURM_PORTS[step % len(_SLURM_PORTS)]) if port is None else port,
        hosts_store=rank == 0,
        rank_hosts=tuple(rank_hosts) if is_block and len(rank_hosts) == world_size else (),
    )


def expand_node_list(text: str) -> list[str]:
    """Returns the hosts in SLURM's notation.

    Raises:
        ValueError: there are none, or the notation is wrong.

    >>> expand_node_list("node[01-03,7],gpu-a")
    ['node01', 'node02', 'node03', 'node7', 'gpu-a']
    """
    parts = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    hosts = [host for part in parts for host in itertools.islice(_expand(part.strip()), _MAX_HOSTS)]
    if not hosts or not all(hosts) or text.count("[") != text.count("]"):
        raise ValueError(f"SLURM_STEP_NODELIST must be a list of hosts such as node[01-03], got {text!r}")
    return hosts


def _expand(part: str) -> Iterator[str]:
    brackets = re.search(r"\[([^\[\]]*)\]", part)
    if brackets is None:
        yield part
        return
    for bounds in brackets[1].split(","):
        ends = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", bounds)
        if ends is None:
            raise ValueError(f"a range in SLURM_STEP_NODELIST must be two numbers such as 01-03, got {bounds!r}")
        for number in range(int(ends[1]), int(ends[2] or ends[1]) + 1):
            yield from _expand(f"{part[: brackets.start()]}{number:0{len(ends[1])}d}{part[brackets.end() :]}")


def _from_list(text: str, port: int) -> RankIdentity:
    hosts = [host.strip() for host in text.split(",")]
    if not all(hosts) or len(set(hosts)) < len(hosts) or len(hosts) < 2:
        raise ValueError(f"--hosts must be two or more different names or addresses, such as a,b; got {text!r}")
    if "localhost" in hosts:
        raise ValueError(f"--hosts {text}: every host calls itself localhost; write names that the others know")
    names = {socket.gethostname(), socket.getfqdn()}
    names |= {name.partition(".")[0] for name in names}
    # An address needs no look-up, so a host that is listed by its name and by its address is found without delay.
    own = [rank for rank, host in enumerate(hosts) if host in names or (_is_address(host) and is_own_address(host))]
    own = own or [rank for rank, host in enumerate(hosts) if is_own_address(host)]
    if len(own) != 1:
        problem = "is not this host" if not own else "has this host twice"
        which = ", ".join(hosts[rank] for rank in own) or ", ".join(hosts)
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
        rank_hosts=tuple(hosts),
        is_of_launcher=False,
    )


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_own_address(host: str) -> bool:
    """Returns whether a name or address is of this host: then a socket can be bound to it."""
    with suppress(OSError, UnicodeError):
        for family, _, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind(address)
                return True
    return False


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    value = environment.get(name, "")
    return int(value) if value.isdecimal() else default
