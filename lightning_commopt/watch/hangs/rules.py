"""Decides from the snapshots of all ranks what is a hang, and when ranks may be ended.

A healthy run must never be reported, however slow some ranks are in work that others do not have.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_commopt.watch.hangs.marks import END, SLOW_FACTOR
from lightning_commopt.watch.hangs.snapshot import RankSnapshot


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
    patience_s = SLOW_FACTOR * after_s if any(each.state == "silent" for each in snapshots) else 0.0
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


def may_be_caught(ended: RankSnapshot, snapshots: Sequence[RankSnapshot], after_s: float) -> bool:
    """Returns whether others may still raise what ``ended``, whose process lives, has raised.

    A program may catch it on all ranks, and continue.
    """
    running = [each for each in snapshots if each.state == "running"]
    return ended.state == "failed" and any(_may_progress(each, after_s) for each in running)


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
    return rank.idle_s < (SLOW_FACTOR * rank.limit_s if is_slow else rank.limit_s)
