"""Findings about what NCCL, its RAS and PyTorch themselves complain of: warnings, and collectives that timed out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from commopt_diagnose.findings import Reason
from commopt_diagnose.nccl_log.communicators import NcclLog, ranks_of
from commopt_diagnose.nccl_log.complaints import LoggedWarning, Progress, RasReport, Timeout
from commopt_diagnose.nccl_log.messages import MAX_RANKS
from commopt_diagnose.nccl_log.paths import finding, first_of, reason
from commopt_diagnose.nccl_log.warn_texts import WarnText, explain
from lightning_commopt.text.findings import Finding, Severity
from lightning_commopt.text.formatting import grouped, list_some, ranks_text

# The results of NCCL's functions, each at the index of its number.
_RESULTS = (
    *("success", "an error of CUDA", "an error of the system", "an internal error", "an invalid argument"),
    *("an invalid usage", "a remote error"),
)
# The watchdog looks every few seconds. If it noticed a timeout later than this multiple of the limit, and a minute, it
# did not run itself.
_LATE = 1.5
# Ranks of a healthy job wait longer for each other now and then: for a slow batch, a compilation, a checkpoint.
_SHORT_LIMIT_S = 5.0
# What PyTorch and torchrun write after a timeout, which is another finding.
_OF_TIMEOUTS = ("local_timeout", "dump_signal", "empty_gather", "launcher_ended")
# The names of NCCL's results, which say less than any warning.
_OF_RESULTS = ("torch_error", "torch_remote_error", "refused_call", "after_error")


def find_warnings(log: NcclLog) -> Iterator[Finding]:
    """Finds warnings of NCCL, each kind once, with what it means; unknown ones are repeated as they are.

    What only follows from another warning becomes a note if there is another one.
    """
    # Numbers and addresses, which differ between warnings that are otherwise the same.
    unknown = re.compile(r"[0-9a-fx]{3,}|[0-9]+")
    # PyTorch repeats NCCL's last warning without its place, which may tell more than the text.
    places = {warning.text: warning.place for warning in reversed(log.warnings) if ":" in warning.place}
    kinds = ((explain(w.text, w.place if ":" in w.place else places.get(w.text, w.place)), w) for w in log.warnings)
    groups = grouped((kind or unknown.sub("#", warning.text)[:80], warning) for kind, warning in kinds)
    if _goes_on_without_nvls(log, groups):
        groups = {_as_refused(kind): warnings for kind, warnings in groups.items()}
    has_cause = any(isinstance(kind, str) or kind.severity == "error" for kind in groups)
    first = None if has_cause else _first_of_consequences(groups)
    broken = first_of(log.processes, "plugin_broken")
    for kind, warnings in groups.items():
        times = sum(warning.times for warning in warnings)
        # The first text of NCCL itself, unless it is cut and a later one is whole.
        begin = next((warning for warning in warnings if warning.place), warnings[0]).text
        whole = (warning.text for warning in warnings if warning.text.startswith(begin))
        text = max(whole, key=len)[:200] or "without text"
        what = f"{_warners_text(warnings)}: {text}" + (f" ({times} times)" if times > 1 else "")
        if isinstance(kind, str):
            yield finding("warning", "warning", *warnings[:3], what=what, why=reason("no_explanation"))
        elif (kind.severity == "follows" and kind is not first) or (kind.code in _OF_TIMEOUTS and log.timeouts):
            why = kind.reason._replace(advice="begin with the other errors")
            yield finding("note", kind.code, *warnings[:3], what=what, why=why)
        else:
            severity: Severity = "error" if kind.severity == "follows" else kind.severity
            why = reason("plugin_broken", broken) if broken and kind.code == "network_not_found" else kind.reason
            yield finding(severity, kind.code, *warnings[:3], what=what, why=why)
    yield from _find_silent_errors(log)


def _as_refused(kind: WarnText | str) -> WarnText | str:
    """Returns a kind as it is where NCCL goes on without NVLS."""
    if isinstance(kind, str) or kind.code != "nvls":
        return kind
    return kind._replace(severity="warning", reason=reason("nvls_refused"))


def _goes_on_without_nvls(log: NcclLog, groups: Mapping[WarnText | str, Sequence[LoggedWarning]]) -> bool:
    """Returns whether NVLS failed and nothing else did after it, which is so where it refuses the program's buffers."""
    codes = {kind.code for kind in groups if isinstance(kind, WarnText)}
    has_failed = log.timeouts or any(process.failed_at for process in log.processes) or codes & set(_OF_RESULTS)
    is_raised = any(warning.place == "Last error" for warnings in groups.values() for warning in warnings)
    is_ready = any(member.finished for communicator in log.communicators for member in communicator.all_members)
    return not (has_failed or is_raised) and (is_ready or "buffer_registration" in codes)


def _first_of_consequences(kinds: Iterable[WarnText | str]) -> WarnText | None:
    """Returns the kind to begin with if all are consequences: the first that says more than torch's errors."""
    known = [kind for kind in kinds if isinstance(kind, WarnText) and kind.severity == "follows"]
    return min(known, key=lambda kind: kind.code in _OF_RESULTS, default=None)


def _warners_text(warnings: list[LoggedWarning]) -> str:
    ranks = {warning.rank for warning in warnings if warning.rank is not None}
    hosts = dict.fromkeys(warning.host for warning in warnings if warning.host)  # the first to warn is shown first
    where = f" on {list_some(hosts)}" if hosts else ""
    return f"{ranks_text(ranks)} warn{'s' if len(ranks) == 1 else ''}{where}" if ranks else f"a warning{where}"


def _find_silent_errors(log: NcclLog) -> Iterator[Finding]:
    """Finds errors that NCCL passes on without any warning that explains them."""
    failed = {process: process.failed_at for process in log.processes if process.failed_at is not None}
    if failed and not log.warnings:
        members = [member for communicator in log.communicators for member in communicator.all_members]
        first = next(iter(failed.values()))
        place, _, code = first.value.partition(" -> ")
        result = _RESULTS[int(code)] if 0 < int(code) < len(_RESULTS) else "an error"
        what = f"{ranks_of(m for m in members if m.process in failed)} failed at {place} with {result}"
        why = reason("silent_socket_error" if "socket" in place else "silent_error")
        yield finding("error", "silent_error", first, what=what, why=why)


def find_timeouts(log: NcclLog) -> Iterator[Finding]:
    """Finds collectives that timed out, with the rank that is behind, or calls that do not match."""
    for group, timeouts in grouped((timeout.group, timeout) for timeout in _with_groups(log)).items():
        yield _timeout(group, timeouts, log)
    failed = [last for last in log.progress.values() if last.work is not None]
    if failed and not log.timeouts and not any(map(_may_be_cause, log.warnings)):
        by_work = grouped(((last.work, last.group), last.rank) for last in failed)
        texts = [
            f"collective {work} of {ranks_text(ranks)}{f' in {group}' if group else ''}"
            for (work, group), ranks in by_work.items()
        ]
        yield finding("error", "failed_work", *failed[:2], works=list_some(texts, 8))


def _with_groups(log: NcclLog) -> list[Timeout]:
    """Returns each timeout once, with the process group that another line of its rank names."""
    group_of = {(timeout.rank, timeout.sequence): timeout.group for timeout in log.timeouts.values() if timeout.group}
    progress = [last for last in log.progress.values() if last.work is not None]
    group_of |= {(last.rank, last.work): last.group for last in progress}
    groups_of_call = grouped(
        (timeout.call, group_of.get((timeout.rank, timeout.sequence))) for timeout in log.timeouts.values()
    )
    once: dict[tuple[object, ...], Timeout] = {}
    by_place = {
        (timeout.rank_in_group, timeout.call) for timeout in log.timeouts.values() if timeout.rank_in_job is not None
    }
    for timeout in log.timeouts.values():
        if timeout.rank_in_job is None and (timeout.rank_in_group, timeout.call) in by_place:
            continue  # what the process prints as it ends, where the prefix is missing
        others = set(filter(None, groups_of_call[timeout.call]))
        group = group_of.get((timeout.rank, timeout.sequence)) or (others.pop() if len(others) == 1 else "")
        # Ranks that call something else under the number for which only one group is named are of that group, too.
        rivals = {known for (_, sequence), known in group_of.items() if sequence == timeout.sequence}
        group = group or (rivals.pop() if len(rivals) == 1 else "")
        once.setdefault((timeout.rank, group, timeout.sequence, timeout.operation), replace(timeout, group=group))
    return list(once.values())


def _timeout(group: str, timeouts: list[Timeout], log: NcclLog) -> Finding:
    calls = grouped((timeout.call, timeout.rank) for timeout in timeouts)
    why = _short_limit_reason(timeouts) or _suspension_reason(timeouts) or _late_ranks_reason(group, timeouts, log)
    why = why or _reason(group, timeouts, len(calls), log)
    texts = [f"{ranks_text(ranks)} in {call}" for call, ranks in calls.items()]
    shown = list_some(texts, 8).replace(", rank", "; rank")
    waited = max((timeout.waited_s for timeout in timeouts if timeout.waited_s is not None), default=None)
    after, of_group = (
        f" after {waited:.{0 if waited >= 1 else 3}f} s" if waited else "",
        f" in {group}" if group else "",
    )
    what = f"a collective timed out{after}{of_group}: {shown}"
    return finding("error", "collective_timeout", *timeouts[:2], what=what, why=why)


def _short_limit_reason(timeouts: list[Timeout]) -> Reason | None:
    """Returns the reason if the limit is shorter than what healthy ranks wait for each other."""
    short = (timeout for timeout in timeouts if timeout.limit_s is not None and timeout.limit_s < _SHORT_LIMIT_S)
    timeout = next(short, None)
    return None if timeout is None else reason("hasty", timeout, limit_s=timeout.limit_s)


def _suspension_reason(timeouts: list[Timeout]) -> Reason | None:
    """Returns the reason if the watchdog itself has not run for long."""
    for timeout in timeouts:
        if timeout.waited_s and timeout.limit_s and timeout.waited_s > _LATE * timeout.limit_s + 60:
            is_unnamed = len({other.sequence for other in timeouts}) > 1 and not timeout.group
            groups = "; the numbers may be of different process groups, so they are not compared" if is_unnamed else ""
            return reason("asleep", timeout, groups=groups, rank=timeout.rank, **vars(timeout))
    return None


def _late_ranks_reason(group: str, timeouts: list[Timeout], log: NcclLog) -> Reason | None:
    """Returns the reason if ranks have started fewer collectives of this group than others, by their own lines."""
    groups: dict[str, dict[int, Progress]] = {}
    for progress in log.progress.values():
        if progress.group == group or not (group and progress.group):
            groups.setdefault(progress.group, {})[progress.rank] = progress
    for name, by_rank in groups.items():
        if name and (unfinished := _unfinished_reason(list(by_rank.values()), timeouts)):
            return unfinished
        most = max(progress.enqueued for progress in by_rank.values())
        # A rank that has started the collective in which others wait is not what they wait for.
        waited = max(timeout.sequence or 0 for timeout in timeouts)
        limit = min(most, waited) if waited else most
        behind = sorted(rank for rank, progress in by_rank.items() if progress.enqueued < limit)
        if behind and (name or len(groups) == 1):
            last = by_rank[behind[0]]
            numbers = sorted({by_rank[rank].enqueued for rank in behind})
            number = f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else numbers[0]
            return reason("behind", last, ranks=ranks_text(behind), number=number, most=most)
    return None


def _unfinished_reason(progresses: list[Progress], timeouts: list[Timeout]) -> Reason | None:
    """Returns the reason if a rank timed out in a collective that it has started, and that others have finished.

    A rank may finish a broadcast or a reduction before the others do. Sends and receives have numbers of their own.
    """
    operations = {timeout.rank_in_group: timeout.operation for timeout in timeouts}
    waiting = [
        p for p in progresses if p.work is not None and re.match("BROADCAST|REDUCE$", operations.get(p.rank, ""))
    ]
    first = min(waiting, key=lambda progress: (progress.work or 0, progress.rank), default=None)
    if first is None or first.work is None:
        return None
    further = sorted(p.rank for p in progresses if p.work is not None and p.work > first.work)
    if not further:
        return None
    ranks = ranks_text(sorted(p.rank for p in progresses if p.work == first.work))
    return reason("unfinished", first, ranks=ranks, number=first.work, others=ranks_text(further))


def _reason(group: str, timeouts: list[Timeout], num_calls: int, log: NcclLog) -> Reason:
    ranks = {timeout.rank for timeout in timeouts}
    if len({timeout.sequence for timeout in timeouts}) > 1:
        if not group or len(timeouts) > len(ranks):
            return reason("unnamed_groups")
        late = min(timeouts, key=lambda timeout: (timeout.sequence is None, timeout.sequence or 0))
        return reason("late_rank", late, rank=late.rank)
    if num_calls > 1:
        return reason("different_calls")
    return _own_error(ranks, log) or _silent_reason(group, timeouts, log)


def _own_error(ranks: set[int], log: NcclLog) -> Reason | None:
    """Returns the reason if a rank that did not time out, or one that is not known, failed by itself."""
    errors = [w for w in log.warnings if w.place in ("outside", "raised") and _may_be_cause(w)]
    others: dict[int, LoggedWarning] = {}
    for error in errors:
        if error.rank is not None and error.rank not in ranks:
            others.setdefault(error.rank, error)
    if others:
        return reason("failed_ranks", *list(others.values())[:1], ranks=ranks_text(others))
    return reason("warned") if any(w.rank is None for w in errors) else None


def _may_be_cause(warning: LoggedWarning) -> bool:
    """Returns whether a warning says more than that a collective timed out or failed."""
    kind = explain(warning.text, warning.place)
    return kind is None or not (kind.severity == "note" or kind.code in _OF_TIMEOUTS or kind.code in _OF_RESULTS)


def _silent_reason(group: str, timeouts: list[Timeout], log: NcclLog) -> Reason:
    """Returns the reason if all ranks that timed out wait in one collective; the log may not have all ranks."""
    # Ranks are counted in the group where that is another number: which ranks of the job those are is unknown.
    is_part = any(timeout.rank != timeout.rank_in_group for timeout in timeouts)
    ranks = {timeout.rank_in_group if is_part else timeout.rank for timeout in timeouts}
    if not is_part:
        # The line of a rank's timeout may be missing, while the next one says in which collective it failed.
        calls = {timeout.sequence for timeout in timeouts} - {None}
        ranks |= {last.rank for last in log.progress.values() if last.group == group and last.work in calls}
    shown = ranks_text({timeout.rank for timeout in timeouts} if is_part else ranks)
    communicators = [] if is_part else log.communicators
    sizes = [*(communicator.num_ranks for communicator in communicators), *(timeout.num_ranks for timeout in timeouts)]
    world_size = max(filter(None, sizes), default=0)
    heard_ranks = {rank for communicator in communicators for rank in communicator.members}
    heard_ranks |= set() if is_part else {last.rank for last in log.progress.values()}
    failed = set[int]() if is_part else log.failed_ranks
    silent = sorted(set(range(world_size or max(ranks) + 1)) - ranks - failed)
    if len(silent) >= len(ranks) and any(map(_may_be_cause, log.warnings)):
        return reason("warned")
    unknown = "" if world_size else "; whether there are other ranks, the log does not say"
    if silent and any(log.may_lack_lines(timeout.line.file) for timeout in log.timeouts.values()):
        lacking = "; the log lacks lines or parts of them, so others may do so too"
        return reason("known_wait", ranks=shown, unknown=lacking)
    # If most ranks are silent, the log may just lack them, unless it has other lines of all these ranks.
    if silent and (len(silent) < len(ranks) or (world_size and heard_ranks.issuperset(silent))):
        is_all = not group or is_part or re.match(r"PG (?:ID )?0\b|.*default", group)
        outside, of_group = "" if is_all else "are not in this group, ", " of the group" if is_part else ""
        return reason("silent_ranks", ranks=f"{ranks_text(silent)}{of_group}", outside=outside, unknown=unknown)
    is_first = len(ranks) > 1 and all(timeout.sequence == 1 for timeout in timeouts)
    if world_size and not silent and not failed - ranks:
        return reason("first_wait", who="all ranks", unknown="") if is_first else reason("all_wait")
    unknown = unknown or f"; what the others of {world_size} ranks do, the log does not say"
    if failed - ranks:
        return reason("known_failures", ranks=shown, failed=ranks_text(failed - ranks), unknown=unknown)
    if is_first and not world_size:
        return reason("first_wait", who=f"all ranks of this log ({shown})", unknown=unknown)
    return reason("known_wait", ranks=shown, unknown=unknown)


def find_ras(reports: list[RasReport]) -> Iterator[Finding]:
    """Finds what RAS reports. Ranks that differ may do so only for the moment, so that is a warning."""
    for report in reports:
        whose = f"communicator 0x{report.comm_id}" if report.comm_id else "the job"
        ranks = [int(number) for detail in report.details for number in re.findall(r"\bRank (\d+)", detail)]
        if max(ranks, default=0) >= MAX_RANKS:
            yield finding("note", "ras_damaged", report, status=report.status, whose=whose, rank=max(ranks))
        elif report.details:
            what = f"RAS reports {report.status} for {whose}: {list_some(report.details, 8)}"
            severity: Severity = "warning" if report.status in ("MISMATCH", "TIMEOUT") else "error"
            yield finding(severity, "ras", report, what=what, why=reason(f"ras_{report.status.lower()}"))
