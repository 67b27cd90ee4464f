"""All findings about a log, the worst first."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from lightning_commopt.commands.nccl_log.facts import NcclLog
from lightning_commopt.commands.nccl_log.finding import lines
from lightning_commopt.commands.nccl_log.networks import find_slow_networks
from lightning_commopt.commands.nccl_log.paths import find_slow_paths
from lightning_commopt.commands.nccl_log.processes import find_lost_processes, find_process_differences
from lightning_commopt.commands.nccl_log.ranks import find_rank_problems
from lightning_commopt.commands.nccl_log.warnings import find_timeouts, find_warnings
from lightning_commopt.text.findings import Finding, worst_first

_FORCED = re.compile(r"NCCL_(ALGO|PROTO|NTHREADS|BUFFSIZE|M(IN|AX)_(NCHANNELS|CTAS|NRINGS)|LAUNCH_MODE)$")
_LARGE_BYTES = 16 << 20


def find_all(log: NcclLog) -> list[Finding]:
    """Finds what is wrong, slow or unequal.

    Returns:
        Errors first, then what is slow, what differs and notes; one finding for communicators that have it alike.
    """
    found = [*find_warnings(log), *find_timeouts(log), *find_lost_processes(log), *find_process_differences(log)]
    for communicator in log.communicators:
        for find in (find_rank_problems, find_slow_paths, find_slow_networks):
            found += [replace(each, where=f"communicator {communicator.number}") for each in find(communicator)]
    found += [*_find_forced(log), *_find_small_protocol(log)]
    once: dict[tuple[str, str, str], Finding] = {}
    for finding in found:
        once.setdefault((finding.code, finding.what, finding.why), finding)
    return worst_first(once.values())


def _find_forced(log: NcclLog) -> Iterator[Finding]:
    forced = {name: fact for process in log.processes for name, fact in process.settings.items() if _FORCED.match(name)}
    if forced:
        yield Finding(
            code="forced_settings",
            severity="note",
            what=f"the environment sets {', '.join(f'{name}={fact.value}' for name, fact in sorted(forced.items()))}",
            why="NCCL does not choose these by itself any more; what was best elsewhere is often slower here",
            advice="measure without them, at the sizes of your buckets",
            evidence=lines(*forced.values()),
        )


def _find_small_protocol(log: NcclLog) -> Iterator[Finding]:
    """Finds large messages that go by the protocol for small ones."""
    large = [choice for choice in log.choices if choice.num_bytes >= _LARGE_BYTES and choice.protocol == "LL"]
    if large:
        largest = max(large, key=lambda choice: choice.num_bytes)
        proto = next((p.settings["NCCL_PROTO"] for p in log.processes if "NCCL_PROTO" in p.settings), None)
        yield Finding(
            code="small_protocol",
            severity="slow",
            what=f"messages of {largest.num_bytes / 2**20:.0f} MiB go by the protocol LL",
            why=f"the environment sets NCCL_PROTO={proto.value}" if proto else "NCCL's tuner, or its plugin, chose it",
            advice="unset NCCL_PROTO and NCCL_ALGO: LL sends twice the bytes, and is for messages below some 100 KB",
            evidence=lines(proto, log.choice_lines.get(largest)),
        )
