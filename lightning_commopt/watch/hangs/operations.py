"""Finds operations on a rank's stack: those that need all ranks but were called on one, and a debugger's prompt."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_commopt.watch.hangs.snapshot import SIGTERM_BROADCAST, RankSnapshot

# By the kind of an operation, functions with the last two parts of their file's path, as `RankSnapshot.frames` has
# them; an empty function stands for any. The first kind counts that is on the stack: logging calls metrics.
_FUNCTIONS = {
    "save": (("trainer/trainer.py", "save_checkpoint"),),
    "log": (("logger_connector/result.py", ""),),
    "log_dir": (("trainer/trainer.py", "log_dir"),),
    "metric": (("torchmetrics/metric.py", ""),),
    "state": (
        ("checkpoint/state_dict.py", ""),
        ("tensor/_api.py", "full_tensor"),
        ("tensor/_api.py", "redistribute"),
    ),
    "sharded": (("_fully_shard/_fsdp_state.py", "_pre_forward"), ("_fully_shard/_fsdp_param_group.py", "unshard")),
}
_RANK_ZERO_ONLY = ("/rank_zero.py wrapped_fn",)
_PROMPTS = ("/pdb.py interaction", "/pydevd.py do_wait_suspend")
_BATCH = "loops/training_epoch_loop.py advance"


def kind_of(rank: RankSnapshot) -> str | None:
    """Returns what a waiting rank has called: a key of `_FUNCTIONS`, "own" for the user's own code, or None."""
    if not rank.is_waiting or rank.is_syncing or rank.hook == SIGTERM_BROADCAST:
        return None
    for kind, functions in _FUNCTIONS.items():
        if any(frame.startswith(f"{file} {function}") for frame in rank.frames for file, function in functions):
            return kind
    return "own" if rank.place is not None else None


def called_alone(ranks: Sequence[RankSnapshot]) -> dict[str, list[RankSnapshot]]:
    """Returns by kind the ranks in operations that other waiting ranks are not in, the most specific kind first."""
    by_kind: dict[str, list[RankSnapshot]] = {}
    waiting = [rank for rank in ranks if rank.is_waiting]
    for kind in (*_FUNCTIONS, "own"):
        inside = [rank for rank in waiting if kind_of(rank) == kind]
        if inside and len(inside) < len(waiting):
            by_kind[kind] = inside
    return by_kind


def is_under_rank_zero_only(rank: RankSnapshot) -> bool:
    """Returns whether Lightning's decorator keeps other ranks from what this one does."""
    return any(frame.endswith(_RANK_ZERO_ONLY) for frame in rank.frames)


def is_in_batch(rank: RankSnapshot) -> bool:
    """Returns whether a rank is within one of training's batches, in a hook at its end for instance."""
    return _BATCH in rank.frames


def is_debugged(rank: RankSnapshot) -> bool:
    """Returns whether somebody is at a debugger's prompt in a rank, or has stopped its process with a debugger."""
    return rank.process.startswith("stopped by a debugger") or any(frame.endswith(_PROMPTS) for frame in rank.frames)
