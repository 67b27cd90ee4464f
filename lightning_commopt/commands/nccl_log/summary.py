"""A log in a few words: what each communicator is made of, and how its ranks talk."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from lightning_commopt.commands.nccl_log.facts import Communicator, Member, NcclLog, Process
from lightning_commopt.commands.nccl_log.inspector import Matched
from lightning_commopt.commands.nccl_log.paths import is_in_host
from lightning_commopt.text.findings import Finding

_OF_CONNECTION = ("channel", "sender", "receiver", "path", "nic", "direction")


class Path(NamedTuple):
    """A way that pairs of ranks talk."""

    name: str  # such as P2P/CUMEM/read
    place: str  # in a host, between hosts, or "" where the log does not say
    pairs: list[tuple[int, int]]  # sender and receiver
    num_channels: int  # the most of a pair


def versions_of(log: NcclLog) -> list[str]:
    """Returns the versions of NCCL, those with the most detail; of Python's packages only where there is no other."""
    named = [process.version.value for process in log.processes if process.version is not None]
    found = dict.fromkeys([*named, *log.versions]) or dict.fromkeys(log.packages)
    return [each for each in found if not any(other != each and other.startswith(f"{each}+") for other in found)]


def paths_of(communicator: Communicator) -> list[Path]:
    """Returns how pairs of ranks talk, most pairs first."""
    groups: dict[tuple[str, str], dict[tuple[int, int], set[int]]] = {}
    for each in communicator.connections:
        place = {True: "in a host", False: "between hosts", None: ""}[is_in_host(communicator, each)]
        pairs = groups.setdefault((each.path, place), {})
        pairs.setdefault((each.sender, each.receiver), set()).add(each.channel)
    found = [Path(name, place, sorted(pairs), max(map(len, pairs.values()))) for (name, place), pairs in groups.items()]
    return sorted(found, key=lambda path: -len(path.pairs))


def rings_of(communicator: Communicator) -> dict[tuple[int, ...], list[int]]:
    """Returns the channels of each order of ranks; none where the number of ranks is unknown: the line may be cut."""
    found: dict[tuple[int, ...], list[int]] = {}
    rings = {channel: ring for each in communicator.all_members for channel, ring in sorted(each.rings.items())}
    for channel, ring in rings.items() if communicator.num_ranks is not None else ():
        found.setdefault(ring, []).append(channel)
    return found


def extras_of(communicator: Communicator) -> dict[str, str]:
    """Returns whether GPUDirect RDMA, PXN, NVLS and CollNet are used; without what the log does not say."""
    members = communicator.all_members
    notes = {name for member in members for name in member.notes}
    num_nvls = max((member.channels.get("nvls", 0) for member in members), default=0)
    network = [each for each in communicator.connections if each.kind == "NET" and each.method != "Socket"]
    found: dict[str, str] = {}
    if network:
        found["GPUDirect RDMA"] = f"{sum(each.has_gdr for each in network)} of {len(network)} connections"
        if proxies := {each.proxy_rank for each in network if each.proxy_rank is not None}:
            found["PXN"] = f"through {len(proxies)} rank(s)"
    if "nvls" in notes or num_nvls:
        found["NVLS"] = f"{num_nvls or 'some'} channels"
    elif "nvls_available" in notes:
        is_known = any("nvls" in member.channels for member in members)
        found["NVLS"] = "available, not used" if is_known else "available"
    elif "nvls_unavailable" in notes:
        found["NVLS"] = "not available"
    if "collnet" in notes:
        found["CollNet"] = "connected"
    return found


def channels_of(communicator: Communicator) -> int:
    """Returns the channels of collectives."""
    return max((member.num_channels for member in communicator.all_members), default=0)


def networks_of(communicator: Communicator) -> list[str]:
    """Returns the networks that ranks chose."""
    facts = [member.process.network for member in communicator.all_members]
    return list(dict.fromkeys(fact.value for fact in facts if fact is not None))


def to_plain(log: NcclLog, findings: list[Finding]) -> dict[str, Any]:
    """Returns everything as JSON has it."""
    return {
        "files": log.files,
        "silent_files": log.silent_files,
        "num_nccl_lines": log.num_lines,
        "versions": versions_of(log),
        "communicators": [_plain_communicator(each) for each in log.communicators],
        "processes": [_plain_process(each) for each in log.processes],
        "tuner": [{**choice._asdict(), "times": times} for choice, times in log.choices.most_common()],
        "warnings": [dataclasses.asdict(each) for each in log.warnings],
        "timeouts": [dataclasses.asdict(each) for each in log.timeouts.values()],
        "inspector": [_plain_measured(row) for row in log.inspected.rows()],
        "matched": [{"name": row.name, **_plain_measured(row)} for row in log.matched],
        "findings": [each.to_plain() for each in findings],
    }


def _plain_measured(row: Matched) -> dict[str, Any]:
    return {**row.kind._asdict(), "times": row.times, "bus_gb_per_s": row.gb_per_s}


def _plain_communicator(communicator: Communicator) -> dict[str, Any]:
    return {
        "number": communicator.number,
        "num_communicators": communicator.count,
        "num_ranks": communicator.num_ranks,
        "min_ranks": communicator.min_ranks,
        "num_nodes": communicator.num_nodes,
        "missing_ranks": communicator.missing,
        "num_channels": channels_of(communicator),
        "networks": networks_of(communicator),
        "ranks": [_plain_member(rank, member) for rank, member in communicator.members.items()],
        "paths": [path._asdict() for path in paths_of(communicator)],
        "rings": [{"ranks": ring, "channels": channels} for ring, channels in rings_of(communicator).items()],
        "uses": extras_of(communicator),
    }


def _plain_member(rank: int, member: Member) -> dict[str, Any]:
    return {
        "rank": rank,
        "host": member.process.host,
        "pid": member.process.pid,
        "device": member.device,
        "bus_id": member.bus_id,
        "channels": member.channels,
        "finished_init": member.finished is not None,
        "connections": [{name: getattr(each, name) for name in _OF_CONNECTION} for each in member.connections.values()],
    }


def _plain_process(process: Process) -> dict[str, Any]:
    single = {name: getattr(process, name) for name in ("bootstrap", "version", "driver", "network")}
    return {
        "host": process.host,
        "pid": process.pid,
        **{name: None if fact is None else fact.value for name, fact in single.items()},
        "settings": {name: fact.value for name, fact in sorted(process.settings.items())},
        "nics": list(process.nics),
        "interfaces": {name: fact.value for name, fact in process.interfaces.items()},
    }
