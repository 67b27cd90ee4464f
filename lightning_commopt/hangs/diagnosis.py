"""Diagnosis: the sentence that says which rank the others wait for, and in what."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any

from lightning_commopt.hangs.flight_recorder import Difference, Signature, find_departure, find_difference
from lightning_commopt.hangs.hints import hints_for
from lightning_commopt.hangs.phases import BACKWARD, EPOCH_END, PHASES
from lightning_commopt.hangs.snapshot import RankSnapshot

_DOWN = ("unreachable", "stopped", "finished")
_TRAINS = ("data", "forward", "backward", "optimizer", "callbacks")
_NAMES_IN_SENTENCE = 2
_ESTABLISHED = 4


@dataclass(frozen=True)
class Diagnosis:
    """Why training stands still.

    Attributes:
        sentence: all of it.
        kind: "died", "unreachable", "stopped", "failed", "ended", "late", "mismatch" or "waiting".
        ranks: those at fault; several sides, if that cannot be told.
        phase: name of the phase that the first of them is in.
        step: that it is in.
        operation: what the others wait in; None if none waits.
        hints: what to try.
    """

    sentence: str
    kind: str
    ranks: tuple[int, ...]
    phase: str
    step: int
    operation: str | None
    hints: tuple[str, ...]

    def to_plain(self) -> dict[str, Any]:
        """Returns it as JSON has it."""
        return asdict(self)


def diagnose(snapshots: Sequence[RankSnapshot]) -> Diagnosis:
    """Says which ranks keep the others waiting.

    Ranks whose processes are gone, stopped or out of reach come first, then ranks that have left the training that
    others are in, then those that are somewhere else than in a collective, and last those in another collective.

    Args:
        snapshots: of all ranks, in any order.
    """
    ordered = sorted(snapshots, key=lambda each: each.rank)
    if first := _first_to_fail(ordered):
        departed = _departed(first, ordered)
        return _diagnosis("departed" if departed else first.state, departed or [first], ordered)
    for state in _DOWN:
        if culprits := [each for each in ordered if each.state == state]:
            return _diagnosis("ended" if state == "finished" else state, culprits, ordered)
    waiting = [each for each in ordered if each.is_waiting]
    busy = [each for each in ordered if each.state == "running" and not each.is_waiting]
    if not waiting:
        return _diagnosis("late", busy or ordered, ordered)
    if left := _left_training(ordered):
        return _diagnosis("ended", left, ordered)
    if busy:
        return _diagnosis("late", busy, ordered)
    difference = find_difference({each.rank: each.parsed_collectives() for each in ordered})
    if difference is not None:
        return _diagnosis("mismatch", [each for each in ordered if each.rank in difference.ranks], ordered, difference)
    if behind := _behind(ordered):
        return _diagnosis("late", behind, ordered)
    return _diagnosis("waiting", ordered, ordered)


def _first_to_fail(snapshots: Sequence[RankSnapshot]) -> RankSnapshot | None:
    """Returns the rank that has died or failed before the others; None if none has, but for one that ended well."""
    ended = [each for each in snapshots if each.state in ("died", "failed")]
    causes = [each for each in ended if not each.is_consequence]
    if not causes and any(each.state == "finished" for each in snapshots):
        return None
    return min(causes or ended, key=lambda each: each.ended_unix_s or math.inf, default=None)


def _departed(dead: RankSnapshot, snapshots: Sequence[RankSnapshot]) -> list[RankSnapshot]:
    """Returns the ranks that have called another collective than they should when a rank died: gloo aborts of that.

    A rank that is where the dead one was has called what is new to both; what all others have called is not wrong.
    """
    if dead.state != "died":
        return []
    elsewhere = [each for each in snapshots if (each.step, each.phase) != (dead.step, dead.phase)]
    departed = [each for each in elsewhere if find_departure(each.parsed_collectives())]
    if len(snapshots) == 2:  # nobody to compare with, so the order must have been well established
        return [each for each in departed if find_departure(each.parsed_collectives(), shortest_context=_ESTABLISHED)]
    return departed if len(departed) < len(snapshots) - 1 else []


def _left_training(snapshots: Sequence[RankSnapshot]) -> list[RankSnapshot]:
    """Returns the ranks that have gone on behind an epoch's batches while others still train; the lesser part."""
    training = [each for each in snapshots if PHASES[each.phase].name in _TRAINS and each.phase != EPOCH_END]
    left = [each for each in snapshots if each not in training]
    return left if training and left and all(each.is_waiting for each in left) else []


def _behind(snapshots: Sequence[RankSnapshot]) -> list[RankSnapshot]:
    """Returns the ranks of a lower step or with fewer buckets; empty if all are equal."""
    progress = {each.rank: (each.step, each.phase == BACKWARD, each.ready) for each in snapshots}
    least = min(progress.values())
    behind = [each for each in snapshots if progress[each.rank] == least]
    return behind if len(behind) < len(snapshots) else []


def _diagnosis(
    kind: str,
    culprits: Sequence[RankSnapshot],
    everybody: Sequence[RankSnapshot],
    difference: Difference | None = None,
) -> Diagnosis:
    waiting = [each for each in everybody if each not in culprits]
    first = culprits[0]
    if difference is not None:
        sentence = _difference_text(difference, everybody)
        operation = _operation_of(difference, waiting or everybody)
    else:
        parts = [_group_text(culprits, lambda each: _what(kind, each)), _group_text(waiting, _what_waits)]
        sentence = "; ".join(part for part in parts if part)
        operation = next((_operation(each) for each in waiting if each.is_waiting or _was_waiting(each)), None)
    if first.state in ("unreachable", "silent") and waiting:
        first = waiting[0]  # of it nothing is known but that the others got there
    return Diagnosis(
        sentence=sentence,
        kind="mismatch" if kind == "departed" else kind,
        ranks=tuple(each.rank for each in culprits),
        phase=PHASES[first.phase].name,
        step=first.step,
        operation=operation,
        hints=hints_for(kind, culprits, waiting),
    )


def _what(kind: str, each: RankSnapshot) -> str:
    where = f"{PHASES[each.phase].where} of {_position(each)}"
    place = each.place if each.is_waiting else each.place or each.innermost
    place = f" ({place})" if place else ""
    if each.worker_places:
        place = f" (worker: {each.worker_places[0]})"
    match kind:
        case "died":
            return f"{{has}} died {where}: {each.detail or f'process {each.pid} on {each.host} is gone'}"
        case "unreachable":
            return f"cannot be reached: {each.detail}"
        case "stopped":
            return f"{{is}} stopped (process {each.pid} on {each.host}, by a signal or a debugger) {where}{place}"
        case "failed":
            return f"{{has}} failed {where}: {each.detail}"
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
            return f"{{wait}} in {_operation(each)} of {_position(each)}"
    if each.is_waiting:
        return f"{{is}} behind: {{wait}} in {_operation(each)} of {_position(each)}{place}"
    return f"{{is}} still {where}{place}"


def _what_waits(each: RankSnapshot) -> str:
    if each.is_waiting:
        place = f" ({each.place})" if each.place and not each.is_syncing else ""
        return f"{{wait}} in {_operation(each)} of {_position(each)}{place}"
    if each.is_consequence:
        return "{has} lost the connection" + (
            f" in {_operation(each)} of {_position(each)}" if _was_waiting(each) else ""
        )
    if each.state == "silent":
        return f"cannot be asked: {each.detail}"
    return _what(each.state if each.state != "running" else "late", each)


def _position(each: RankSnapshot) -> str:
    return f"batch {each.batch}" if each.batch >= 0 else f"step {each.step}"


def waits_in(each: RankSnapshot) -> str | None:
    """Returns the operation that a rank waits in; None if it waits for no other."""
    return _operation(each) if each.is_waiting else None


def _operation(each: RankSnapshot) -> str:
    if each.is_syncing or (each.bucket is not None and each.called is None):
        return f"the gradient sync of bucket {each.bucket}{_names_text(each.bucket_names)}"
    oldest = next((called for called in each.parsed_collectives() if not called.is_done), None)
    if oldest is not None:
        return f"{oldest.signature} (number {oldest.number} of group {_group_name(oldest.signature)})"
    return each.called or "a collective"


def _group_name(signature: Signature) -> str:
    return signature.group if signature.group != "0" else "default"


def _was_waiting(each: RankSnapshot) -> bool:
    """Returns whether a rank waited when it lost its connection, as far as can be said of what."""
    return each.is_consequence and (
        each.bucket is not None or any(not one.is_done for one in each.parsed_collectives())
    )


def _operation_of(difference: Difference, waiting: Sequence[RankSnapshot]) -> str | None:
    """Returns what the ranks that are not at fault have called."""
    for each in waiting:
        called = difference.called.get(each.rank)
        if called is not None:
            is_sync = each.is_syncing and _is_still_in(each, called, difference.number)
            return _operation(each) if is_sync else str(called)
    return _operation(waiting[0])


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


def _difference_text(difference: Difference, everybody: Sequence[RankSnapshot]) -> str:
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
            sync = f", in {_operation(each)}" if is_sync else ""
            return f"{ranks_text(ranks)} {verb} called {called}{sync}{place}"
        now = f", and {'waits' if len(ranks) == 1 else 'wait'} in {_operation(each)}{place}" if each.is_waiting else ""
        return f"{ranks_text(ranks)} {verb} not called it{now}"

    parts = [side(called, ranks) for called, ranks in sorted(sides.items(), key=lambda item: item[0] is None)]
    if difference.is_certain and None in sides and not at_fault & set(sides[None]):
        parts.append(f"{ranks_text(sorted(at_fault))} departs from the order of the steps before")
    return f"collective {difference.number} of group {_group_name(known)} differs: {'; '.join(parts)}"


def _group_text(snapshots: Iterable[RankSnapshot], describe: Any) -> str:
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
