"""How a diagnosis is put into words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from textwrap import shorten

from lightning_commopt.watch.hangs.flight_recorder import Difference, Signature, find_departure
from lightning_commopt.watch.hangs.phases import PHASES
from lightning_commopt.watch.hangs.snapshot import RankSnapshot

_NAMES_IN_SENTENCE = 2
_DETAIL_WIDTH = 240


def what(kind: str, each: RankSnapshot) -> str:
    """Returns what is to be said of a rank at fault."""
    where = f"{PHASES[each.phase].where} of {_position(each)}"
    place = each.place if each.is_waiting or each.is_consequence else each.place or each.innermost
    place = f" ({place})" if place else ""
    if each.worker_places:
        place = f" (worker: {each.worker_places[0]})"
    match kind:
        case "died":
            return f"{{has}} died {where}: {each.detail or f'process {each.pid} on {each.host} is gone'}"
        case "unreachable":
            return f"cannot be {'asked' if each.state == 'silent' else 'reached'}: {each.detail}"
        case "stopped":
            return f"{{is}} stopped (process {each.pid} on {each.host}, by a signal or a debugger) {where}{place}"
        case "failed":
            return f"{{has}} failed {where}: {shorten(each.detail, _DETAIL_WIDTH, placeholder=' ...')}{place}"
        case "departed":
            departure = find_departure(each.parsed_collectives())
            assert departure is not None
            return f"{{has}} called {departure.called} {where}{place}, after what {departure.expected} followed before"
        case "ended" if each.state == "finished":
            return f"{{has}} ended the fit after {_position(each)}"
        case "ended":
            return (
                f"{{has}} left training's batches after {_position(each)}, and {{is}} {PHASES[each.phase].where}{place}"
            )
        case "waiting":
            return f"{{wait}} in {operation_text(each)} of {_position(each)}"
    if each.is_waiting:
        return f"{{is}} behind: {{wait}} in {operation_text(each)} of {_position(each)}{place}"
    return f"{{is}} still {where}{place}"


def what_skipped(left: RankSnapshot, each: RankSnapshot) -> str:
    """Returns what is to be said of a rank that has gone on without a gradient sync that ``left`` is in."""
    place = f" ({each.place})" if each.place else ""
    return (
        f"{{has}} gone on to {_position(each)} without {operation_text(left)} of {_position(left)}, and {{wait}} in"
        f" {operation_text(each)}{place}"
    )


def what_waits(each: RankSnapshot) -> str:
    """Returns what is to be said of a rank that is not at fault."""
    if each.is_waiting:
        place = f" ({each.place})" if each.place and not each.is_syncing else ""
        return f"{{wait}} in {operation_text(each)} of {_position(each)}{place}"
    if each.is_consequence:
        return "{has} lost the connection" + (
            f" in {operation_text(each)} of {_position(each)}" if was_waiting(each) else ""
        )
    if each.state == "silent":
        return f"cannot be asked: {each.detail}"
    return what(each.state if each.state != "running" else "late", each)


def _position(each: RankSnapshot) -> str:
    return f"batch {each.batch}" if each.batch >= 0 else f"step {each.step}"


def waits_in(each: RankSnapshot) -> str | None:
    """Returns the operation that a rank waits in; None if it waits for no other."""
    return operation_text(each) if each.is_waiting else None


def operation_text(each: RankSnapshot) -> str:
    """Returns what a rank waits in, or waited in when it lost its connection."""
    if each.is_syncing or (each.bucket is not None and each.called is None):
        return f"the gradient sync of bucket {each.bucket}{_names_text(each.bucket_names)}"
    current = each.current_collective()
    if current is not None:
        return f"{current.signature} (number {current.number} of group {_group_name(current.signature)})"
    return each.called or "a collective"


def _group_name(signature: Signature) -> str:
    return signature.group if signature.group != "0" else "default"


def was_waiting(each: RankSnapshot) -> bool:
    """Returns whether a rank waited when it lost its connection, as far as can be said of what."""
    return each.is_consequence and (each.bucket is not None or each.current_collective() is not None)


def operation_of(difference: Difference, waiting: Sequence[RankSnapshot]) -> str | None:
    """Returns what the ranks that are not at fault have called."""
    for each in waiting:
        called = difference.called.get(each.rank)
        if called is not None:
            is_sync = each.is_syncing and _is_still_in(each, called, difference.number)
            return operation_text(each) if is_sync else str(called)
    return operation_text(waiting[0])


def _is_still_in(each: RankSnapshot, called: Signature, number: int) -> bool:
    """Returns whether a collective of a rank has not ended."""
    return any((one.signature, one.number, one.is_done) == (called, number, False) for one in each.parsed_collectives())


def _names_text(names: Sequence[str]) -> str:
    if not names:
        return ""
    if len(names) <= _NAMES_IN_SENTENCE:
        return f" ({', '.join(names)})"
    levels = zip(*(name.split(".") for name in names), strict=False)
    prefix = [level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels)]
    return f" ({'.'.join(prefix)}.*)" if prefix else f" ({names[0]} ... {names[-1]})"


def difference_text(difference: Difference, everybody: Sequence[RankSnapshot]) -> str:
    """Returns what is to be said of ranks that are not in the same collective."""
    sides: dict[Signature | None, list[int]] = defaultdict(list)
    for rank, called in difference.called.items():
        sides[called].append(rank)
    known = next(called for called in sides if called is not None)
    at_fault = set(difference.ranks)
    by_rank = {each.rank: each for each in everybody}

    def side(called: Signature | None, ranks: list[int]) -> str:
        each = by_rank[ranks[0]]
        place = f" ({each.place})" if each.place else ""
        verb = "has" if len(ranks) == 1 else "have"
        if called is not None:
            is_sync = each.is_syncing and _is_still_in(each, called, difference.number)
            sync = f", in {operation_text(each)}" if is_sync else ""
            return f"{ranks_text(ranks)} {verb} called {called}{sync}{place}"
        now = (
            f", and {'waits' if len(ranks) == 1 else 'wait'} in {operation_text(each)}{place}"
            if each.is_waiting
            else ""
        )
        return f"{ranks_text(ranks)} {verb} not called it{now}"

    parts = [side(called, ranks) for called, ranks in sorted(sides.items(), key=lambda item: item[0] is None)]
    if difference.is_certain and None in sides and not at_fault & set(sides[None]):
        parts.append(f"{ranks_text(sorted(at_fault))} departs from the order of the steps before")
    return f"collective {difference.number} of group {_group_name(known)} differs: {'; '.join(parts)}"


def group_text(snapshots: Iterable[RankSnapshot], describe: Callable[[RankSnapshot], str]) -> str:
    """Returns one part for all ranks that are described alike."""
    groups: dict[str, list[int]] = defaultdict(list)
    for each in snapshots:
        groups[describe(each)].append(each.rank)
    parts = []
    for text, ranks in groups.items():
        one = len(ranks) == 1
        for word, singular in (("has", "has"), ("is", "is"), ("wait", "waits")):
            plural = {"has": "have", "is": "are", "wait": "wait"}[word]
            text = text.replace(f"{{{word}}}", singular if one else plural)
        parts.append(f"{ranks_text(ranks)} {text}")
    return "; ".join(parts)


def ranks_text(ranks: Sequence[int]) -> str:
    """Returns "rank 2", "ranks 0, 1, 3" or, of many, "ranks 0 to 62, 64"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][-1] == rank - 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    texts = [f"{span[0]} to {span[-1]}" if len(span) > 3 else ", ".join(map(str, span)) for span in spans]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"
