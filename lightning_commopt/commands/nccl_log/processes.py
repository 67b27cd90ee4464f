"""Findings about processes: other versions, drivers, networks or settings than the rest of the job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from lightning_commopt.commands.nccl_log.facts import Fact, NcclLog, Process
from lightning_commopt.commands.nccl_log.finding import Reason, finding, processes_of
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
            why = "the environment differs between hosts or ranks: NCCL chooses other paths there, or hangs"
            advice = f"set {name} on all ranks or on none (torchrun and mpirun pass only what they are told to)"
            yield finding("differs", "different_settings", what, Reason(why, advice), first)


def _find_versions(log: NcclLog, ranks: Mapping[int, str]) -> Iterator[Finding]:
    """Finds versions that differ: an error in one communicator, else there may be several jobs."""
    for communicator in log.communicators:
        facts = {id(p): p.version for p in processes_of(communicator) if p.version is not None}
        named = {fact.value.partition("+")[0]: fact for fact in facts.values()}
        if len(named) > 1 and communicator.count == 1:
            what = f"ranks have several versions of NCCL: {', '.join(sorted(named))}"
            why = "ranks of one job need the same; LD_LIBRARY_PATH or LD_PRELOAD brings another one on some hosts"
            advice = "python -c 'import torch; print(torch.cuda.nccl.version())' on every host; one image for all"
            yield finding("error", "different_version", what, Reason(why, advice), *named.values())
            return
    facts_of_all = [*(p.version for p in log.processes if p.version is not None), *log.versions.values()]
    named = {fact.value.partition("+")[0]: fact for fact in facts_of_all}
    if len(named) > 1:
        what = f"the log has several versions of NCCL: {', '.join(sorted(named))}"
        why = "it has several jobs, or one whose ranks load different libraries: no communicator has both"
        advice = "if it is one job: python -c 'import torch; print(torch.cuda.nccl.version())' on every host"
        yield finding("note", "several_versions", what, Reason(why, advice), *named.values())


def _differing(
    code: str, name: str, advice: str, facts: Mapping[int, Fact], ranks: Mapping[int, str]
) -> Iterator[Finding]:
    by_value: dict[str, list[int]] = {}
    for process, fact in facts.items():
        by_value.setdefault(fact.value, []).append(process)
    if len(by_value) > 1:
        shown = "; ".join(f"{value} on {_named(each, ranks)}" for value, each in by_value.items())
        what = f"ranks have different {name}: {shown}"
        why = "hosts are set up differently, or the launcher passes the environment to some only"
        firsts = [facts[each[0]] for each in by_value.values()][:4]
        yield finding("differs", f"different_{code}", what, Reason(why, advice), *firsts)


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
