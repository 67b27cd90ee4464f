"""Findings about what NCCL and PyTorch themselves complain of: warnings, and collectives that timed out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple, cast

from lightning_commopt.commands.nccl_log.events import LoggedWarning, Progress, Timeout
from lightning_commopt.commands.nccl_log.facts import NcclLog
from lightning_commopt.commands.nccl_log.finding import Reason, finding, lines, ranks_of
from lightning_commopt.text.findings import Finding, Severity
from lightning_commopt.text.formatting import list_some, ranks_text

_RESULTS = {
    "1": "an error of CUDA",
    "2": "an error of the system",
    "3": "an internal error",
    "4": "an invalid argument",
    "5": "an invalid usage",
    "6": "a remote error",
}
_LATE = 1.5  # times the limit: the watchdog looks every few seconds, so more is no waiting of a collective


class WarnText(NamedTuple):
    """A kind of warning."""

    code: str
    place: re.Pattern[str]  # of NCCL's file and line
    pattern: re.Pattern[str]  # of the text
    why: str
    advice: str
    severity: Severity
    follows: bool  # whether it is only the consequence of another warning, where there is one


@cache
def _table() -> list[WarnText]:
    found = []
    text = Path(__file__).with_name("warn_texts.txt").read_text()
    for block in re.split(r"^\[", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE), flags=re.MULTILINE)[1:]:
        code, _, rest = block.partition("]\n")
        values = dict(line.split(": ", 1) for line in rest.splitlines() if line)
        place, pattern = re.compile(values.get("in", "")), re.compile(values["text"], re.IGNORECASE)
        kinds = values.get("as", "error").split(", ")
        severity = cast(Severity, "error" if kinds[0] == "follows" else kinds[0])
        found.append(WarnText(code, place, pattern, values["why"], values["try"], severity, "follows" in kinds))
    return found


def explain(text: str, place: str) -> WarnText | None:
    """Returns the first entry of the table that matches a warning; None for an unknown one.

    >>> explain("Cuda failure 217 'peer access is not supported'", "transport/shm.cc:590").code
    'shared_memory_refused'
    >>> explain("The moon is in the wrong place", "") is None
    True
    """
    return next((each for each in _table() if each.place.search(place) and each.pattern.search(text)), None)


def find_warnings(log: NcclLog) -> Iterator[Finding]:
    """Finds warnings of NCCL, each kind once, with what it means; unknown ones are repeated as they are.

    What only follows from another warning is a note, where there is that other one.
    """
    groups: dict[str, list[LoggedWarning]] = {}
    known: dict[str, WarnText] = {}
    for warning in log.warnings:
        entry = explain(warning.text, warning.place)
        key = f"unknown: {re.sub(r'[0-9a-fx]{3,}|[0-9]+', '#', warning.text)[:80]}" if entry is None else entry.code
        groups.setdefault(key, []).append(warning)
        if entry is not None:
            known[key] = entry
    has_cause = any(key not in known or (known[key].severity == "error" and not known[key].follows) for key in groups)
    for key, warnings in groups.items():
        entry = known.get(key)
        text = max((each.text for each in warnings), key=len)[:200] or "without text"
        what = f"{_who(warnings)}: {text}" + (f" ({len(warnings)} times)" if len(warnings) > 1 else "")
        if entry is None:
            reason = Reason("unknown: this warning has no explanation here", "search NCCL's issues for its text")
            yield finding("warning", "warning", what, reason, *warnings[:3])
        elif entry.follows and has_cause:
            yield finding("note", entry.code, what, Reason(entry.why, "begin with the other errors"), *warnings[:3])
        else:
            yield finding(entry.severity, entry.code, what, Reason(entry.why, entry.advice), *warnings[:3])
    yield from _find_silent_errors(log)


def _who(warnings: list[LoggedWarning]) -> str:
    ranks = [each.rank for each in warnings if each.rank is not None]
    hosts = sorted({each.host for each in warnings if each.host})
    where = f" on {', '.join(hosts[:4])}" if hosts else ""
    return f"{ranks_text(ranks)} warn{'s' if len(set(ranks)) == 1 else ''}{where}" if ranks else f"a warning{where}"


def _find_silent_errors(log: NcclLog) -> Iterator[Finding]:
    """Finds errors that NCCL hands on where no warning says why."""
    failed = {id(process): process.failed_at for process in log.processes if process.failed_at is not None}
    members = [member for communicator in log.communicators for member in communicator.all_members]
    if failed and not log.warnings:
        first = next(iter(failed.values()))
        place, _, code = first.value.partition(" -> ")
        what = (
            f"{ranks_of(m for m in members if id(m.process) in failed)} failed at {place} with"
            f" {_RESULTS.get(code, 'an error')}"
        )
        why = "the log has no warning that says why: the line was filtered out, or NCCL has none there"
        advice = "NCCL_DEBUG=INFO with NCCL_DEBUG_SUBSYS=ALL; search NCCL's issues for the file and line"
        if "socket" in place:
            why = "a connection to another rank failed: a firewall, the wrong interface, or a process that has ended"
            advice = "NCCL_SOCKET_IFNAME to the interface that hosts share; open TCP ports between them"
        yield finding("error", "silent_error", what, Reason(why, advice), first)


def find_timeouts(log: NcclLog) -> Iterator[Finding]:
    """Finds collectives that timed out, the rank that is behind, and calls that do not match."""
    groups: dict[str, list[Timeout]] = {}
    for timeout in _with_groups(log):
        groups.setdefault(timeout.group, []).append(timeout)
    for group, timeouts in groups.items():
        yield _timeout(group, timeouts, log)


def _with_groups(log: NcclLog) -> list[Timeout]:
    """Returns each timeout once, with the process group that another line of its rank names."""
    named = {(each.rank, each.sequence): each.group for each in log.timeouts.values() if each.group}
    named |= {(each.rank, each.work): each.group for each in log.progress.values() if each.work is not None}
    alike: dict[tuple[object, ...], set[str]] = {}
    for each in log.timeouts.values():
        if group := named.get((each.rank, each.sequence)):
            alike.setdefault((each.sequence, each.operation, each.sizes), set()).add(group)
    found: dict[tuple[object, ...], Timeout] = {}
    for each in log.timeouts.values():
        others = alike.get((each.sequence, each.operation, each.sizes), set())
        group = named.get((each.rank, each.sequence)) or (next(iter(others)) if len(others) == 1 else "")
        found.setdefault((each.rank, group, each.sequence, each.operation), replace(each, group=group))
    return list(found.values())


def _timeout(group: str, timeouts: list[Timeout], log: NcclLog) -> Finding:
    calls: dict[str, list[int]] = {}
    for each in timeouts:
        number = "" if each.sequence is None else f" {each.sequence}"
        calls.setdefault(f"{each.operation}{number}{f' ({each.sizes})' if each.sizes else ''}", []).append(each.rank)
    reason = _asleep(timeouts) or _behind(group, log) or _reason(group, timeouts, len(calls), log)
    shown = list_some([f"{ranks_text(each)} in {call}" for call, each in calls.items()], 8).replace(", rank", "; rank")
    waited = max((each.waited_s for each in timeouts if each.waited_s is not None), default=None)
    after, where = f" after {waited:.0f} s" if waited else "", f" in {group}" if group else ""
    what = f"a collective timed out{after}{where}: {shown}"
    return finding("error", "collective_timeout", what, reason, *timeouts[:2])


def _asleep(timeouts: list[Timeout]) -> Reason | None:
    """Returns the reason, where the watchdog itself did not run for long."""
    for each in timeouts:
        if each.waited_s and each.limit_s and each.waited_s > _LATE * each.limit_s + 60:
            why = f"rank {each.rank} waited {each.waited_s:.0f} s under a limit of {each.limit_s:.0f} s: the process or"
            why += " its machine was suspended, or the clock jumped"
            if len({other.sequence for other in timeouts}) > 1 and not each.group:
                why += "; the numbers may be of different process groups, so they are not compared"
            advice = "look for a suspended job (scheduler, VM, debugger) and a blocked process; py-spy dump --pid PID"
            return Reason(why, advice, lines(each.line))
    return None


def _behind(group: str, log: NcclLog) -> Reason | None:
    """Returns the reason, where ranks say that they started fewer collectives of this group than others."""
    groups: dict[str, dict[int, Progress]] = {}
    for each in log.progress.values():
        if each.group == group or not (group and each.group):
            groups.setdefault(each.group, {})[each.rank] = each
    for name, said in groups.items():
        most = max(each.enqueued for each in said.values())
        behind = sorted(rank for rank, each in said.items() if each.enqueued < most)
        if behind and (name or len(groups) == 1):
            who, last = ranks_text(behind), said[behind[0]]
            why = f"{who} had not started it: the last collective there is number {last.enqueued}, {most} elsewhere"
            advice = f"see what {who} did instead: data, validation, checkpoint, an exception, or another branch"
            return Reason(why, advice, lines(last.line))
    return None


def _reason(group: str, timeouts: list[Timeout], num_calls: int, log: NcclLog) -> Reason:
    ranks = {each.rank for each in timeouts}
    sequences = {each.sequence for each in timeouts}
    if len(sequences) > 1:
        if not group or len(timeouts) > len(ranks):
            why = "the numbers may be of different process groups, which these lines do not name: they are not compared"
            advice = "TORCH_NCCL_TRACE_BUFFER_SIZE=2000 (flight recorder) names the group and what each rank called"
            return Reason(why, advice)
        late = min(timeouts, key=lambda each: (each.sequence is None, each.sequence or 0))
        why = f"ranks wait in different collectives; rank {late.rank} is the furthest behind"
        return Reason(why, "look for a collective that one rank skips or calls twice", lines(late.line))
    if num_calls > 1:
        why = "ranks call the same number with different operations or sizes"
        return Reason(why, "look for code that depends on the rank: logging, conditions, batches of unequal number")
    return _silent_reason(group, ranks, log)


def _silent_reason(group: str, ranks: set[int], log: NcclLog) -> Reason:
    """Returns the reason, where all that timed out wait in one collective; the log may not have all ranks."""
    world_size = max((each.num_ranks or 0 for each in log.communicators), default=0)
    seen = {rank for each in log.communicators for rank in each.members} | {each.rank for each in log.progress.values()}
    silent = sorted(set(range(world_size or max(ranks) + 1)) - ranks)
    if len(silent) >= len(ranks) and log.warnings:
        why = "NCCL itself warned, and what it says is likelier the cause than this timeout"
        return Reason(why, "begin with the warnings")
    unknown = "" if world_size else "; whether there are other ranks, the log does not say"
    if silent and (len(silent) < len(ranks) or (world_size and seen.issuperset(silent))):  # few lines prove little
        outside = "are not in this group, " if group and not re.match(r"PG (?:ID )?0\b|.*default", group) else ""
        why = f"{ranks_text(silent)} did not time out: they {outside}never came to this collective, had ended, or wrote"
        advice = f"see what {ranks_text(silent)} did instead; py-spy dump --pid PID if they still run"
        return Reason(f"{why} no log{unknown}", advice)
    if world_size and not silent:
        why = "all ranks wait in the same collective: the network or a GPU stopped"
        return Reason(why, "dmesg for Xid and link errors; ibstat; run nccl-tests' all_reduce_perf on these hosts")
    unknown = unknown or "; what the others do, the log does not say"
    why = f"all ranks of this log ({ranks_text(ranks)}) wait in the same collective{unknown}: either one of those never"
    why += " came, or the network or a GPU stopped"
    return Reason(why, "look for a rank without this line; dmesg for Xid and link errors; ibstat")
