"""All findings about a log, the worst first; among them ranks that are missing, hang or are unlike the others."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from lightning_commopt.commands.nccl_log.facts import STAGES, Communicator, Fact, NcclLog, Process
from lightning_commopt.commands.nccl_log.finding import finding, processes_of, ranks_of, reason
from lightning_commopt.commands.nccl_log.paths import SLOW_PATHS
from lightning_commopt.commands.nccl_log.warnings import find_ras, find_timeouts, find_warnings
from lightning_commopt.text.findings import Finding, Severity, worst_first
from lightning_commopt.text.formatting import list_some, ranks_text

_FORCED = re.compile(r"NCCL_(ALGO|PROTO|NTHREADS|BUFFSIZE|M(IN|AX)_(NCHANNELS|CTAS|NRINGS)|LAUNCH_MODE)$")
_SETTINGS = (("forced_settings", _FORCED), ("topology_file", re.compile(r"NCCL_(TOPO|GRAPH)_FILE$")))
_LARGE_BYTES = 16 << 20
# Every rank reads these while it is initialized, so one that does not print them does not have them. Others, such as
# NCCL_SHM_DISABLE and NCCL_IB_TIMEOUT, are read only by ranks that come to need them.
_READ_BY_ALL = (
    *("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_IB_DISABLE", "NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_SOCKET_IFNAME"),
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_BUFFSIZE", "NCCL_NTHREADS", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"),
    *("NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE", "NCCL_CROSS_NIC", "NCCL_NET_GDR_LEVEL"),
)
_OF_ONE_RANK = ("NCCL_HOSTID", "NCCL_DEBUG_FILE", "NCCL_TOPO_FILE", "NCCL_TOPO_DUMP_FILE", "NCCL_GRAPH_DUMP_FILE")


def find_all(log: NcclLog) -> list[Finding]:
    """Finds what is wrong, slow or unequal, and what could not be judged; once where communicators have it alike."""
    found = [*find_warnings(log), *find_timeouts(log), *find_ras(log.ras), *find_process_differences(log)]
    for communicator in log.communicators:
        for find in (find_rank_problems, *SLOW_PATHS):
            where = f"communicator {communicator.number}" if communicator.count == 1 else "communicators without an id"
            found += [replace(each, where=where) for each in find(communicator)]
    for find in SLOW_PATHS:
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


def find_process_differences(log: NcclLog) -> Iterator[Finding]:
    """Finds processes of a communicator that differ in version, driver, network, interface or environment."""
    ranks = _ranks_by_process(log)
    yield from _find_versions(log, ranks)
    for communicator in log.communicators:
        processes = processes_of(communicator)
        for code, name, advice in (
            ("driver", "CUDA drivers", "the same driver on every host"),
            ("network", "networks", "ranks that use different networks cannot talk; make NCCL_NET and plugins equal"),
        ):
            facts = {id(p): fact for p in processes if (fact := getattr(p, code)) is not None}
            yield from _differing(code, name, advice, facts, ranks)
        ready = {id(m.process) for m in communicator.all_members if m.finished and m.started}
        yield from _find_setting_differences(
            [p for p in processes if id(p) in ready and p.bootstrap is not None], ranks
        )


def _find_setting_differences(complete: list[Process], ranks: Mapping[int, str]) -> Iterator[Finding]:
    for name in sorted({name for process in complete for name in process.settings} - set(_OF_ONE_RANK)):
        have = {id(p): p.settings[name] for p in complete if name in p.settings}
        absent = [p for p in complete if name not in p.settings]
        if len({fact.value for fact in have.values()}) > 1:
            yield from _differing("settings", f"values of {name}", f"set {name} alike on all hosts", have, ranks)
        elif absent and name in _READ_BY_ALL:
            first = next(iter(have.values()))
            without = _named([id(process) for process in absent], ranks)
            what = f"{name}={first.value} is set on {_named(have, ranks)}, not on {without}"
            yield finding("differs", "different_settings", what, reason("missing_setting", name=name), first)


def _find_versions(log: NcclLog, ranks: Mapping[int, str]) -> Iterator[Finding]:
    """Finds versions that differ: an error in one communicator, else there may be several jobs."""
    for communicator in log.communicators:
        facts = {id(p): p.version for p in processes_of(communicator) if p.version is not None}
        named = {fact.value.partition("+")[0]: fact for fact in facts.values()}
        if len(named) > 1 and communicator.count == 1:
            what = f"ranks have several versions of NCCL: {', '.join(sorted(named))}"
            yield finding("error", "different_version", what, reason("different_version"), *named.values())
            return
    facts_of_all = [*(p.version for p in log.processes if p.version is not None), *log.versions.values()]
    named = {fact.value.partition("+")[0]: fact for fact in facts_of_all}
    if len(named) > 1:
        what = f"the log has several versions of NCCL: {', '.join(sorted(named))}"
        yield finding("note", "several_versions", what, reason("several_versions"), *named.values())


def _differing(
    code: str, name: str, advice: str, facts: Mapping[int, Fact], ranks: Mapping[int, str]
) -> Iterator[Finding]:
    by_value: dict[str, list[int]] = {}
    for process, fact in facts.items():
        by_value.setdefault(fact.value, []).append(process)
    if len(by_value) > 1:
        shown = "; ".join(f"{value} on {_named(each, ranks)}" for value, each in by_value.items())
        what = f"ranks have different {name}: {shown}"
        firsts = [facts[each[0]] for each in by_value.values()][:4]
        yield finding("differs", f"different_{code}", what, reason("different", advice=advice), *firsts)


def _ranks_by_process(log: NcclLog) -> dict[int, str]:
    """Returns how to call each process: by the ranks that it has in the largest communicator."""
    names: dict[int, str] = {}
    for communicator in sorted(log.communicators, key=lambda each: len(each.members)):
        by_process: dict[int, list[int]] = {}
        for rank, member in communicator.members.items():
            by_process.setdefault(id(member.process), []).append(rank)
        names.update({process: ranks_text(ranks) for process, ranks in by_process.items()})
    for process in log.processes:
        names.setdefault(id(process), f"{process.host}:{process.pid}" if process.host else "a process")
    return names


def _named(processes: Iterable[int], ranks: Mapping[int, str]) -> str:
    names = list(dict.fromkeys(ranks[each] for each in processes))
    numbers = [name.split()[1] for name in names if name.startswith("rank ")]
    if len(numbers) == len(names):
        return ranks_text(map(int, numbers))
    return list_some(names)


def find_rank_problems(communicator: Communicator) -> Iterator[Finding]:
    """Finds ranks that are missing, that are not initialized at the end of the log, and that are unlike the others."""
    if communicator.count > 1:
        return  # whose lines these are is not known
    yield from _find_missing(communicator)
    yield from _find_unfinished(communicator)


def _find_missing(communicator: Communicator) -> Iterator[Finding]:
    missing, present = communicator.missing, list(communicator.members)
    if missing and present:
        first = next(m for m in communicator.members.values() if m.num_ranks is not None)
        what = f"the log has {ranks_text(present)} of {communicator.num_ranks}, and no line names {ranks_text(missing)}"
        yield finding("note", "missing_ranks", what, reason("missing_ranks"), first.started or first.last)


def _find_unfinished(communicator: Communicator) -> Iterator[Finding]:
    """Finds ranks without ``Init COMPLETE``; a log that begins behind the start of a rank says nothing about it.

    That is an error only where all ranks are in the log, or where others are ready: else the log may just be cut.
    """
    began = {rank: m for rank, m in communicator.members.items() if m.started is not None}
    open_ones = {rank: m for rank, m in began.items() if not (m.finished or m.ended)}
    if not open_ones:
        return
    finished = [rank for rank, member in communicator.members.items() if member.finished]
    first = min(member.stage for member in open_ones.values())
    behind = [rank for rank, member in open_ones.items() if member.stage == first]
    ahead = bool(finished) or max(member.stage for member in open_ones.values()) - first > 1
    ahead = ahead and first < len(STAGES) - 2  # all rings are connected: the end is a matter of milliseconds
    who = f"{ranks_text(behind)} {'is' if len(behind) == 1 else 'are'}"
    others = f"; {ranks_text(finished)} finished" if finished else ""
    shown = [open_ones[rank] for rank in [*behind, *(rank for rank in open_ones if rank not in behind)][:2]]
    what = f"the log of {ranks_text(open_ones)} ends before initialization was complete{others}"
    where = f"{who} {'the furthest behind, ' if ahead else ''}at {STAGES[first]}"
    why = reason("unfinished_init", where=where, ranks=ranks_text(behind))
    severity: Severity = "error" if ahead and not communicator.missing else "note"
    yield finding(severity, "unfinished_init", what, why, *[member.last for member in shown])
