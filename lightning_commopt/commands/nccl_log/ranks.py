"""Findings about the ranks of a communicator: which are missing, hang, or are unlike the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lightning_commopt.commands.nccl_log.facts import Communicator, Member
from lightning_commopt.commands.nccl_log.finding import lines
from lightning_commopt.text.findings import Finding
from lightning_commopt.text.formatting import ranks_text

_STAGES = (
    "in bootstrap, where ranks find each other: one is missing, or cannot be reached",
    "while rings and trees were computed",
    "before the first connection",
    "while channels were connected: a peer does not answer",
    "behind its rings, while trees were connected",
    "behind its trees",
)
_LONG_INIT_S = 10.0


def find_rank_problems(communicator: Communicator) -> Iterator[Finding]:
    """Finds ranks that are missing, that hang while they are initialized, and that are unlike the others."""
    yield from _find_missing(communicator)
    yield from _find_unfinished(communicator)
    yield from _find_aborted(communicator)
    yield from _find_slow_init(communicator)
    yield from _find_different_calls(communicator)
    yield from _find_differences(communicator)


def _find_missing(communicator: Communicator) -> Iterator[Finding]:
    missing, present = communicator.missing, list(communicator.members)
    if not missing:
        return
    first = next(m for m in communicator.members.values() if m.num_ranks is not None)
    waiting = not any(member.finished for member in communicator.members.values())
    yield Finding(
        code="missing_ranks",
        severity="error" if waiting else "note",
        what=f"{ranks_text(missing)} of {communicator.num_ranks} wrote nothing; {ranks_text(present)} did",
        why="the others still wait in initialization: these ranks never came, or cannot reach rank 0"
        if waiting
        else "communication was set up, so these ranks ran: their logs are not among the files",
        advice="look at these ranks' logs; check MASTER_ADDR, the number of processes, and firewalls between hosts"
        if waiting
        else "name the logs of all ranks; NCCL_DEBUG=INFO must be set on every host",
        evidence=lines(first.started or first.last),
    )


def _find_unfinished(communicator: Communicator) -> Iterator[Finding]:
    """Finds ranks without ``Init COMPLETE``; a log that begins behind the start of a rank says nothing about it."""
    hanging = {rank: m for rank, m in communicator.members.items() if _began(m) and not (m.finished or m.ended)}
    if not hanging:
        return
    finished = [rank for rank, member in communicator.members.items() if member.finished]
    stages = {rank: _stage(member) for rank, member in hanging.items()}
    first = min(stages.values())
    behind = [rank for rank, stage in stages.items() if stage == first]
    who = "they all" if len(behind) == len(hanging) else f"{ranks_text(behind)}, the furthest behind,"
    others = f"; {ranks_text(finished)} did" if finished else ""
    shown = [hanging[rank] for rank in [*behind, *(rank for rank in hanging if rank not in behind)][:2]]
    yield Finding(
        code="unfinished_init",
        severity="error",
        what=f"{ranks_text(hanging)} did not finish initialization{others}",
        why=f"{who} stopped {_STAGES[first]}, or the log ends there",
        advice=f"read the last lines of {ranks_text(behind)} and all warnings; py-spy dump --pid PID if it still runs",
        evidence=lines(*[member.last for member in shown]),
    )


def _began(member: Member) -> bool:
    """Returns whether the beginning is in the log; before NCCL 2.18 no line says that initialization starts."""
    return member.started is not None or (member.process.bootstrap is not None and bool(member.trees or member.rings))


def _stage(member: Member) -> int:
    """Returns the place in ``_STAGES``."""
    if "trees" in member.notes:
        return 5
    if "rings" in member.notes:
        return 4
    if member.connections:
        return 3
    if member.trees or member.rings:
        return 2
    return 1 if member.num_nodes is not None else 0


def _find_aborted(communicator: Communicator) -> Iterator[Finding]:
    aborted = {r: m for r, m in communicator.members.items() if m.ended is not None and "Abort" in m.ended.text}
    if aborted:
        first = next(iter(aborted.values()))
        yield Finding(
            code="aborted",
            severity="error",
            what=f"{ranks_text(aborted)} aborted the communicator",
            why="PyTorch aborts after a timeout or an error, of this rank or of another one",
            advice="the first warning or watchdog line in time tells more than this one",
            evidence=lines(first.ended),
        )


def _find_slow_init(communicator: Communicator) -> Iterator[Finding]:
    timed = {
        rank: member for rank, member in communicator.members.items() if member.init_s.get("total", 0) > _LONG_INIT_S
    }
    if not timed:
        return
    rank, slowest = max(timed.items(), key=lambda item: item[1].init_s["total"])
    parts = {name: value for name, value in slowest.init_s.items() if name != "total"}
    part = max(parts, key=lambda name: parts[name]) if parts else ""
    whys = {
        "bootstrap": "it waited in bootstrap for ranks that came later: slow imports, data or file systems there",
        "kernels": "it loaded kernels: CUDA modules are loaded lazily, from a slow disk perhaps",
        "connections": "it connected channels: a slow network, or many ranks",
    }
    spent = f", of which {part} {parts[part]:g} s" if part else ""
    yield Finding(
        code="slow_init",
        severity="note",
        what=f"initialization took rank {rank} {slowest.init_s['total']:g} s{spent}",
        why=whys.get(part, "the line of the log has all parts"),
        advice="start ranks at the same time; one communicator is cheaper than several",
        evidence=lines(slowest.init_line),
    )


def _find_different_calls(communicator: Communicator) -> Iterator[Finding]:
    """Finds the first collective that ranks do not call alike, and ranks that called fewer."""
    called = {rank: member.calls for rank, member in communicator.members.items() if member.calls}
    if len(called) < 2:
        return
    for count in sorted(set.intersection(*map(set, called.values()))):
        if any(count == min(calls) and not communicator.members[rank].started for rank, calls in called.items()):
            continue  # the log may begin in the middle of the calls that have this number
        for calls in zip(*(called[rank][count] for rank in called), strict=False):
            by_call: dict[str, list[int]] = {}
            for rank, call in zip(called, calls, strict=True):
                by_call.setdefault(call.value, []).append(rank)
            if len(by_call) > 1:
                shown = "; ".join(f"{ranks_text(ranks)}: {call}" for call, ranks in by_call.items())
                yield Finding(
                    code="different_collectives",
                    severity="error",
                    what=f"ranks call different collectives as number {count}: {shown}",
                    why="a collective needs the same call, size and order on every rank: this one hangs",
                    advice="look for code that depends on the rank: logging, conditions, batches of unequal number",
                    evidence=lines(*list({call.value: call for call in calls}.values())[:4]),
                )
                return
    last = {rank: max(calls) for rank, calls in called.items()}
    behind = {rank: count for rank, count in last.items() if count < max(last.values())}
    if behind:
        rank, count = min(behind.items(), key=lambda item: item[1])
        yield Finding(
            code="behind",
            severity="note",
            what=f"{ranks_text(behind)} called fewer collectives: {count} of {max(last.values())} on rank {rank}",
            why="the others wait for it, or the log of this rank ends earlier",
            advice=f"py-spy dump --pid PID of rank {rank}, if it still runs",
            evidence=lines(called[rank][count][-1]),
        )


def _find_differences(communicator: Communicator) -> Iterator[Finding]:
    """Finds numbers that must be equal on all ranks of a communicator."""
    ready = {rank: member for rank, member in communicator.members.items() if member.finished}
    for name, key, values in (
        ("channels", "channels", {rank: m.channels["coll"] for rank, m in ready.items() if "coll" in m.channels}),
        ("nodes", "nodes", {rank: m.num_nodes for rank, m in ready.items() if m.num_nodes is not None}),
    ):
        if len(set(values.values())) > 1:
            yield Finding(
                code=f"different_{key}",
                severity="differs",
                what=f"ranks have different numbers of {name}: {_by_value(values)}",
                why="their settings or what they see of the hardware differ; the smallest number counts for all",
                advice="compare NCCL_MIN_NCHANNELS, NCCL_MAX_NCHANNELS, NCCL_HOSTID and the GPUs of the hosts",
                evidence=lines(*[ready[rank].last for rank in list(values)[:2]]),
            )
    local = {rank: m.num_local_ranks for rank, m in ready.items() if m.num_local_ranks is not None}
    if len(set(local.values())) > 1:
        yield Finding(
            code="unequal_nodes",
            severity="note",
            what=f"hosts have different numbers of ranks: {_by_value(local)}",
            why="channels and NICs are chosen for the host that has the fewest",
            advice="start as many ranks on each host",
            evidence=(),
        )


def _by_value(values: Mapping[int, object]) -> str:
    ranks: dict[object, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return "; ".join(f"{value} on {ranks_text(each)}" for value, each in ranks.items())
