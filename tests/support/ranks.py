"""Runs a function on several real ranks: that of the package, with what tests need imported before ranks are forked."""

from collections.abc import Callable
from typing import Any

from lightning_commopt.testing.ranks import (
    PROCESSES,
    Answer,
    Job,
    RankError,
    check_all_answered,
    collect_answers,
    run_ranks,
)
from support.lightnings import ADAPTER, PACKAGE

__all__ = ["RankError", "run_ranks", "run_ranks_or_raise"]

_CALLBACKS = ("comm_time", "hang_monitor", "nvtx_ranges", "run_recorder")  # with Hydra, each rank imports for 0.3 s
PROCESSES.set_forkserver_preload(
    [
        *("torch.distributed", "torch._dynamo", "pytest", PACKAGE, ADAPTER, "lightning_commopt.testing"),
        *(f"lightning_commopt.callbacks.{name}" for name in _CALLBACKS),
    ]
)


def run_ranks_or_raise(
    fn: Callable[..., Any], *args: Any, world_size: int, limit_s: float = 240, group_timeout_s: float = 180
) -> list[Answer]:
    """Like `run_ranks`, where failures are expected: waits for all ranks, each answer is (value, traceback or None)."""
    answers = collect_answers(Job(fn, args, world_size, group_timeout_s, "gloo", {}), limit_s, limit_s)
    check_all_answered(answers, world_size, limit_s)
    return [answers[rank] for rank in range(world_size)]
