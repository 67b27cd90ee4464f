"""All findings about a log, the worst first."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from lightning_commopt.commands.nccl_log.differences import find_process_differences, find_rank_problems
from lightning_commopt.commands.nccl_log.facts import NcclLog
from lightning_commopt.commands.nccl_log.finding import finding, ranks_of, reason
from lightning_commopt.commands.nccl_log.networks import SLOW_NETWORKS
from lightning_commopt.commands.nccl_log.paths import SLOW_PATHS
from lightning_commopt.commands.nccl_log.ras import find_ras
from lightning_commopt.commands.nccl_log.warnings import find_timeouts, find_warnings
from lightning_commopt.text.findings import Finding, worst_first

_FORCED = re.compile(r"NCCL_(ALGO|PROTO|NTHREADS|BUFFSIZE|M(IN|AX)_(NCHANNELS|CTAS|NRINGS)|LAUNCH_MODE)$")
_SETTINGS = (("forced_settings", _FORCED), ("topology_file", re.compile(r"NCCL_(TOPO|GRAPH)_FILE$")))
_LARGE_BYTES = 16 << 20


def find_all(log: NcclLog) -> list[Finding]:
    """Finds what is wrong, slow or unequal, and what could not be judged; once where communicators have it alike."""
    found = [*find_warnings(log), *find_timeouts(log), *find_ras(log.ras), *find_process_differences(log)]
    for communicator in log.communicators:
        for find in (find_rank_problems, *SLOW_PATHS, *SLOW_NETWORKS):
            where = f"communicator {communicator.number}" if communicator.count == 1 else "communicators without an id"
            found += [replace(each, where=where) for each in find(communicator)]
    for find in (*SLOW_PATHS, *SLOW_NETWORKS):
        found += find(log.rest)
    found += [*_find_settings(log), *_find_small_protocol(log)]
    found += _find_unknown(log, found)
    once: dict[tuple[str, str, str], Finding] = {}
    for each in found:
        once.setdefault((each.code, each.what, each.why), each)
    return worst_first(once.values())


def _find_settings(log: NcclLog) -> Iterator[Finding]:
    """Finds settings that replace NCCL's own choice, or its look at the hardware."""
    for code, pattern in _SETTINGS:
        found = {name: fact for p in log.processes for name, fact in sorted(p.settings.items()) if pattern.match(name)}
        if found:
            what = f"the environment sets {', '.join(f'{name}={fact.value}' for name, fact in found.items())}"
            yield finding("note", code, what, reason(code), *found.values())


def _find_small_protocol(log: NcclLog) -> Iterator[Finding]:
    """Finds large messages that go by the protocol for small ones."""
    sizes = [choice for choice in log.choices if choice.num_bytes >= _LARGE_BYTES and choice.protocol == "LL"]
    measured = [each.num_bytes for each in log.inspected.bus_gb_per_s if each.protocol == "LL"]
    largest = max([*(choice.num_bytes for choice in sizes), *measured], default=0)
    if largest >= _LARGE_BYTES:
        proto = next((p.settings["NCCL_PROTO"] for p in log.processes if "NCCL_PROTO" in p.settings), None)
        first = max(sizes, key=lambda choice: choice.num_bytes, default=None)
        what = f"messages of {largest / 2**20:.0f} MiB go by the protocol LL"
        why = f"the environment sets NCCL_PROTO={proto.value}" if proto else "NCCL's tuner, or its plugin, chose it"
        evidence = (proto, first and log.choice_lines[first])
        yield finding("slow", "small_protocol", what, reason("small_protocol", why=why), *evidence)


def _find_unknown(log: NcclLog, found: list[Finding]) -> Iterator[Finding]:
    """Says what could not be judged, because no line of the log is about it."""
    silent = [each for each in log.communicators if (each.num_ranks or 2) > 1 and not each.connections]
    if silent or (log.processes and not log.communicators):
        members = [member for each in silent for member in each.all_members]
        who = ranks_of(members) if members else "ranks"
        whose = f"how {who} talk{'' if who.startswith('ranks') else 's'}"
        no_network = ", and which network they use" if not any(p.network for p in log.processes) else ""
        what = f"unknown: {whose}{no_network}"
        yield finding("note", "unknown", what, reason("no_connections"))
    elif not log.communicators and not found and not log.choices and not log.inspected.num_records:
        what = "unknown: how ranks talk; the log has only a version" if log.versions else "unknown: how ranks talk"
        yield finding("note", "unknown", what, reason("no_rank"))
