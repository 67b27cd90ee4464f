"""The sentences and hints of a diagnosis."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from textwrap import shorten

from lightning_commopt.text.findings import read_texts
from lightning_commopt.text.formatting import grouped, ranks_text
from lightning_commopt.watch.hangs.flight_recorder import Difference, Signature, find_departure
from lightning_commopt.watch.hangs.marks import PHASES, first_of_stage
from lightning_commopt.watch.hangs.operations import called_alone
from lightning_commopt.watch.hangs.snapshot import SIGTERM_BROADCAST, RankSnapshot

_NAMES_IN_SENTENCE = 2
"""Maximum number of parameter names in a sentence; those of a larger bucket are shortened to their common prefix."""

_DIFFERENT_OPERATION_KINDS = ("mismatch", "alone")
"""Kinds of hangs in which ranks wait in different operations."""

_DETAIL_WIDTH = 240
"""Number of characters to which an exception is cut, about two lines: its first words are the most useful."""

# The file is read when this module is imported: once a rank hangs, the file system may hang as well.
_HINTS = {name: tuple(hints.values()) for name, hints in read_texts(Path(__file__).with_name("hints.txt")).items()}


def hints_for(kind: str, culprits: Sequence[RankSnapshot], waiting: Sequence[RankSnapshot]) -> tuple[str, ...]:
    """Returns hints, the most likely remedies first; none if the user has interrupted a rank."""
    first = culprits[0]
    alone = called_alone((*culprits, *waiting)) if kind in _DIFFERENT_OPERATION_KINDS else {}
    if alone:
        hints = _HINTS[f"alone {next(iter(alone))}"]
    elif kind == "late" and first.device_step is not None:
        hints = _HINTS["late device"]
    elif kind == "late":
        hints = _HINTS.get(f"late {PHASES[first.phase].name}", _HINTS["late"])
    elif kind == "ended" and first.phase in range(first_of_stage("validation"), first_of_stage("test")):
        hints = (*_HINTS["ended"], *_HINTS["ended validation"])
    elif kind == "skipped":
        hints = (*_HINTS["skipped"], _HINTS["mismatch"][0])
    elif kind == "died":
        reason = first.detail.rpartition(" ")[2] if first.detail.startswith("was killed by ") else ""
        name = "status" if first.detail.startswith("exited") else "signal" if reason else "SIGKILL"
        hints = _HINTS.get(f"died {reason}", _HINTS[f"died {name}"]) + _HINTS["launcher"]
    elif kind == "failed" and first.detail.startswith("SystemExit"):
        hints = _HINTS["failed SystemExit"]
    elif kind == "ended" and first.stop_reason:
        hints = _HINTS["ended should_stop"]
    else:
        hints = _HINTS[{"departed": "mismatch", "outlier": "mismatch"}.get(kind, kind)]
    if hints and any(rank.missing for rank in (*culprits, *waiting)):
        hints += _HINTS["missing"]
    return hints


def describe_culprit(kind: str, rank: RankSnapshot) -> str:
    """Describes a rank at fault."""
    phase = f"{f'in {rank.hook}' if rank.hook else PHASES[rank.phase].where} of {_position(rank)}"
    place = rank.place if rank.is_waiting or rank.is_consequence else rank.place or rank.innermost
    place = f" ({place})" if place else ""
    if rank.worker_places:
        place = f" (worker: {rank.worker_places[0]})"
    match kind:
        case "died":
            return f"{{has}} died {phase}: process {rank.pid} on {rank.host} {rank.detail or 'is gone'}"
        case "unreachable":
            return f"cannot be {'reached' if rank.state == 'unreachable' else 'asked'}: {rank.detail}"
        case "stopped":
            return f"{{is}} stopped (process {rank.pid} on {rank.host}, by a signal or a debugger) {phase}{place}"
        case "interrupted":
            return f"{{has}} been interrupted (Ctrl-C or SIGINT) {phase}{place}"
        case "terminated" if rank.state == "running":
            return f"{{has}} received SIGTERM {phase}, and {{wait}} for the others in Lightning's handler"
        case "terminated":
            return f"{{has}} been ended by SIGTERM {phase}{place}"
        case "failed" if rank.detail.startswith("SystemExit"):
            status = rank.detail.partition(": ")[2]
            return f"{{has}} called sys.exit({status}) {phase}{place}"
        case "failed":
            return f"{{has}} failed {phase}: {shorten(rank.detail, _DETAIL_WIDTH, placeholder=' ...')}{place}"
        case "departed":
            departure = find_departure(rank.parsed_collectives())
            assert departure is not None
            return f"{{has}} called {departure.called} {phase}{place}, after what {departure.expected} followed before"
        case "ended" if rank.state == "finished":
            return f"{{has}} ended the fit after {_position(rank)}{_reason_text(rank)}"
        case "ended":
            return (
                f"{{has}} left training's batches after {_position(rank)}{_reason_text(rank)}, and {{is}}"
                f" {PHASES[rank.phase].where}{place}"
            )
        case "waiting":
            return f"{{wait}} in {operation_text(rank)} of {_position(rank)}"
        case "late" if rank.device_step is not None:
            is_before = rank.device_step < rank.step
            work = f"step {rank.device_step}" if is_before else f"what it called before this batch of step {rank.step}"
            return f"{{is}} still computing {work} on its device"
    if rank.is_waiting and kind in ("outlier", "alone"):
        return f"{{wait}} in {operation_text(rank)} of {_position(rank)}{place}, unlike the others"
    if rank.is_waiting:
        return f"{{is}} behind: {{wait}} in {operation_text(rank)} of {_position(rank)}{place}"
    return f"{{is}} still {phase}{place}"


def _reason_text(rank: RankSnapshot) -> str:
    return f", as {rank.stop_reason} was set there" if rank.stop_reason else ""


def describe_skipping(in_sync: RankSnapshot, rank: RankSnapshot) -> str:
    """Describes a rank that has skipped the gradient sync that ``in_sync`` is in."""
    place = f" ({rank.place})" if rank.place else ""
    return (
        f"{{has}} gone on to {_position(rank)} without {operation_text(in_sync)} of {_position(in_sync)}, and {{wait}}"
        f" in {operation_text(rank)}{place}"
    )


def describe_waiting(rank: RankSnapshot) -> str:
    """Describes a rank that is not at fault."""
    if rank.is_waiting:
        place = f" ({rank.place})" if rank.place and not rank.is_syncing else ""
        return f"{{wait}} in {operation_text(rank)} of {_position(rank)}{place}"
    if rank.is_consequence:
        return f"{{has}} {'timed out' if rank.has_timed_out else 'lost the connection'}" + (
            f" in {operation_text(rank)} of {_position(rank)}" if was_waiting(rank) else ""
        )
    state = {"running": "late", "finished": "ended"}.get(rank.state, rank.state)
    return describe_culprit("unreachable" if rank.is_unknown else state, rank)


def _position(rank: RankSnapshot) -> str:
    return f"batch {rank.batch}" if rank.batch >= 0 else f"step {rank.step}"


def operation_text(rank: RankSnapshot) -> str:
    """Returns the operation that a rank waits in, or waited in when it lost its connection."""
    if rank.fragment is not None:
        names = _names_text(rank.fragment_names)
        return f"exchange {rank.exchange} of DiLoCo's fragment {rank.fragment}{names}"
    if rank.is_syncing or (rank.bucket is not None and rank.called is None):
        return f"the gradient sync of bucket {rank.bucket}{_names_text(rank.bucket_names)}"
    if rank.hook == SIGTERM_BROADCAST:
        return rank.hook
    current = rank.current_collective()
    if current is not None:
        return f"{current.signature} (number {current.number} of group {_group_name(current.signature)})"
    return rank.called or "a collective"


def _group_name(signature: Signature) -> str:
    return signature.group if signature.group != "0" else "default"


def was_waiting(rank: RankSnapshot) -> bool:
    """Returns whether a rank waited in a known operation when it lost its connection."""
    is_known = rank.bucket is not None or rank.fragment is not None or rank.current_collective() is not None
    return rank.is_consequence and is_known


def operation_of(difference: Difference, waiting: Sequence[RankSnapshot]) -> str | None:
    """Returns the operation that the ranks that are not at fault have called."""
    for rank in waiting:
        called = difference.called.get(rank.rank)
        if called is not None:
            is_sync = rank.is_syncing and _is_still_in(rank, called, difference.number)
            return operation_text(rank) if is_sync else str(called)
    return operation_text(waiting[0])


def _is_still_in(rank: RankSnapshot, called: Signature, number: int) -> bool:
    return any(
        (collective.signature, collective.number, collective.is_done) == (called, number, False)
        for collective in rank.parsed_collectives()
    )


def _names_text(names: Sequence[str]) -> str:
    if not names:
        return ""
    if len(names) <= _NAMES_IN_SENTENCE:
        return f" ({', '.join(names)})"
    levels = zip(*(name.split(".") for name in names), strict=False)
    prefix = [level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels)]
    return f" ({'.'.join(prefix)}.*)" if prefix else f" ({names[0]} ... {names[-1]})"


def difference_text(difference: Difference, snapshots: Sequence[RankSnapshot]) -> str:
    """Describes ranks that are not in the same collective."""
    sides = grouped((called, rank) for rank, called in difference.called.items())
    known = next(called for called in sides if called is not None)
    at_fault = set(difference.ranks)
    by_rank = {rank.rank: rank for rank in snapshots}

    def side(called: Signature | None, ranks: list[int]) -> str:
        rank = by_rank[ranks[0]]
        place = f" ({rank.place})" if rank.place else ""
        verb = "has" if len(ranks) == 1 else "have"
        if called is not None:
            is_sync = rank.is_syncing and _is_still_in(rank, called, difference.number)
            sync = f", in {operation_text(rank)}" if is_sync else ""
            return f"{ranks_text(ranks)} {verb} called {called}{sync}{place}"
        now = (
            f", and {'waits' if len(ranks) == 1 else 'wait'} in {operation_text(rank)}{place}"
            if rank.is_waiting
            else ""
        )
        return f"{ranks_text(ranks)} {verb} not called it{now}"

    parts = [side(called, ranks) for called, ranks in sorted(sides.items(), key=lambda item: item[0] is None)]
    if difference.is_certain and None in sides and not at_fault & set(sides[None]):
        parts.append(f"{ranks_text(sorted(at_fault))} departs from the order of the steps before")
    return f"collective {difference.number} of group {_group_name(known)} differs: {'; '.join(parts)}"


def group_text(snapshots: Iterable[RankSnapshot], describe: Callable[[RankSnapshot], str]) -> str:
    """Returns descriptions of all ranks, those with equal ones together."""
    parts = []
    for text, ranks in grouped((describe(rank), rank.rank) for rank in snapshots).items():
        for word, singular, plural in (("has", "has", "have"), ("is", "is", "are"), ("wait", "waits", "wait")):
            text = text.replace(f"{{{word}}}", singular if len(ranks) == 1 else plural)
        parts.append(f"{ranks_text(ranks)} {text}")
    return "; ".join(parts)
