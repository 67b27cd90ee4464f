"""Findings about what NCCL itself complains of."""

from __future__ import annotations

import re
from collections.abc import Iterator

from lightning_commopt.commands.nccl_log.events import LoggedWarning
from lightning_commopt.commands.nccl_log.finding import Reason, finding, ranks_of
from lightning_commopt.commands.nccl_log.job import NcclLog
from lightning_commopt.commands.nccl_log.warn_texts import WarnText, explain
from lightning_commopt.text.findings import Finding
from lightning_commopt.text.formatting import ranks_text


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
    has_cause = any(entry.severity == "error" and not entry.follows for entry in known.values())
    for key, warnings in groups.items():
        entry = known.get(key)
        text = max((each.text for each in warnings), key=len)[:200] or "without text"
        what = f"{_who(warnings)}: {text}" + (f" ({len(warnings)} times)" if len(warnings) > 1 else "")
        if entry is None:
            reason = Reason("unknown: this warning has no explanation here", "search NCCL's issues for its text")
            yield finding("error", "warning", what, reason, *warnings[:3])
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


_RESULTS = {
    "1": "an error of CUDA",
    "2": "an error of the system",
    "3": "an internal error",
    "4": "an invalid argument",
    "5": "an invalid usage",
    "6": "a remote error",
}


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
        yield finding("error", "silent_error", what, Reason(why, advice), first)
