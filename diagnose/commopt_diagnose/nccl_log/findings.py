"""All findings about a log, the worst first; among them ranks that are missing, hang or differ from others."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from commopt_diagnose.findings import worst_first
from commopt_diagnose.nccl_log import network_paths, paths
from commopt_diagnose.nccl_log.communicators import Communicator, NcclLog, ranks_of
from commopt_diagnose.nccl_log.facts import Fact, Process
from commopt_diagnose.nccl_log.paths import finding, reason
from commopt_diagnose.nccl_log.warnings import find_ras, find_timeouts, find_warnings
from commopt_diagnose.nccl_settings import OF_ONE_RANK
from lightning_commopt.text.findings import Confidence, Finding, Severity
from lightning_commopt.text.formatting import count, grouped, list_some, ranks_text

_PATH_FINDERS = (*paths.FINDERS, *network_paths.FINDERS)
_FORCED = re.compile(r"NCCL_(ALGO|PROTO|NTHREADS|BUFFSIZE|M(IN|AX)_(NCHANNELS|CTAS|NRINGS)|LAUNCH_MODE)$")
_SETTINGS = (("forced_settings", _FORCED), ("topology_file", re.compile(r"NCCL_(TOPO|GRAPH)_FILE$")))
_LARGE_BYTES = 16 << 20  # messages from this size on are slow with the protocol LL
# Every rank reads these while it is initialized, so one that does not print them does not have them. Others, such as
# NCCL_SHM_DISABLE and NCCL_IB_TIMEOUT, are read only by ranks that come to need them.
_READ_BY_ALL = (
    *("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_IB_DISABLE", "NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_SOCKET_IFNAME"),
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_BUFFSIZE", "NCCL_NTHREADS", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"),
    *("NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE", "NCCL_CROSS_NIC", "NCCL_NET_GDR_LEVEL"),
)

STAGES = (
    "its start",
    "the bootstrap, which finds GPUs and NICs",
    "the point where rings and trees are computed",
    "the first connections",
    "the point where all rings are connected",
    "the point where all trees are connected",
)
"""How far initialization is, judged by the kinds of lines that a rank wrote."""


def find_all(log: NcclLog) -> list[Finding]:
    """Finds what is wrong, slow or unequal, and what could not be judged; once if communicators share it."""
    findings = [*find_warnings(log), *find_timeouts(log), *find_ras(log.ras), *_find_differences(log)]
    findings += [*_find_closed_first(log), *_find_lone_tests(log)]
    for communicator in log.communicators:
        are_whole = not any(member.file in log.left_out for member in communicator.all_members)
        for find in (_find_missing, *((_find_unfinished,) if are_whole else ()), *_PATH_FINDERS):
            where = f"communicator {communicator.number}" if communicator.count == 1 else "communicators without an id"
            findings += [replace(slow, where=where) for slow in find(communicator)]
    rest = log.rest()
    findings += [slow for find in _PATH_FINDERS for slow in find(rest)]
    findings += [*_find_settings(log), *_find_small_protocol(log), *_find_torn(log)]
    findings += _find_unknown(log, findings)
    once: dict[tuple[str, str, str], Finding] = {}
    for known in findings:
        once.setdefault((known.code, known.what, known.why), known)
    return worst_first(once.values())


def _find_settings(log: NcclLog) -> Iterator[Finding]:
    """Finds settings of the user that replace NCCL's own choice, or its look at the hardware."""
    for code, pattern in _SETTINGS:
        facts = {
            name: fact
            for p in log.processes
            for name, fact in sorted(p.settings.items())
            if pattern.match(name) and name not in p.set_by_plugin
        }
        if facts:
            settings = ", ".join(f"{name}={fact.value}" for name, fact in facts.items())
            yield finding("note", code, *facts.values(), settings=settings)


def _find_closed_first(log: NcclLog) -> Iterator[Finding]:
    """Finds ranks that ended before the others of their host, by what the others saw first."""
    lines = grouped((p.machine, p.notes["closed_by"]) for p in log.processes if "closed_by" in p.notes)
    for machine, of_host in lines.items():
        ranks = {number for line in of_host for number in re.findall(r"localRank (\d+)", line.text)}
        if len(ranks) == 1 and len(of_host) > 1:
            host, rank = machine.host or "a host", ranks.pop()
            yield finding("note", "closed_first", *of_host[:2], host=host, rank=rank, count=len(of_host))


def _find_lone_tests(log: NcclLog) -> Iterator[Finding]:
    """Finds processes of nccl-tests that each test alone, as each calls itself rank 0."""
    if len(log.lone_tests) > 1:
        hosts = list_some(dict.fromkeys(host for host, _ in log.lone_tests))
        yield finding(
            "warning", "lone_tests", *list(log.lone_tests.values())[:2], count=len(log.lone_tests), hosts=hosts
        )


def _find_torn(log: NcclLog) -> Iterator[Finding]:
    """Finds files in which processes wrote into each other's lines, or from which Ray left out lines."""
    # The lines of one process are joined by what it prints itself, such as the table of nccl-tests, or by an editor.
    torn = log.torn if len(log.processes) > 1 else {}
    for code, files in (("torn_lines", torn), ("left_out_lines", log.left_out)):
        for file, lines in files.items():
            yield finding("note", code, lines, count=count(lines.count, "line"), file=Path(file).name)


def _find_small_protocol(log: NcclLog) -> Iterator[Finding]:
    """Finds large messages that go by the protocol for small ones."""
    small = (choice for choice in log.choices if choice.protocol == "LL")
    chosen = max(small, key=attrgetter("num_bytes"), default=None)
    measured = max((kind.num_bytes for kind in log.inspected.bus_gb_per_s if kind.protocol == "LL"), default=0)
    largest = measured if chosen is None else max(measured, chosen.num_bytes)
    if largest >= _LARGE_BYTES:
        proto = next((p.settings["NCCL_PROTO"] for p in log.processes if "NCCL_PROTO" in p.settings), None)
        cause = f"the environment sets NCCL_PROTO={proto.value}" if proto else "NCCL's tuner, or its plugin, chose it"
        line = log.choice_lines[chosen] if chosen and chosen.num_bytes >= _LARGE_BYTES else None
        yield finding("slow", "small_protocol", proto, line, mib=largest / 2**20, cause=cause)


def _find_unknown(log: NcclLog, findings: list[Finding]) -> Iterator[Finding]:
    """Reports what could not be judged, because no line of the log is about it."""
    silent = [
        communicator
        for communicator in log.communicators
        if (communicator.num_ranks or 2) > 1 and not communicator.connections
    ]
    if silent or (log.processes and not log.communicators):
        members = [member for communicator in silent for member in communicator.all_members]
        subject = ranks_of(members) if members else "ranks"
        talk, use = ("talk", "they use") if subject.startswith("ranks") else ("talks", "it uses")
        no_network = "" if any(p.network for p in log.processes) else f", and which network {use}"
        what = f"unknown: how {subject} {talk}{no_network}"
        yield finding("note", "unknown", what=what, why=reason("no_connections"))
    elif not log.communicators and not findings and not log.choices and not log.inspected.num_records:
        what = f"unknown: how ranks talk{'; the log has only a version' if log.versions else ''}"
        yield finding("note", "unknown", what=what, why=reason("no_rank"))


def _find_differences(log: NcclLog) -> Iterator[Finding]:
    """Finds processes of a communicator that differ in version, driver, network, interface or environment."""
    ranks = _ranks_by_process(log)
    yield from _find_versions(log)
    for communicator in log.communicators:
        for code, name, advice in (
            ("driver", "CUDA drivers", "the same driver on every host"),
            ("network", "networks", "ranks that use different networks cannot talk; make NCCL_NET and plugins equal"),
        ):
            facts = {p: fact for p in communicator.processes if (fact := getattr(p, code)) is not None}
            yield from _differing(code, name, advice, facts, ranks)
        ready = {m.process: m.file for m in communicator.all_members if m.finished and m.started}
        settings = {process: process.settings for process in ready if process.bootstrap is not None}
        torn = {process for process, file in ready.items() if log.may_lack_lines(file)}
        yield from _find_setting_differences(settings, ranks, torn)


def _find_setting_differences(
    settings: Mapping[Process, Mapping[str, Fact]], ranks: Mapping[Process, str], torn: Set[Process]
) -> Iterator[Finding]:
    """Finds settings that differ. Where lines are torn, one that is missing may just be damaged."""
    names = {name for of_process in settings.values() for name in of_process}
    for name in sorted(name for name in names if not OF_ONE_RANK.match(name)):
        have = {key: of_process[name] for key, of_process in settings.items() if name in of_process}
        absent = [key for key in settings if key not in have and key not in torn]
        if len({fact.value for fact in have.values()}) > 1:
            doubt: Confidence = "possible" if torn & have.keys() else "certain"
            for difference in _differing(
                "settings", f"values of {name}", f"set {name} alike on all hosts", have, ranks
            ):
                yield replace(difference, confidence=doubt)
        elif absent and name in _READ_BY_ALL:
            first = next(iter(have.values()))
            what = (
                f"{name}={first.value} is set on {_process_ranks(have, ranks)}, not on {_process_ranks(absent, ranks)}"
            )
            yield finding("differs", "different_settings", first, what=what, why=reason("missing_setting", name=name))


def _find_versions(log: NcclLog) -> Iterator[Finding]:
    """Finds versions that differ: an error in one communicator, else there may be several jobs."""
    whole = [communicator for communicator in log.communicators if communicator.count == 1]
    groups: list[tuple[Severity, str, list[Fact | None]]] = [
        *(
            ("error", "different_version", [process.version for process in communicator.processes])
            for communicator in whole
        ),
        ("note", "several_versions", [*(process.version for process in log.processes), *log.versions.values()]),
    ]
    for severity, code, facts in groups:
        by_version = {fact.value.partition("+")[0]: fact for fact in facts if fact is not None}
        if len(by_version) > 1:
            yield finding(severity, code, *by_version.values(), versions=", ".join(sorted(by_version)))
            return


def _differing(
    code: str, name: str, advice: str, facts: Mapping[Process, Fact], ranks: Mapping[Process, str]
) -> Iterator[Finding]:
    by_value = grouped((fact.value, process) for process, fact in facts.items())
    if len(by_value) > 1:
        shown = "; ".join(f"{value} on {_process_ranks(processes, ranks)}" for value, processes in by_value.items())
        firsts = [facts[processes[0]] for processes in by_value.values()][:4]
        what, why = f"ranks have different {name}: {shown}", reason("different", advice=advice)
        yield finding("differs", f"different_{code}", *firsts, what=what, why=why)


def _ranks_by_process(log: NcclLog) -> dict[Process, str]:
    """Returns how to call each process: by the ranks that it has in the largest communicator."""
    names = {p: f"{p.host}:{p.pid}" if p.host else "a process" for p in log.processes}
    for communicator in sorted(log.communicators, key=lambda communicator: len(communicator.members)):
        by_process = grouped((member.process, rank) for rank, member in communicator.members.items())
        names.update({process: ranks_text(ranks) for process, ranks in by_process.items()})
    return names


def _process_ranks(processes: Iterable[Process], ranks: Mapping[Process, str]) -> str:
    names = list(dict.fromkeys(ranks[process] for process in processes))
    numbers = [name.split()[1] for name in names if name.startswith("rank ")]
    return ranks_text(map(int, numbers)) if len(numbers) == len(names) else list_some(names)


def _find_missing(communicator: Communicator) -> Iterator[Finding]:
    missing, members = communicator.missing, communicator.members
    if missing and members and communicator.count == 1:
        first = next(m for m in members.values() if m.num_ranks is not None)
        present = f"{ranks_text(members)} of {communicator.num_ranks}"
        yield finding(
            "note", "missing_ranks", first.started or first.last, present=present, missing=ranks_text(missing)
        )


def _find_unfinished(communicator: Communicator) -> Iterator[Finding]:
    """Finds ranks that have begun, but have no ``Init COMPLETE``.

    It is an error only if all ranks are in the log and some have finished: otherwise the log may just be cut, as no
    rank gets far without the others.
    """
    members = communicator.members
    open_ones = {rank: m for rank, m in members.items() if m.started and not (m.finished or m.ended)}
    # If several communicators look alike, it is unknown whose lines these are.
    if not open_ones or communicator.count > 1:
        return
    finished = [rank for rank, member in members.items() if member.finished]
    first = min(member.stage for member in open_ones.values())
    slowest = [rank for rank, member in open_ones.items() if member.stage == first]
    is_far_behind = bool(finished) or max(member.stage for member in open_ones.values()) - first > 1
    # Once all rings are connected, initialization ends within milliseconds, so nobody is far ahead.
    is_far_behind = is_far_behind and first < len(STAGES) - 2
    subject = f"{ranks_text(slowest)} {'is' if len(slowest) == 1 else 'are'}"
    shown = [open_ones[rank].last for rank in [*slowest, *(rank for rank in open_ones if rank not in slowest)][:2]]
    yield finding(
        "error" if is_far_behind and finished and not communicator.missing else "note",
        "unfinished_init",
        *shown,
        unfinished=ranks_text(open_ones),
        others=f"; {ranks_text(finished)} finished" if finished else "",
        place=f"{subject} {'the furthest behind, ' if is_far_behind else ''}at {STAGES[first]}",
        ranks=ranks_text(slowest),
        confidence="likely",
    )
