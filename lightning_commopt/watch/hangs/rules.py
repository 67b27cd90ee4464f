"""What is a hang, and when ranks may be ended because of it: decisions on the snapshots of all ranks.

A healthy run must pass all of this, however slow some of its ranks are in what others do not do at all.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_commopt.watch.hangs.marks import END, SLOW_FACTOR
from lightning_commopt.watch.hangs.snapshot import RankSnapshot


def is_hang(snapshots: Sequence[RankSnapshot], after_s: float) -> bool:
    """Returns whether a run stands still for longer than it may.

    Where a rank waits for others, all of them must have exceeded their limits. Where none waits, all ranks must be in
    training and have exceeded theirs: a rank that is alone in the end of a run, or whose others have ended, holds up
    nobody.

    Args:
        snapshots: of all ranks.
        after_s: seconds without progress.
    """
    running = [each for each in snapshots if each.state == "running"]
    if len(snapshots) < 2 or not running or any(_may_go_on(each, after_s) for each in running):
        return False
    waiting = [each for each in running if each.is_waiting]
    if not waiting:
        return len(running) == len(snapshots) and all(each.phase != END for each in running)
    # Of a rank that cannot be asked only the others' phase shows what it may do, and for how long.
    patience_s = SLOW_FACTOR * after_s if any(each.state == "silent" for each in snapshots) else 0.0
    if any(each.is_unknown for each in snapshots):
        return all(each.idle_s >= max(patience_s, each.limit_s) for each in waiting)
    return True


def may_end_ranks(snapshots: Sequence[RankSnapshot], kind: str) -> bool:
    """Returns whether ``action="abort"`` may end all ranks: some wait, for a reason that does not go away.

    Args:
        snapshots: of all ranks, of which a hang or a rank that has ended is reported.
        kind: of its diagnosis.
    """
    if kind == "interrupted" or any(each.state == "silent" for each in snapshots):
        return False
    return any(each.is_waiting or each.is_consequence for each in snapshots)


def is_waited_for(ended: RankSnapshot, snapshots: Sequence[RankSnapshot]) -> bool:
    """Returns whether others have not ended with a rank that has died, failed or was interrupted.

    Args:
        ended: that rank.
        snapshots: of all ranks.
    """
    if ended.state == "interrupted":
        return any(each.is_waiting or each.is_consequence for each in snapshots)
    return any(each.state in ("running", "stopped") or each.is_consequence for each in snapshots)


def may_be_caught(ended: RankSnapshot, snapshots: Sequence[RankSnapshot], after_s: float) -> bool:
    """Returns whether others may yet raise what a rank has raised: a program may catch it on all ranks, and go on.

    Args:
        ended: that rank, whose process lives.
        snapshots: of all ranks.
        after_s: seconds without progress.
    """
    running = [each for each in snapshots if each.state == "running"]
    return ended.state == "failed" and any(_may_go_on(each, after_s) for each in running)


def has_moved(before: Sequence[RankSnapshot], after: Sequence[RankSnapshot]) -> bool:
    """Returns whether a rank has shown progress, or ended, between two looks at all ranks."""
    earlier = {each.rank: each for each in before}
    return any(
        each.state != earlier[each.rank].state or (each.state == "running" and each.idle_s < earlier[each.rank].idle_s)
        for each in after
    )


def _may_go_on(each: RankSnapshot, after_s: float) -> bool:
    """Returns whether a running rank may still be at work in a phase that takes long."""
    if each.is_waiting:
        return each.idle_s < (each.limit_s if each.phase == END else after_s)
    # Without its stack the phase is uncertain: another callback's hook may run in any.
    is_slow = each.is_compiling or each.is_computing or each.innermost is None
    return each.idle_s < (SLOW_FACTOR * each.limit_s if is_slow else each.limit_s)
