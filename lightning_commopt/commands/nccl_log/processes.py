"""Findings about processes: other versions, drivers, networks or settings than the rest of the job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from lightning_commopt.commands.nccl_log.facts import Fact, NcclLog, Process
from lightning_commopt.commands.nccl_log.finding import lines
from lightning_commopt.text.findings import Finding
from lightning_commopt.text.formatting import list_some, ranks_text

# Every rank reads these while it is initialized, so one that does not print them does not have them. Others, such as
# NCCL_SHM_DISABLE and NCCL_IB_TIMEOUT, are read only by ranks that come to need them.
_READ_BY_ALL = (
    *("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_IB_DISABLE", "NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_SOCKET_IFNAME"),
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_BUFFSIZE", "NCCL_NTHREADS", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"),
    *("NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE", "NCCL_CROSS_NIC", "NCCL_NET_GDR_LEVEL"),
)
_OF_ONE_RANK = ("NCCL_HOSTID", "NCCL_DEBUG_FILE", "NCCL_TOPO_FILE", "NCCL_TOPO_DUMP_FILE", "NCCL_GRAPH_DUMP_FILE")


def find_lost_processes(log: NcclLog) -> Iterator[Finding]:
    """Finds processes that wrote their first lines but are in no communicator, while another one does not get on."""
    members = [member for communicator in log.communicators for member in communicator.members.values()]
    known = {id(member.process) for member in members}
    lost = [process for process in log.processes if process.bootstrap is not None and id(process) not in known]
    if lost and (not members or any(not member.finished for member in members)):
        names = list_some([_shown(process) for process in lost])
        yield Finding(
            code="lost_process",
            severity="error",
            what=f"{names} wrote first lines, and nothing of a communicator",
            why="it waits in bootstrap for other ranks, or it ended there; or the log ends there",
            advice="look at this process's last lines; check MASTER_ADDR, NCCL_SOCKET_IFNAME and firewalls",
            evidence=lines(*[process.bootstrap for process in lost[:3]]),
        )


def find_process_differences(log: NcclLog) -> Iterator[Finding]:
    """Finds processes that differ in version, driver, network, interface or environment."""
    ready = {id(m.process) for c in log.communicators for m in c.members.values() if m.finished and m.started}
    ranks = _ranks_by_process(log)
    yield from _find_versions(log, ranks)
    for code, name, advice in (
        ("driver", "CUDA drivers", "the same driver on every host"),
        ("network", "networks", "ranks that use different networks cannot talk; make NCCL_NET and plugins equal"),
    ):
        facts = {id(p): fact for p in log.processes if (fact := getattr(p, code)) is not None}
        yield from _differing(code, name, advice, facts, ranks)
    complete = [each for each in log.processes if id(each) in ready and each.bootstrap is not None]
    for name in sorted({name for process in complete for name in process.settings} - set(_OF_ONE_RANK)):
        have = {id(p): p.settings[name] for p in complete if name in p.settings}
        absent = [p for p in complete if name not in p.settings]
        if len({fact.value for fact in have.values()}) > 1:
            yield from _differing("settings", f"values of {name}", f"set {name} alike on all hosts", have, ranks)
        elif absent and name in _READ_BY_ALL:
            first = next(iter(have.values()))
            without = _named([id(process) for process in absent], ranks)
            yield Finding(
                code="different_settings",
                severity="differs",
                what=f"{name}={first.value} is set on {_named(have, ranks)}, not on {without}",
                why="the environment differs between hosts or ranks: NCCL chooses other paths there, or hangs",
                advice=f"set {name} on all ranks or on none (torchrun and mpirun pass only what they are told to)",
                evidence=lines(first),
            )


def _find_versions(log: NcclLog, ranks: Mapping[int, str]) -> Iterator[Finding]:
    facts = {id(p): p.version for p in log.processes if p.version is not None}
    named = {fact.value.partition("+")[0]: fact for fact in (*facts.values(), *log.versions.values())}
    if len(named) > 1:
        yield Finding(
            code="different_version",
            severity="error",
            what=f"the log has several versions of NCCL: {', '.join(sorted(named))}",
            why="ranks of one job need the same; LD_LIBRARY_PATH or LD_PRELOAD brings another one on some hosts",
            advice="python -c 'import torch; print(torch.cuda.nccl.version())' on every host; one image for all",
            evidence=lines(*named.values()),
        )


def _differing(
    code: str, name: str, advice: str, facts: Mapping[int, Fact], ranks: Mapping[int, str]
) -> Iterator[Finding]:
    by_value: dict[str, list[int]] = {}
    for process, fact in facts.items():
        by_value.setdefault(fact.value, []).append(process)
    if len(by_value) > 1:
        shown = "; ".join(f"{value} on {_named(each, ranks)}" for value, each in by_value.items())
        yield Finding(
            code=f"different_{code}",
            severity="differs",
            what=f"ranks have different {name}: {shown}",
            why="hosts are set up differently, or the launcher passes the environment to some only",
            advice=advice,
            evidence=lines(*[facts[each[0]].line for each in by_value.values()][:4]),
        )


def _ranks_by_process(log: NcclLog) -> dict[int, str]:
    """Returns how to call each process: by the ranks that it has in the largest communicator."""
    names: dict[int, str] = {}
    for communicator in sorted(log.communicators, key=lambda each: len(each.members)):
        by_process: dict[int, list[int]] = {}
        for rank, member in communicator.members.items():
            by_process.setdefault(id(member.process), []).append(rank)
        names.update({process: ranks_text(ranks) for process, ranks in by_process.items()})
    for process in log.processes:
        names.setdefault(id(process), _shown(process))
    return names


def _shown(process: Process) -> str:
    return f"{process.host}:{process.pid}" if process.host else "a process"


def _named(processes: Iterable[int], ranks: Mapping[int, str]) -> str:
    names = list(dict.fromkeys(ranks[each] for each in processes))
    numbers = [name.split()[1] for name in names if name.startswith("rank ")]
    if len(numbers) == len(names):
        return ranks_text(map(int, numbers))
    return list_some(names)
