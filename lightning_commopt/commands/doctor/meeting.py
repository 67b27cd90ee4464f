"""How ranks on several hosts meet, to compare what they are like; each step has a limit."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lightning_commopt.commands.doctor.doors import ListeningPort, UnreachablePort, find_unreachable, listen_on_ports
from lightning_commopt.commands.doctor.facts import Facts, facts_from_plain
from lightning_commopt.commands.doctor.places import RankIdentity
from lightning_commopt.launch.ports import try_port
from lightning_commopt.text.formatting import list_some

_RETRY_S = 0.2
_POLL_S = 0.05
_CONNECT_S = 5.0
_GRACE_S = 5.0  # in which rank 0's message reaches the others
_MAX_NAMES = 8


class MeetingError(RuntimeError):
    """Ranks cannot meet; the message names the peer and the port, and what is probably in the way."""


class Meeting(NamedTuple):
    """What came of a meeting.

    Attributes:
        everybody: the facts of all ranks, in their order.
        closed: connections between hosts that failed.
        gloo_error: what an all-reduce over gloo failed with; None if it worked, or was not tried as something is
            in its way.
    """

    everybody: list[Facts]
    closed: list[UnreachablePort]
    gloo_error: str | None = None


def meet(facts: Facts, place: RankIdentity, *, limit_s: float) -> Meeting:
    """Collects the facts of all ranks, and tries connections between all hosts. All ranks must call it.

    Args:
        facts: of this rank.
        place: of this rank.
        limit_s: seconds in which all must come.

    Raises:
        MeetingError: the meeting place cannot be reached, or a rank does not come.
    """
    deadline = time.monotonic() + limit_s
    if not place.hosts_store:
        check_port(place.address, place.port, limit_s=limit_s)
    try:
        store = _open_store(place, deadline)
        users = {"gloo": facts.gloo_interface, "NCCL": facts.nccl_interface} if place.local_rank == 0 else {}
        with listen_on_ports(users) as doors:
            return _FactExchange(store, place, deadline, limit_s).meet(facts, doors)
    except (RuntimeError, ValueError) as error:
        if isinstance(error, MeetingError):
            raise
        raise MeetingError(
            f"rank {place.rank} on {place.host} was at {place.address}:{place.port}, but lost the others within"
            f" {limit_s:g} s: {str(error).splitlines()[0]}"
        ) from error


def _open_store(place: RankIdentity, deadline: float) -> dist.Store:
    remaining = timedelta(seconds=max(1.0, deadline - time.monotonic()) + _GRACE_S)
    try:
        store = dist.TCPStore(
            place.address, place.port, place.world_size, place.hosts_store, timeout=remaining, wait_for_workers=False
        )
    except RuntimeError as error:
        if "EADDRINUSE" in str(error) or "already in use" in str(error):
            raise MeetingError(
                f"port {place.port} of {place.host} is taken: another commopt doctor may still run; else --port,"
                " the same on all hosts"
            ) from error
        raise
    return dist.PrefixStore("commopt/doctor", store)


class _FactExchange:
    """A store that all ranks write to; rank 0 collects and answers."""

    def __init__(self, store: dist.Store, place: RankIdentity, deadline: float, limit_s: float) -> None:
        self._store = store
        self._place = place
        self._deadline = deadline
        self._limit_s = limit_s
        self._absent: list[int] = []

    def meet(self, facts: Facts, doors: Sequence[ListeningPort]) -> Meeting:
        place = self._place
        try:
            told = self._exchange("facts", {**asdict(facts), "doors": list(doors)})
            listeners = [rank for rank, each in enumerate(told) if each["doors"]]
            everybody = disambiguate_hosts([facts_from_plain(each) for each in told], listeners)
            own_host = everybody[place.rank].host
            by_host = {
                each.host: [ListeningPort(*door) for door in plain["doors"]]
                for each, plain in zip(everybody, told, strict=True)
                if plain["doors"]
            }
            # One of each host tries; the others of it are on the same network.
            closed = find_unreachable(own_host, by_host, limit_s=_CONNECT_S) if place.local_rank == 0 else []
            # Nobody waits longer for those that try than they may take.
            self._deadline = max(self._deadline, time.monotonic() + _CONNECT_S + _GRACE_S)
            all_closed = [
                UnreachablePort(one, other, ListeningPort(*door), reason)
                for of_rank in self._exchange("closed", closed)
                for one, other, door, reason in of_rank
            ]
            is_one_host = len({each.host for each in everybody}) == 1
            is_open = not all_closed and (is_one_host or all(map(_is_reachable, everybody)))
            gloo_error = self._add_up() if is_open else None
        finally:
            self._leave()
        return Meeting(everybody, all_closed, gloo_error)

    def _exchange(self, name: str, value: Any) -> list[Any]:
        """Returns the values of all ranks."""
        self._store.set(f"{name}/{self._place.rank}", json.dumps(value))
        if self._place.rank == 0:
            self._absent = self._wait_for_all(name)
            if self._absent:
                problem = self._absence()
                self._store.set(name, json.dumps({"problem": problem}))
                raise MeetingError(problem)
            texts = (self._store.get(f"{name}/{rank}") for rank in range(self._place.world_size))
            values = [json.loads(text) for text in texts]
            self._store.set(name, json.dumps({"values": values}))
            return values
        if not self._wait(name, _GRACE_S):
            raise MeetingError(
                f"rank 0 at {self._place.address}:{self._place.port} has its port open, but did not answer within"
                f" {self._limit_s:g} s"
            )
        answer = json.loads(self._store.get(name))
        if "problem" in answer:
            raise MeetingError(answer["problem"])
        return list(answer["values"])

    def _wait_for_all(self, name: str) -> list[int]:
        """Waits for what all ranks write, but those that are absent already; returns those that do not come."""
        keys = {rank: f"{name}/{rank}" for rank in range(self._place.world_size) if rank not in self._absent}
        for key in keys.values():
            if not self._wait(key):
                return [rank for rank, each in keys.items() if not self._store.check([each])]
        return []

    def _wait(self, key: str, grace_s: float = 0.0) -> bool:
        """Waits until somebody has written a key, and returns whether; Store.wait would print its own warnings."""
        while not self._store.check([key]):
            if time.monotonic() > self._deadline + grace_s:
                return False
            time.sleep(_POLL_S)
        return True

    def _absence(self) -> str:
        place = self._place
        names = list_some([place.name_of(rank) for rank in self._absent], _MAX_NAMES)
        return (
            f"{names} did not come to {place.address}:{place.port} within {self._limit_s:g} s:"
            " is commopt doctor running there, with the same --hosts and --port? Its own message says whether it can"
            " reach this port"
        )

    def _add_up(self) -> str | None:
        """Runs one all-reduce over gloo, which training does first; returns what is wrong with it."""
        place = self._place
        timeout = timedelta(seconds=_CONNECT_S + _GRACE_S)
        try:
            dist.init_process_group(
                "gloo", store=self._store, rank=place.rank, world_size=place.world_size, timeout=timeout
            )
            ones = torch.ones(1)
            dist.all_reduce(ones)
            dist.destroy_process_group()
        except (RuntimeError, ValueError) as error:
            return str(error).splitlines()[0]
        return None if ones.item() == place.world_size else f"the sum of ones over all ranks is {ones.item():g}"

    def _leave(self) -> None:
        """Keeps the store until all have read what is in it, or a little while."""
        _quietly(lambda: self._store.set(f"left/{self._place.rank}", "1"))
        if self._place.hosts_store:
            self._deadline = time.monotonic() + _GRACE_S
            _quietly(lambda: self._wait_for_all("left"))


def disambiguate_hosts(everybody: Sequence[Facts], listeners: Sequence[int]) -> list[Facts]:
    """Gives hosts of one name their first rank behind it.

    Args:
        everybody: in the order of ranks, those of a host behind its first one.
        listeners: the first rank of each host.
    """
    times = Counter(everybody[rank].host for rank in listeners)
    names: dict[str, str] = {}
    found = []
    for rank, facts in enumerate(everybody):
        if rank in listeners:
            names[facts.host] = f"{facts.host} (rank {rank})" if times[facts.host] > 1 else facts.host
        found.append(replace(facts, host=names.get(facts.host, facts.host)))
    return found


def _is_reachable(facts: Facts) -> bool:
    """Returns whether gloo would listen where other hosts can reach it."""
    return facts.gloo_interface is not None and facts.gloo_interface.name != "lo"


def _quietly(step: Callable[[], Any]) -> None:
    """Takes a step that may fail once the others are gone."""
    try:
        step()
    except RuntimeError:
        return


def check_port(host: str, port: int, *, limit_s: float) -> None:
    """Tries whether something listens at a port, or will within the limit.

    Raises:
        MeetingError: it cannot be reached; the message tells a name that is unknown, a port where nothing listens, and
            a connection without an answer apart.
    """
    deadline = time.monotonic() + limit_s
    while True:
        failure = try_port(host, port, limit_s=max(0.1, deadline - time.monotonic()))
        if failure is None:
            return
        if failure.kind != "refused" or time.monotonic() > deadline:
            raise MeetingError(failure.message)
        time.sleep(_RETRY_S)
