"""Decides from the snapshots of all ranks what is a hang, which rank the others wait for, and when ranks may be ended.

A healthy run must never be reported, however slow some ranks are in work that others do not have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

from lightning_commopt.text.formatting import grouped
from lightning_commopt.watch import times
from lightning_commopt.watch.hangs import sentences
from lightning_commopt.watch.hangs.flight_recorder import Difference, find_departure, find_difference
from lightning_commopt.watch.hangs.marks import BACKWARD, END, EPOCH_END, PHASES
from lightning_commopt.watch.hangs.operations import called_alone, is_in_batch, is_under_rank_zero_only
from lightning_commopt.watch.hangs.snapshot import RankSnapshot

_DOWN = ("unreachable", "unwatched", "stopped", "finished")
_TRAINS = ("data", "forward", "backward", "optimizer", "callbacks")
_ESTABLISHED = 4
_REPORTED = {"departed": "mismatch", "skipped": "mismatch", "outlier": "waiting", "alone": "waiting"}
"""What a report has as kind, where a sentence needs a finer one."""


def is_hang(snapshots: Sequence[RankSnapshot], after_s: float) -> bool:
    """Returns whether ranks make no progress for longer than allowed.

    If a rank waits for others, all of them must have exceeded their limits. If none waits, all ranks must be in
    training and have exceeded theirs: nobody waits for a rank at the end of a run, or whose others have ended.
    """
    running = [each for each in snapshots if each.state == "running"]
    if len(snapshots) < 2 or not running or any(_may_progress(each, after_s) for each in running):
        return False
    waiting = [each for each in running if each.is_waiting]
    if not waiting:
        return len(running) == len(snapshots) and all(each.phase != END for each in running)
    # What an unreachable rank may do, and for how long, is only known from the others' phase.
    patience_s = times.SLOW_FACTOR * after_s if any(each.state == "silent" for each in snapshots) else 0.0
    if any(each.is_unknown for each in snapshots):
        return all(each.idle_s >= max(patience_s, each.limit_s) for each in waiting)
    return True


def may_end_ranks(snapshots: Sequence[RankSnapshot], kind: str) -> bool:
    """Returns whether ``action="abort"`` may end all ranks after a diagnosis of a ``kind``: some must wait in vain."""
    if kind == "interrupted" or any(each.state == "silent" for each in snapshots):
        return False
    return any(each.is_waiting or each.is_consequence for each in snapshots)


def is_waited_for(ended: RankSnapshot, snapshots: Sequence[RankSnapshot]) -> bool:
    """Returns whether others still run after ``ended`` has died, failed or was interrupted."""
    if ended.state == "interrupted":
        return any(each.is_waiting or each.is_consequence for each in snapshots)
    return any(each.state in ("running", "stopped") or each.is_consequence for each in snapshots)


def may_be_caught(
    ended: RankSnapshot, before: Sequence[RankSnapshot] | None, after: Sequence[RankSnapshot], after_s: float
) -> bool:
    """Returns whether others may still raise what ``ended``, whose process lives, has raised.

    A program may catch it on all ranks, and continue. So they may unless two looks in a row, ``before`` and ``after``,
    have found them beyond their limits: one may have met a rank in a collective that it just passes.
    """
    if ended.state != "failed":
        return False
    may_progress = any(each.state == "running" and _may_progress(each, after_s) for each in after)
    return before is None or may_progress or has_moved(before, after)


def has_moved(before: Sequence[RankSnapshot], after: Sequence[RankSnapshot]) -> bool:
    """Returns whether a rank has made progress, or ended, between two snapshots of all ranks."""
    earlier = {each.rank: each for each in before}
    return any(
        each.state != earlier[each.rank].state or (each.state == "running" and each.idle_s < earlier[each.rank].idle_s)
        for each in after
    )


def _may_progress(rank: RankSnapshot, after_s: float) -> bool:
    """Returns whether a running rank may still be working in a phase that takes long."""
    if rank.is_waiting:
        return rank.idle_s < (rank.limit_s if rank.phase == END else after_s)
    # Without its stack the phase is uncertain: another callback's hook may run in any.
    is_slow = rank.is_compiling or rank.is_computing or rank.innermost is None
    return rank.idle_s < (times.SLOW_FACTOR * rank.limit_s if is_slow else rank.limit_s)


@dataclass(frozen=True)
class Diagnosis:
    """Why training stands still."""

    sentence: str  # the diagnosis in words
    # "died", "failed", "interrupted", "terminated", "unreachable", "stopped", "ended", "late", "mismatch" or "waiting"
    kind: str
    ranks: tuple[int, ...]  # at fault; all sides if it is unknown which
    phase: str  # name of the phase of the first of them, or of the one in which it skipped what others wait in
    step: int  # of that phase
    # That the others wait in, or waited in when they lost the connection; if none of them does, that of the ranks at
    # fault; None if no rank is in a collective
    operation: str | None
    hints: tuple[str, ...]  # what to try
    # A case of C4 (Dong et al., 2024): "communication" or "non-communication", by where ranks make no progress, and
    # "hang", or "slow" if they may still make some; None where a rank has ended or is stopped
    verdict: str | None = None


def diagnose(snapshots: Sequence[RankSnapshot]) -> Diagnosis:
    """Finds the ranks that keep the others waiting, from snapshots of all ranks in any order.

    The first of: ranks whose processes have ended, are stopped or cannot be reached; ranks that have left the training
    that others are in; ranks outside of collectives; ranks in another collective.
    """
    ordered = sorted(snapshots, key=attrgetter("rank"))
    if first := _first_to_fail(ordered):
        departed = _departed(first, ordered)
        return _diagnosis("departed" if departed else first.state, departed or [first], ordered)
    signalled = [each for each in ordered if each.state == "running" and each.stop_reason == "SIGTERM"]
    if 0 < len(signalled) < len(ordered):
        return _diagnosis("terminated", signalled, ordered)
    waiting = [each for each in ordered if each.is_waiting]
    busy = [each for each in ordered if each.state == "running" and not each.is_waiting]
    is_ending = bool(busy) and all(each.phase == END for each in (*waiting, *busy))
    for state in _DOWN:
        if culprits := [each for each in ordered if each.state == state and not (state == "finished" and is_ending)]:
            kind = {"finished": "ended", "unwatched": "unreachable"}.get(state, state)
            return _diagnosis(kind, culprits, ordered)
    if not waiting:
        return _diagnosis("late", _outliers(busy) or _before_backward(busy) or busy or ordered, ordered)
    known = [each for each in ordered if each.state != "silent"]
    if left := _left_training(known):
        return _diagnosis("ended", left, ordered)
    if busy:
        return _diagnosis("late", busy, ordered)
    difference = find_difference({each.rank: each.parsed_collectives() for each in ordered})
    if difference is not None:
        differing = [each for each in ordered if each.rank in difference.ranks]
        last = _last_in_sync(ordered)
        if last is not None and (ahead := [each for each in differing if each.step > last.step]):
            return _diagnosis("skipped", ahead, ordered)  # they have skipped the gradient sync that ``last`` is in
        return _diagnosis("mismatch", differing, ordered, difference)
    has_records = all(each.parsed_collectives() for each in ordered)  # and these show no difference
    if not has_records and (alone := [rank for ranks in called_alone(ordered).values() for rank in ranks]):
        return _diagnosis("alone", alone, ordered)
    if behind := _behind(known):
        return _diagnosis("late", behind, ordered)
    if silent := [each for each in ordered if each not in known]:
        return _diagnosis("unreachable", silent, ordered)
    if outliers := _outliers(ordered):
        return _diagnosis("outlier", outliers, ordered)
    return _diagnosis("waiting", ordered, ordered)


def _outliers(snapshots: Sequence[RankSnapshot]) -> list[RankSnapshot]:
    """Returns the ranks whose stacks differ from those of the majority; empty if there is none, or no rank differs.

    Source: ByteRobust (Wan et al., 2025), section on aggregated stacks, where the largest group counts as healthy too.
    """
    groups = grouped((tuple(each.frames), each) for each in snapshots)
    largest = max(groups.values(), key=len)
    if () in groups or 2 * len(largest) <= len(snapshots):
        return []
    return [each for each in snapshots if each not in largest]


def _before_backward(snapshots: Sequence[RankSnapshot]) -> list[RankSnapshot]:
    """Returns the ranks that have not reached the backward that all others are in.

    Where torch records no collectives, as old versions over gloo, a rank in backward may wait for them.
    """
    inside = [each for each in snapshots if each.phase == BACKWARD and not each.parsed_collectives()]
    before = [each for each in snapshots if each not in inside]
    step = min((each.step for each in inside), default=-1)
    is_behind = all(each.step < step or PHASES[each.phase].name in ("data", "forward") for each in before)
    return before if inside and is_behind and all(each.step <= step for each in before) else []


def _first_to_fail(snapshots: Sequence[RankSnapshot]) -> RankSnapshot | None:
    """Returns the rank that has died or failed first; None if none has, or if others are the reason."""
    ended = [each for each in snapshots if each.state in ("died", "failed", "interrupted", "terminated")]
    causes = [each for each in ended if not each.is_consequence]
    others = [each for each in snapshots if each not in ended]
    if not causes and (
        any(each.state == "finished" for each in others)
        or (all(each.has_timed_out for each in ended) and any(not each.is_waiting for each in others))
    ):
        return None
    return min(causes or ended, key=lambda each: each.ended_unix_s or math.inf, default=None)


def _departed(dead: RankSnapshot, snapshots: Sequence[RankSnapshot]) -> list[RankSnapshot]:
    """Returns the ranks that have called an unexpected collective when a rank died, as gloo aborts the others then.

    A rank in the same phase as the dead one has called what is new to both; what all others have called is not wrong.
    """
    if dead.state != "died":
        return []
    elsewhere = [each for each in snapshots if (each.step, each.phase) != (dead.step, dead.phase)]
    departed = [each for each in elsewhere if find_departure(each.parsed_collectives())]
    if len(snapshots) == 2:  # without a third rank to compare with, the order must be well established
        return [each for each in departed if find_departure(each.parsed_collectives(), min_context=_ESTABLISHED)]
    return departed if len(departed) < len(snapshots) - 1 else []


def _left_training(snapshots: Sequence[RankSnapshot]) -> list[RankSnapshot]:
    """Returns the ranks that have left an epoch's batches while others still train."""
    running = [each for each in snapshots if each.state == "running"]
    training = [each for each in running if PHASES[each.phase].name in _TRAINS and each.phase not in (EPOCH_END, END)]
    left = [each for each in running if each not in training]
    if any(is_in_batch(each) or is_under_rank_zero_only(each) or _have_followed(training, each) for each in left):
        return []  # the ranks that train have no more batches: what these ranks do is not theirs to do alone
    return left if training and left and all(each.is_waiting or each.phase == END for each in left) else []


def _have_followed(training: Sequence[RankSnapshot], left: RankSnapshot) -> bool:
    """Returns whether ranks that train have already left the same batches as ``left``, and have gone on."""
    return bool(left.passed) and all(each.step == left.step and {*left.passed} <= {*each.passed} for each in training)


def _last_in_sync(snapshots: Sequence[RankSnapshot]) -> RankSnapshot | None:
    """Returns the rank in gradient sync that is in the lowest step."""
    return min((each for each in snapshots if each.is_syncing), key=lambda each: each.step, default=None)


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
    left = _last_in_sync(everybody) if kind == "skipped" else None
    if difference is not None:
        sentence = sentences.difference_text(difference, everybody)
        operation = sentences.operation_of(difference, waiting or everybody)
    else:
        describe = partial(sentences.what, kind) if left is None else partial(sentences.what_skipped, left)
        parts = [sentences.group_text(culprits, describe), sentences.group_text(waiting, sentences.what_waits)]
        sentence = "; ".join(part for part in parts if part)
        in_one = [each for each in (*waiting, *culprits) if each.is_waiting or sentences.was_waiting(each)]
        operation = next(map(sentences.operation_text, in_one), None)
    if left is not None:
        first = left  # it waits in what was skipped
    elif first.is_unknown and waiting:
        first = waiting[0]  # nothing is known of the first
    return Diagnosis(
        sentence=sentence,
        kind=_REPORTED.get(kind, kind),
        ranks=tuple(each.rank for each in culprits),
        phase=PHASES[first.phase].name,
        step=first.step,
        operation=operation,
        hints=sentences.hints_for(kind, culprits, waiting),
        verdict=_verdict(kind, culprits),
    )


def _verdict(kind: str, culprits: Sequence[RankSnapshot]) -> str | None:
    if kind not in ("late", "mismatch", "departed", "skipped", "outlier", "alone", "waiting", "unreachable"):
        return None
    if kind == "late" and not any(each.is_waiting for each in culprits):
        return f"non-communication {'slow' if any(each.is_computing for each in culprits) else 'hang'}"
    return "communication hang"
