"""Findings about the ranks of a communicator: which are missing, hang, or are unlike the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lightning_commopt.commands.nccl_log.facts import STAGES, Communicator, Member
from lightning_commopt.commands.nccl_log.finding import Reason, finding
from lightning_commopt.text.findings import Finding, Line, Severity
from lightning_commopt.text.formatting import ranks_text

_LONG_INIT_S = 10.0


def find_rank_problems(communicator: Communicator) -> Iterator[Finding]:
    """Finds ranks that are missing, that are not initialized at the end of the log, and that are unlike the others."""
    if communicator.count > 1:
        return  # whose lines these are is not known
    yield from _find_missing(communicator)
    yield from _find_unfinished(communicator)
    yield from _find_aborted(communicator)
    yield from _find_slow_init(communicator)
    yield from _find_different_calls(communicator)
    yield from _find_differences(communicator)


def _find_missing(communicator: Communicator) -> Iterator[Finding]:
    missing, present = communicator.missing, list(communicator.members)
    if missing and present:
        first = next(m for m in communicator.members.values() if m.num_ranks is not None)
        what = f"the log has {ranks_text(present)} of {communicator.num_ranks}, and no line of {ranks_text(missing)}"
        why = "their logs are not among the files, or the log is cut; whether these ranks ran is unknown"
        advice = "name the logs of all ranks; NCCL_DEBUG=INFO must be set on every host"
        yield finding("note", "missing_ranks", what, Reason(why, advice), first.started or first.last)


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
    who = f"{ranks_text(behind)} {'is' if len(behind) == 1 else 'are'}"
    others = f"; {ranks_text(finished)} finished" if finished else ""
    shown = [open_ones[rank] for rank in [*behind, *(rank for rank in open_ones if rank not in behind)][:2]]
    advice = f"read the last lines of {ranks_text(behind)} and all warnings; py-spy dump --pid PID if it still runs"
    what = f"the log of {ranks_text(open_ones)} ends before initialization was complete{others}"
    why = f"{who} {'the furthest behind, ' if ahead else ''}at {STAGES[first]}; it waits there, or the log is cut"
    severity: Severity = "error" if ahead and not communicator.missing else "note"
    yield finding(severity, "unfinished_init", what, Reason(why, advice), *[member.last for member in shown])


def _find_aborted(communicator: Communicator) -> Iterator[Finding]:
    aborted = {r: m for r, m in communicator.members.items() if m.ended is not None and "Abort" in m.ended.text}
    if aborted:
        first = next(iter(aborted.values()))
        what = f"{ranks_text(aborted)} aborted the communicator"
        why = "PyTorch aborts at the end of a run (destroy_process_group), and after a timeout or an error of any rank"
        advice = "nothing at the end of a run; else see the first warning or watchdog line in time"
        yield finding("note", "aborted", what, Reason(why, advice), first.ended)


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
    what = f"initialization took rank {rank} {slowest.init_s['total']:g} s{spent}"
    why = whys.get(part, "the line of the log has all parts")
    advice = "start ranks at the same time; one communicator is cheaper than several"
    yield finding("note", "slow_init", what, Reason(why, advice), slowest.init_line)


def _find_different_calls(communicator: Communicator) -> Iterator[Finding]:
    """Finds the first collective that ranks do not call alike, and ranks that called fewer."""
    called = {rank: member for rank, member in communicator.members.items() if member.calls}
    if len(called) < 2:
        return
    first, *others = called.values()
    place = min(filter(None, (_first_difference(first, other) for other in others)), default=None)
    if place is not None:
        by_call: dict[str, list[int]] = {}
        found: dict[str, Line] = {}
        for rank, member in called.items():
            calls = member.calls.by_counter().get(place[0], [])
            if len(calls) > place[1]:
                text, number = calls[place[1]]
                by_call.setdefault(text, []).append(rank)
                found.setdefault(text, member.calls.line(text, number))
        shown = "; ".join(f"{ranks_text(ranks)}: {call}" for call, ranks in by_call.items())
        what = f"ranks call different collectives as number {place[0]}: {shown}"
        why = "a collective needs the same call, size and order on every rank: this one hangs"
        advice = "look for code that depends on the rank: logging, conditions, batches of unequal number"
        yield finding("error", "different_collectives", what, Reason(why, advice), *list(found.values())[:4])
        return
    last = {rank: member.calls.last for rank, member in called.items()}
    behind = {rank: count for rank, count in last.items() if count < max(last.values())}
    if behind:
        rank, count = min(behind.items(), key=lambda item: item[1])
        what = f"{ranks_text(behind)} called fewer collectives: {count} of {max(last.values())} on rank {rank}"
        why = "the others wait for it, or the log of this rank ends earlier"
        advice = f"py-spy dump --pid PID of rank {rank}, if it still runs"
        line = called[rank].calls.line(*called[rank].calls.by_counter()[count][-1])
        yield finding("note", "behind", what, Reason(why, advice), line)


def _first_difference(one: Member, other: Member) -> tuple[int, int] | None:
    """Returns the number of the first call that two members do not have alike, and its place among calls of it."""
    calls, others_calls = one.calls.by_counter(), other.calls.by_counter()
    # A log that was cut may begin in the middle of the calls that have one number.
    cut = {min(calls)} if not one.started else set()
    cut |= {min(others_calls)} if not other.started else set()
    for count in sorted((calls.keys() & others_calls.keys()) - cut):
        pairs = zip(calls[count], others_calls[count], strict=False)
        for index, ((call, _), (others_call, _)) in enumerate(pairs):
            if call != others_call:
                return count, index
    return None


def _find_differences(communicator: Communicator) -> Iterator[Finding]:
    """Finds numbers that must be equal on all ranks of a communicator."""
    ready = {rank: member for rank, member in communicator.members.items() if member.finished}
    for name, key, values in (
        ("channels", "channels", {rank: m.channels["coll"] for rank, m in ready.items() if "coll" in m.channels}),
        ("nodes", "nodes", {rank: m.num_nodes for rank, m in ready.items() if m.num_nodes is not None}),
    ):
        if len(set(values.values())) > 1:
            what = f"ranks have different numbers of {name}: {_by_value(values)}"
            why = "their settings or what they see of the hardware differ; the smallest number counts for all"
            advice = "compare NCCL_MIN_NCHANNELS, NCCL_MAX_NCHANNELS, NCCL_HOSTID and the GPUs of the hosts"
            last = [ready[rank].last for rank in list(values)[:2]]
            yield finding("differs", f"different_{key}", what, Reason(why, advice), *last)


def _by_value(values: Mapping[int, object]) -> str:
    ranks: dict[object, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return "; ".join(f"{value} on {ranks_text(each)}" for value, each in ranks.items())
