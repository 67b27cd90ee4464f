"""Lets ranks on several hosts exchange facts and try connections to each other; each step has a time limit."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from commopt_diagnose.doctor.facts import Facts
from commopt_diagnose.rank_identity import RankIdentity
from lightning_commopt.launch.interfaces import Interface, explain_os_error, try_port
from lightning_commopt.measure.plain import from_plain
from lightning_commopt.sync.store import poll
from lightning_commopt.text.formatting import grouped, list_some

_RETRY_S = 0.2  # pause between two tries of a port where nothing listens yet
_CONNECT_S = 5.0  # two lost packets are sent again within it: TCP waits for 1 s, then for 2 s
_GRACE_S = 5.0  # how much longer than rank 0 the others wait, for its message to reach them
_MAX_NAMES = 8  # more ranks would hide the sentence around them
_MAX_THREADS = 64  # ports that are tried at a time, as each that does not answer takes `_CONNECT_S`


class ListeningPort(NamedTuple):
    """An open port of a host."""

    interface: str  # name of the interface that it is on
    address: str  # the interface's address
    port: int  # number of the port, which the kernel chooses
    users: str  # libraries that would use the interface, such as "gloo and NCCL"


class UnreachablePort(NamedTuple):
    """A port of ``to_host`` that ``from_host`` could not connect to."""

    from_host: str
    to_host: str
    port: ListeningPort
    reason: str


@contextmanager
def listen_on_ports(interfaces: Mapping[str, Interface | None]) -> Iterator[list[ListeningPort]]:
    """Listens once on each interface inside a ``with`` statement, and closes each connection at once."""
    users = grouped((interface, user) for user, interface in interfaces.items() if interface is not None)
    with ExitStack() as closing:
        ports = []
        for interface, names in users.items():
            family = socket.AF_INET6 if ":" in interface.address else socket.AF_INET
            server = closing.enter_context(socket.create_server((interface.address, 0), family=family, backlog=1024))
            number = server.getsockname()[1]
            threading.Thread(target=_close_connections, args=(server,), daemon=True).start()
            closing.callback(_wake, server)
            ports.append(ListeningPort(interface.name, interface.address, number, " and ".join(names)))
        yield ports


def _close_connections(server: socket.socket) -> None:
    """Makes room for further connections: the kernel keeps a limited number that nobody has accepted."""
    with suppress(OSError):
        while True:
            server.accept()[0].close()


def _wake(server: socket.socket) -> None:
    """Makes a thread that waits for a connection notice that there will be none."""
    with suppress(OSError):
        server.shutdown(socket.SHUT_RDWR)


def find_unreachable(
    own_host: str, ports: Mapping[str, Sequence[ListeningPort]], *, limit_s: float
) -> list[UnreachablePort]:
    """Connects to all ports of other hosts at the same time, and returns those that could not be reached."""

    def attempt(to: tuple[str, ListeningPort]) -> UnreachablePort | None:
        host, port = to
        try:
            socket.create_connection((port.address, port.port), timeout=limit_s).close()
        except OSError as error:
            silence = f"no answer within {limit_s:g} s: probably a firewall drops it"
            reason = silence if isinstance(error, TimeoutError) else explain_os_error(error)
            return UnreachablePort(own_host, host, port, reason)
        return None

    tried = [(host, port) for host, theirs in ports.items() if host != own_host for port in theirs]
    with ThreadPoolExecutor(max_workers=_MAX_THREADS) as pool:
        return [failure for failure in pool.map(attempt, tried) if failure is not None]


class MeetingError(RuntimeError):
    """Ranks cannot meet; the message names the peer and the port, and the probable obstacle."""


class Meeting(NamedTuple):
    """What all ranks have found together."""

    all_facts: list[Facts]  # the facts of all ranks, by rank
    unreachable: list[UnreachablePort]  # connections between hosts that failed
    # The error of an all-reduce over gloo; None if it worked, or was not tried because connections had failed.
    gloo_error: str | None = None


def meet(facts: Facts, identity: RankIdentity, *, limit_s: float) -> Meeting:
    """Collects the facts of all ranks, and tries connections between all hosts. All ranks must call it.

    Raises:
        MeetingError: the meeting place cannot be reached, or a rank does not arrive.
    """
    deadline = time.monotonic() + limit_s
    if not identity.hosts_store:
        check_port(identity.address, identity.port, limit_s=limit_s)
    try:
        store = _open_store(identity, deadline)
        with listen_on_ports(interfaces_to_try(facts) if identity.local_rank == 0 else {}) as ports:
            return _FactExchange(store, identity, deadline, limit_s).meet(facts, ports)
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        # Facts from another version of this package may raise any of these.
        if isinstance(error, MeetingError):
            raise
        raise MeetingError(
            f"rank {identity.rank} on {identity.host} was at {identity.address}:{identity.port}, but lost the others"
            f" within {limit_s:g} s: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        ) from error


def interfaces_to_try(facts: Facts) -> dict[str, Interface | None]:
    """Returns the interfaces of gloo and NCCL; an interface that only NCCL would use does not matter without GPUs."""
    is_used = facts.gpus or facts.nccl_interface == facts.gloo_interface
    return {"gloo": facts.gloo_interface, "NCCL": facts.nccl_interface if is_used else None}


def _open_store(identity: RankIdentity, deadline: float) -> dist.Store:
    remaining = timedelta(seconds=max(1.0, deadline - time.monotonic()) + _GRACE_S)
    where = identity.address, identity.port, identity.world_size, identity.hosts_store
    try:
        # Waiting for workers here would end in a timeout that does not name the ranks that are missing.
        store = dist.TCPStore(*where, timeout=remaining, wait_for_workers=False)
    except RuntimeError as error:
        if "EADDRINUSE" in str(error) or "already in use" in str(error):
            raise MeetingError(
                f"port {identity.port} of {identity.host} is taken, perhaps by another commopt doctor that still"
                " runs: wait for its end, or choose another --port, the same on all hosts"
            ) from error
        raise
    # After a restart torchrun's store still has the keys of earlier attempts.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"commopt/doctor/{attempt}", store)


@dataclass
class _FactExchange:
    """Exchanges values of all ranks through a store: each rank writes its own, and rank 0 collects and answers."""

    _store: dist.Store
    _identity: RankIdentity
    _deadline: float
    _limit_s: float
    _absent: list[int] = field(default_factory=list)

    def meet(self, facts: Facts, ports: Sequence[ListeningPort]) -> Meeting:
        identity = self._identity
        try:
            plain = self._exchange("facts", {**asdict(facts), "ports_to_try": list(ports)})
            ports_of_ranks = [
                [from_plain(ListeningPort, port) for port in of_rank["ports_to_try"]] for of_rank in plain
            ]
            listeners = [rank for rank, theirs in enumerate(ports_of_ranks) if theirs]
            all_facts = disambiguate_hosts([from_plain(Facts, of_rank) for of_rank in plain], listeners)
            by_host = {all_facts[rank].host: ports_of_ranks[rank] for rank in listeners}
            unreachable: list[UnreachablePort] = []
            # One rank per host suffices, as all ranks of a host are on the same network.
            if identity.local_rank == 0:
                unreachable = find_unreachable(all_facts[identity.rank].host, by_host, limit_s=_CONNECT_S)
            # Ranks that connect may take this long, so the others wait as long for them.
            self._deadline = max(self._deadline, time.monotonic() + _CONNECT_S + _GRACE_S)
            of_ranks = self._exchange("unreachable", unreachable)
            all_unreachable = [from_plain(UnreachablePort, port) for of_rank in of_ranks for port in of_rank]
            # gloo must listen where other hosts can reach it; otherwise the all-reduce would only time out.
            is_listening = all(rank.gloo_interface and rank.gloo_interface.name != "lo" for rank in all_facts)
            is_open = not all_unreachable and (is_listening or len({rank.host for rank in all_facts}) == 1)
            gloo_error = self._try_all_reduce() if is_open else None
        finally:
            self._leave()
        return Meeting(all_facts, all_unreachable, gloo_error)

    def _exchange(self, name: str, value: Any) -> list[Any]:
        """Returns the values of all ranks."""
        store, identity = self._store, self._identity
        place, limit_s = f"{identity.address}:{identity.port}", self._limit_s
        store.set(f"{name}/{identity.rank}", json.dumps(value))
        if identity.rank == 0:
            self._absent = self._wait_for_all(name)
            names = list_some([identity.label(rank) for rank in self._absent], _MAX_NAMES)
            problem = (
                f"{names} did not reach {place} within {limit_s:g} s: is commopt doctor running there, with the same"
                " --hosts and --port? Its own message says whether it can reach this port"
            )
            ranks = range(identity.world_size)
            values = problem if self._absent else [json.loads(store.get(f"{name}/{rank}")) for rank in ranks]
            store.set(name, json.dumps(values))
        elif not self._wait(name, _GRACE_S):
            raise MeetingError(f"rank 0 at {place} has its port open, but did not answer within {limit_s:g} s")
        answer = json.loads(store.get(name))
        if isinstance(answer, str):
            raise MeetingError(answer)
        return list(answer)

    def _wait_for_all(self, name: str) -> list[int]:
        """Waits for the keys of all ranks that are not known as absent; returns the ranks that did not write theirs."""
        keys = {rank: f"{name}/{rank}" for rank in range(self._identity.world_size) if rank not in self._absent}
        if all(self._wait(key) for key in keys.values()):
            return []
        return [rank for rank, key in keys.items() if not self._store.check([key])]

    def _wait(self, key: str, grace_s: float = 0.0) -> bool:
        """Waits for a key, and returns whether it was written in time; ``Store.wait`` would print warnings."""
        return poll(lambda: self._store.check([key]), self._deadline + grace_s - time.monotonic())

    def _try_all_reduce(self) -> str | None:
        """Runs an all-reduce over gloo, as training does first; returns its error, None if it worked."""
        rank, world_size = self._identity.rank, self._identity.world_size
        timeout = timedelta(seconds=_CONNECT_S + _GRACE_S)
        try:
            dist.init_process_group("gloo", store=self._store, rank=rank, world_size=world_size, timeout=timeout)
            ones = torch.ones(1, device="cpu")
            dist.all_reduce(ones)
            dist.destroy_process_group()
        except (RuntimeError, ValueError) as error:
            return str(error).splitlines()[0]
        return None if ones.item() == world_size else f"the sum of ones over all ranks is {ones.item():g}"

    def _leave(self) -> None:
        """Keeps the store until all ranks have read it, or for a short time."""
        with suppress(RuntimeError):  # the others may be gone
            self._store.set(f"left/{self._identity.rank}", "1")
            if self._identity.hosts_store:
                self._deadline = time.monotonic() + _GRACE_S
                self._wait_for_all("left")


def disambiguate_hosts(all_facts: Sequence[Facts], listeners: Sequence[int]) -> list[Facts]:
    """Appends the first rank of a host to its name if several hosts have the same name."""
    times = Counter(all_facts[rank].host for rank in listeners)
    names: dict[str, str] = {}
    named = []
    for rank, facts in enumerate(all_facts):
        if rank in listeners:
            names[facts.host] = f"{facts.host} (rank {rank})" if times[facts.host] > 1 else facts.host
        named.append(replace(facts, host=names.get(facts.host, facts.host)))
    return named


def check_port(host: str, port: int, *, limit_s: float) -> None:
    """Waits until something listens at a port.

    Raises:
        MeetingError: it cannot be reached; the message distinguishes an unknown name, a port where nothing listens, and
            a connection without an answer.
    """
    deadline = time.monotonic() + limit_s
    while failure := try_port(host, port, limit_s=max(0.1, deadline - time.monotonic())):
        if not failure.is_refused or time.monotonic() > deadline:
            raise MeetingError(failure.message)
        time.sleep(_RETRY_S)
