"""Decides from the snapshots of all ranks whether they hang, which rank the others wait for, and when to end ranks.

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
from lightning_commopt.watch.hangs.operations import called_alone, is_debugged, is_in_batch, is_under_rank_zero_only
from lightning_commopt.watch.hangs.snapshot import RankSnapshot

_DOWN = ("unreachable", "unwatched", "stopped", "finished")
_TRAINS = ("data", "forward", "backward", "optimizer", "callbacks")
_ESTABLISHED = 4
"""With two ranks only, the number of preceding collectives that must have occurred in the same order before, for the
next one to count as unexpected. It is a judgement: a step often has fewer different collectives, and four in a row
rarely occur twice by chance."""

_REPORTED = {"departed": "mismatch", "skipped": "mismatch", "outlier": "waiting", "alone": "waiting"}
"""The kind in a report, for kinds that only sentences need."""


def is_hang(snapshots: Sequence[RankSnapshot], after_s: float) -> bool:
    """Returns whether ranks make no progress for longer than allowed.

    If a rank waits for others, all of them must have exceeded their limits. If none waits, all ranks must be in
    training and have exceeded theirs: nobody waits for a rank at the end of a run, or whose others have ended.
    """
    running = [rank for rank in snapshots if rank.state == "running"]
    if len(snapshots) < 2 or not running or any(_may_progress(rank, after_s) for rank in running):
        return False
    waiting = [rank for rank in running if rank.is_waiting]
    if not waiting:
        return len(running) == len(snapshots) and all(rank.phase != END for rank in running)
    # What an unreachable rank may do, and for how long, is only known from the others' phase.
    patience_s = times.SLOW_FACTOR * after_s if any(rank.state == "silent" for rank in snapshots) else 0.0
    if any(rank.is_unknown for rank in snapshots):
        return all(rank.idle_s >= max(patience_s, rank.limit_s) for rank in waiting)
    return True


def may_end_ranks(snapshots: Sequence[RankSnapshot], kind: str) -> bool:
    """Returns whether ``action="abort"`` may end all ranks after a diagnosis of a ``kind``: some must wait in vain."""
    if kind == "interrupted" or any(rank.state == "silent" or is_debugged(rank) for rank in snapshots):
        return False
    return any(rank.is_waiting or rank.is_consequence for rank in snapshots)


def is_waited_for(ended: RankSnapshot, snapshots: Sequence[RankSnapshot]) -> bool:
    """Returns whether others still run after ``ended`` has died, failed or was interrupted."""
    if ended.state == "interrupted":
        return any(rank.is_waiting or rank.is_consequence for rank in snapshots)
    return any(rank.state in ("running", "stopped") or rank.is_consequence for rank in snapshots)


def may_be_caught(
    ended: RankSnapshot, before: Sequence[RankSnapshot] | None, after: Sequence[RankSnapshot], after_s: float
) -> bool:
    """Returns whether others may still raise what ``ended``, whose process lives, has raised.

    A program may catch it on all ranks, and continue. So they may unless two looks in a row, ``before`` and ``after``,
    have found them beyond their limits: one may have met a rank in a collective that it just passes.
    """
    if ended.state != "failed":
        return False
    may_progress = any(rank.state == "running" and _may_progress(rank, after_s) for rank in after)
    return before is None or may_progress or has_moved(before, after)


def has_moved(before: Sequence[RankSnapshot], after: Sequence[RankSnapshot]) -> bool:
    """Returns whether a rank has made progress, or ended, between two snapshots of all ranks."""
    earlier = {rank.rank: rank for rank in before}
    return any(_has_moved(earlier[rank.rank], rank) for rank in after)


def _has_moved(before: RankSnapshot, after: RankSnapshot) -> bool:
    if after.state != "running" or before.state != "running":
        return after.state != before.state
    # Of collectives that were called long before, one after the other may end.
    return after.idle_s < before.idle_s or after.outstanding_collective() != before.outstanding_collective()


def _may_progress(rank: RankSnapshot, after_s: float) -> bool:
    """Returns whether a running rank may still be working in a phase that takes long."""
    if rank.is_waiting:
        # Where torch records no collectives, many in a loop look like a single one.
        is_excused = rank.phase == END or (rank.called is not None and not rank.parsed_collectives())
        return rank.idle_s < (rank.limit_s if is_excused else after_s)
    # Without its stack the phase is uncertain: another callback's hook may run in any.
    is_slow = rank.is_compiling or rank.is_computing or rank.innermost is None
    return rank.idle_s < (times.SLOW_FACTOR * rank.limit_s if is_slow else rank.limit_s)


@dataclass(frozen=True)
class Diagnosis:
    """Why training hangs or is slow."""

    sentence: str  # the diagnosis in words
    # "died", "failed", "interrupted", "terminated", "unreachable", "stopped", "ended", "late", "mismatch" or "waiting"
    kind: str
    ranks: tuple[int, ...]  # the ranks at fault; all sides if it is unknown which
    phase: str  # name of the phase that the first of them is in, or in which it skipped what others wait in
    step: int  # the step of that phase
    # The operation that the others wait in, or waited in when they lost the connection; if none of them does, the
    # operation of the ranks at fault; None if no rank is in a collective.
    operation: str | None
    hints: tuple[str, ...]  # what to try
    # One of C4's cases (Dong et al., 2024): "communication" or "non-communication", depending on where ranks make no
    # progress, and "hang", or "slow" if they may still make some; None if a rank has ended or is stopped.
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
    signalled = [rank for rank in ordered if rank.state == "running" and rank.stop_reason == "SIGTERM"]
    if 0 < len(signalled) < len(ordered):
        return _diagnosis("terminated", signalled, ordered)
    waiting = [rank for rank in ordered if rank.is_waiting]
    busy = [rank for rank in ordered if rank.state == "running" and not rank.is_waiting]
    is_ending = bool(busy) and all(rank.phase == END for rank in (*waiting, *busy))
    for state in _DOWN:
        if culprits := [rank for rank in ordered if rank.state == state and not (state == "finished" and is_ending)]:
            kind = {"finished": "ended", "unwatched": "unreachable"}.get(state, state)
            return _diagnosis(kind, culprits, ordered)
    if not waiting:
        return _diagnosis("late", _outliers(busy) or _before_backward(busy) or busy or ordered, ordered)
    known = [rank for rank in ordered if rank.state != "silent"]
    if ended := _left_training(known):
        return _diagnosis("ended", ended, ordered)
    if busy:
        return _diagnosis("late", busy, ordered)
    difference = find_difference({rank.rank: rank.parsed_collectives() for rank in ordered})
    if difference is not None:
        differing = [rank for rank in ordered if rank.rank in difference.ranks]
        last = _last_in_sync(ordered)
        if last is not None and (skipping := [rank for rank in differing if rank.step > last.step]):
            # They have skipped the gradient sync that ``last`` is in.
            return _diagnosis("skipped", skipping, ordered)
        return _diagnosis("mismatch", differing, ordered, difference)
    # If there are records of all ranks, they have shown no difference, and stacks would only mislead.
    has_records = all(rank.parsed_collectives() for rank in ordered)
    if not has_records and (alone := [rank for ranks in called_alone(ordered).values() for rank in ranks]):
        return _diagnosis("alone", alone, ordered)
    if late := _least_advanced([rank for rank in known if not rank.is_inferred]):
        return _diagnosis("late", late, ordered)
    if silent := [rank for rank in ordered if rank not in known]:
        return _diagnosis("unreachable", silent, ordered)
    if outliers := _outliers(ordered):
        return _diagnosis("outlier", outliers, ordered)
    return _diagnosis("waiting", ordered, ordered)


def _outliers(snapshots: Sequence[RankSnapshot]) -> list[RankSnapshot]:
    """Returns the ranks whose stacks differ from the majority's; empty if there is none, or no rank differs.

    Source: ByteRobust (Wan et al., 2025), section on aggregated stacks, where the largest group counts as healthy too.
    """
    groups = grouped((tuple(rank.frames), rank) for rank in snapshots)
    largest = max(groups.values(), key=len)
    if () in groups or 2 * len(largest) <= len(snapshots):
        return []
    return [rank for rank in snapshots if rank not in largest]


def _before_backward(snapshots: Sequence[RankSnapshot]) -> list[RankSnapshot]:
    """Returns the ranks that have not reached the backward that all others are in.

    Where torch records no collectives, as old versions over gloo, a rank in backward may wait for them.
    """
    inside = [rank for rank in snapshots if rank.phase == BACKWARD and not rank.parsed_collectives()]
    before = [rank for rank in snapshots if rank not in inside]
    step = min((rank.step for rank in inside), default=-1)
    is_behind = all(rank.step < step or PHASES[rank.phase].name in ("data", "forward") for rank in before)
    return before if inside and is_behind and all(rank.step <= step for rank in before) else []


def _first_to_fail(snapshots: Sequence[RankSnapshot]) -> RankSnapshot | None:
    """Returns the rank that has died or failed first; None if none has, or if others are the reason."""
    ended = [rank for rank in snapshots if rank.state in ("died", "failed", "interrupted", "terminated")]
    causes = [rank for rank in ended if not rank.is_consequence]
    others = [rank for rank in snapshots if rank not in ended]
    if not causes and (
        any(rank.state == "finished" for rank in others)
        or (all(rank.has_timed_out for rank in ended) and any(not rank.is_waiting for rank in others))
    ):
        return None
    return min(causes or ended, key=lambda rank: rank.ended_unix_s or math.inf, default=None)


def _departed(dead: RankSnapshot, snapshots: Sequence[RankSnapshot]) -> list[RankSnapshot]:
    """Returns the ranks that have called an unexpected collective when a rank died, as gloo aborts the others then.

    A rank in the same phase as the dead one has called what is new to both; what all others have called is not wrong.
    Nor is what Lightning calls on SIGTERM, which a launcher sends to the others when a rank has died.
    """
    if dead.state != "died":
        return []
    elsewhere = [
        rank
        for rank in snapshots
        if (rank.step, rank.phase) != (dead.step, dead.phase) and rank.stop_reason != "SIGTERM"
    ]
    # Without a third rank to compare with, the order must be well established.
    min_context = _ESTABLISHED if len(snapshots) == 2 else 1
    departed = [
        rank for rank in elsewhere if find_departure(rank.parsed_collectives(), min_context=min_context, is_new=True)
    ]
    return departed if len(snapshots) == 2 or len(departed) < len(snapshots) - 1 else []


def _left_training(snapshots: Sequence[RankSnapshot]) -> list[RankSnapshot]:
    """Returns the ranks that have left an epoch's batches while others still train."""
    running = [rank for rank in snapshots if rank.state == "running"]
    training = [rank for rank in running if PHASES[rank.phase].name in _TRAINS and rank.phase not in (EPOCH_END, END)]
    ended = [rank for rank in running if rank not in training]
    if any(is_in_batch(rank) or is_under_rank_zero_only(rank) or _have_followed(training, rank) for rank in ended):
        return []  # the ranks that train have no more batches: what these ranks do is not theirs to do alone
    return ended if training and ended and all(rank.is_waiting or rank.phase == END for rank in ended) else []


def _have_followed(training: Sequence[RankSnapshot], ended: RankSnapshot) -> bool:
    """Returns whether ranks that train have already left the same batches as ``ended``, and have gone on."""
    return bool(ended.passed) and all(
        rank.step == ended.step and {*ended.passed} <= {*rank.passed} for rank in training
    )


def _last_in_sync(snapshots: Sequence[RankSnapshot]) -> RankSnapshot | None:
    """Returns the rank in gradient sync that is in the lowest step."""
    return min((rank for rank in snapshots if rank.is_syncing), key=lambda rank: rank.step, default=None)


def _least_advanced(snapshots: Sequence[RankSnapshot]) -> list[RankSnapshot]:
    """Returns the ranks of a lower step or with fewer buckets; empty if all are equal."""
    progress = {rank.rank: (rank.step, rank.phase == BACKWARD, rank.ready) for rank in snapshots}
    least = min(progress.values(), default=None)
    late = [rank for rank in snapshots if progress[rank.rank] == least]
    return late if len(late) < len(snapshots) else []


def _diagnosis(
    kind: str, culprits: Sequence[RankSnapshot], ranks: Sequence[RankSnapshot], difference: Difference | None = None
) -> Diagnosis:
    waiting = [rank for rank in ranks if rank not in culprits]
    first = culprits[0]
    in_sync = _last_in_sync(ranks) if kind == "skipped" else None
    if difference is not None:
        sentence = sentences.difference_text(difference, ranks)
        operation = sentences.operation_of(difference, waiting or ranks)
    else:
        describe = partial(sentences.describe_culprit, kind)
        if in_sync is not None:
            describe = partial(sentences.describe_skipping, in_sync)
        parts = [sentences.group_text(culprits, describe), sentences.group_text(waiting, sentences.describe_waiting)]
        sentence = "; ".join(part for part in parts if part)
        in_one = [rank for rank in (*waiting, *culprits) if rank.is_waiting or sentences.was_waiting(rank)]
        in_one.sort(key=attrgetter("is_inferred"))  # the others know better what they wait in
        operation = next(map(sentences.operation_text, in_one), None)
    if in_sync is not None:
        first = in_sync  # this rank waits in what was skipped
    elif first.is_unknown and waiting:
        first = waiting[0]  # nothing is known of where the culprit is
    return Diagnosis(
        sentence=sentence,
        kind=_REPORTED.get(kind, kind),
        ranks=tuple(rank.rank for rank in culprits),
        phase=PHASES[first.phase].name,
        step=first.step,
        operation=operation,
        hints=sentences.hints_for(kind, culprits, waiting),
        verdict=_verdict(kind, culprits),
    )


def _verdict(kind: str, culprits: Sequence[RankSnapshot]) -> str | None:
    if kind not in ("late", "mismatch", "departed", "skipped", "outlier", "alone", "waiting", "unreachable"):
        return None
    if kind == "late" and not any(rank.is_waiting for rank in culprits):
        return f"non-communication {'slow' if any(rank.is_computing for rank in culprits) else 'hang'}"
    return "communication hang"
