"""Sums up a log of NCCL: its versions, and the paths, rings and features of each communicator; all of it as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from commopt_diagnose.nccl_log.communicators import Communicator, NcclLog
from commopt_diagnose.nccl_log.facts import Member, Process
from commopt_diagnose.nccl_log.inspector import Matched
from commopt_diagnose.nccl_log.paths import is_in_host
from lightning_commopt.text.findings import Finding
from lightning_commopt.text.formatting import count, grouped

_OF_CONNECTION = ("channel", "sender", "receiver", "path", "nic", "direction")


class Path(NamedTuple):
    """A way in which pairs of ranks communicate."""

    name: str  # such as P2P/CUMEM/read
    place: str  # "in a host", "between hosts", or "" if unknown
    pairs: list[tuple[int, int]]  # senders and receivers
    num_channels: int  # the largest number of channels of a pair


def versions_of(log: NcclLog) -> list[str]:
    """Returns the versions of NCCL in most detail; the versions of its Python packages only if there are no others."""
    reported = [process.version.value for process in log.processes if process.version is not None]
    versions = dict.fromkeys([*reported, *log.versions]) or dict.fromkeys(log.packages)
    return [
        version
        for version in versions
        if not any(other != version and other.startswith(f"{version}+") for other in versions)
    ]


def paths_of(communicator: Communicator) -> list[Path]:
    """Returns how pairs of ranks talk, most pairs first."""
    groups: dict[tuple[str, str], dict[tuple[int, int], set[int]]] = {}
    for connection in communicator.connections:
        place = {True: "in a host", False: "between hosts", None: ""}[is_in_host(communicator, connection)]
        groups.setdefault((connection.path, place), {}).setdefault(connection.pair, set()).add(connection.channel)
    paths = [Path(name, place, sorted(pairs), max(map(len, pairs.values()))) for (name, place), pairs in groups.items()]
    return sorted(paths, key=lambda path: -len(path.pairs))


def rings_of(communicator: Communicator) -> dict[tuple[int, ...], list[int]]:
    """Returns the channels of each order of ranks; none if the number of ranks is unknown, as lines may be cut."""
    if communicator.num_ranks is None:
        return {}
    rings = {channel: ring for member in communicator.all_members for channel, ring in sorted(member.rings.items())}
    return grouped((ring, channel) for channel, ring in rings.items())


def extras_of(communicator: Communicator) -> dict[str, str]:
    """Returns whether GPUDirect RDMA, PXN, NVLS and CollNet are used; without what is unknown."""
    members = communicator.all_members
    notes = {name for member in members for name in member.notes}
    num_nvls = max((member.channels.get("nvls", 0) for member in members), default=0)
    network = [
        connection
        for connection in communicator.connections
        if connection.kind == "NET" and connection.method != "Socket"
    ]
    extras: dict[str, str] = {}
    if network:
        extras["GPUDirect RDMA"] = f"{sum(connection.has_gdr for connection in network)} of {len(network)} connections"
        if proxies := {connection.proxy_rank for connection in network if connection.proxy_rank is not None}:
            extras["PXN"] = f"through {count(len(proxies), 'rank')}"
    if "nvls" in notes or num_nvls:
        extras["NVLS"] = f"{num_nvls or 'some'} channels"
    elif "nvls_available" in notes:
        is_known = any("nvls" in member.channels for member in members)
        extras["NVLS"] = "available, not used" if is_known else "available"
    elif "nvls_unavailable" in notes:
        extras["NVLS"] = "not available"
    if "collnet" in notes:
        extras["CollNet"] = "connected"
    return extras


def channels_of(communicator: Communicator) -> int:
    """Returns the number of channels of collectives, or the number seen if it is not printed; 0 for none."""
    members = communicator.all_members
    observed = (max((channel + 1 for channel, *_ in member.connections), default=0) for member in members)
    printed = (member.channels.get("coll") for member in members)
    return max((num_printed or num_seen for num_printed, num_seen in zip(printed, observed, strict=True)), default=0)


def networks_of(communicator: Communicator) -> list[str]:
    """Returns the names of the networks that its processes use."""
    return list(dict.fromkeys(p.network.value for p in communicator.processes if p.network is not None))


def to_plain(log: NcclLog, findings: list[Finding]) -> dict[str, Any]:
    """Returns everything as JSON has it."""
    return {
        "files": log.files,
        "silent_files": log.silent_files,
        "damaged_files": log.damaged_files,
        "num_nccl_lines": log.num_lines,
        "versions": versions_of(log),
        "communicators": [_plain_communicator(communicator) for communicator in log.communicators],
        "processes": [_plain_process(process) for process in log.processes],
        "tuner": [{**choice._asdict(), "times": times} for choice, times in log.choices.most_common()],
        "warnings": [dataclasses.asdict(warning) for warning in log.warnings],
        "timeouts": [{"rank": timeout.rank, **dataclasses.asdict(timeout)} for timeout in log.timeouts.values()],
        "inspector": [_plain_measured(row) for row in log.inspected.rows()],
        "matched": [{"name": row.name, **_plain_measured(row)} for row in log.matched],
        "findings": [finding.to_plain() for finding in findings],
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
        **{name: getattr(member, name) for name in ("device", "bus_id", "channels")},
        "finished_init": member.finished is not None,
        "connections": [
            {name: getattr(connection, name) for name in _OF_CONNECTION} for connection in member.connections.values()
        ],
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
