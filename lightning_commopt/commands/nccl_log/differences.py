"""Findings about ranks that are missing or hang, and about ranks and processes that are unlike the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from lightning_commopt.commands.nccl_log.facts import STAGES, Communicator, Fact, NcclLog, Process
from lightning_commopt.commands.nccl_log.finding import finding, processes_of, reason
from lightning_commopt.text.findings import Finding, Severity
from lightning_commopt.text.formatting import list_some, ranks_text

# Every rank reads these while it is initialized, so one that does not print them does not have them. Others, such as
# NCCL_SHM_DISABLE and NCCL_IB_TIMEOUT, are read only by ranks that come to need them.
_READ_BY_ALL = (
    *("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_IB_DISABLE", "NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_SOCKET_IFNAME"),
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_BUFFSIZE", "NCCL_NTHREADS", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"),
    *("NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE", "NCCL_CROSS_NIC", "NCCL_NET_GDR_LEVEL"),
)
_OF_ONE_RANK = ("NCCL_HOSTID", "NCCL_DEBUG_FILE", "NCCL_TOPO_FILE", "NCCL_TOPO_DUMP_FILE", "NCCL_GRAPH_DUMP_FILE")


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
        yield from _find_settings([p for p in processes if id(p) in ready and p.bootstrap is not None], ranks)


def _find_settings(complete: list[Process], ranks: Mapping[int, str]) -> Iterator[Finding]:
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
