"""Runs a function on several real ranks and hands back what each returned."""

import contextlib
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Ranks are forked from a server that has imported the slow packages once: two of them take 0.15 s to start, which is
# why each call has new ones, and no test finds what another has left.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(
    ["torch.distributed", "torch._dynamo", "lightning.pytorch", "lightning_commopt.strategy.ddp", "pytest"]
)
_GRACE_S = 5

Answer = tuple[Any, str | None]
"""What a rank returned, and the traceback if it raised instead."""


def run_ranks(
    fn: Callable[..., Any], *args: Any, world_size: int = 2, limit_s: float = 240, group_timeout_s: float = 180
) -> list[Any]:
    """Calls ``fn(*args)`` on every rank of a gloo group, in processes of their own.

    Each rank finds ``LOCAL_RANK`` and its group as a Lightning ``Trainer`` would after
    launching, so that ``Trainer(devices=world_size, accelerator="cpu")`` works inside ``fn``.

    Args:
        fn: a function at module level; it and what it returns are pickled.
        args: handed to ``fn`` on every rank.
        world_size: number of ranks.
        limit_s: seconds that all of it may take; no measure of speed, only against waiting for ever.
        group_timeout_s: seconds after which a collective without an answer raises.

    Returns:
        What each rank returned, in the order of ranks.

    Raises:
        AssertionError: a rank raised (its traceback is in the message), died, or said nothing
            for ``limit_s`` seconds.
    """
    answers = _run(fn, args, world_size, group_timeout_s, limit_s, grace_s=_GRACE_S)
    for rank, (_, trace) in answers.items():  # in the order in which they answered: who failed first is named
        assert trace is None, f"rank {rank} raised\n{trace}"
    _assert_all_answered(answers, world_size, limit_s)
    return [answers[rank][0] for rank in range(world_size)]


def run_ranks_or_raise(
    fn: Callable[..., Any], *args: Any, world_size: int, limit_s: float = 240, group_timeout_s: float = 180
) -> list[Answer]:
    """Like `run_ranks`, for tests of failures: waits for all ranks, each answer is (value, traceback or None)."""
    answers = _run(fn, args, world_size, group_timeout_s, limit_s, grace_s=limit_s)
    _assert_all_answered(answers, world_size, limit_s)
    return [answers[rank] for rank in range(world_size)]


def _run(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    world_size: int,
    group_timeout_s: float,
    limit_s: float,
    grace_s: float,
) -> dict[int, Answer]:
    """Starts the ranks, collects the answers that come in time, and leaves no process behind."""
    answers: dict[int, Answer] = {}
    with tempfile.TemporaryDirectory() as folder:
        pipes = [_PROCESSES.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            _PROCESSES.Process(
                target=_rank, args=(rank, world_size, folder, pipe, group_timeout_s, fn, args), daemon=False
            )
            for rank, (_, pipe) in enumerate(pipes)
        ]
        try:
            for process, (_, pipe) in zip(processes, pipes, strict=True):
                process.start()
                pipe.close()  # the rank's end is only the rank's now: when it dies, ours is at its end
            _collect(answers, [pipe for pipe, _ in pipes], limit_s, grace_s)
        finally:
            for rank, process in enumerate(processes):
                if process.pid is not None:
                    process.join(timeout=5 if rank in answers else 0)
                    process.kill()
                    process.join()
            for pipe, _ in pipes:
                pipe.close()
    return answers


def _collect(answers: dict[int, Answer], pipes: list[Connection], limit_s: float, grace_s: float) -> None:
    """Waits for the ranks' answers; ``grace_s`` once one of them has raised, as the others may wait for it."""
    end = time.monotonic() + limit_s
    while waiting := {pipe: rank for rank, pipe in enumerate(pipes) if rank not in answers}:
        ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                answers[waiting[pipe]] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                answers[waiting[pipe]] = None, "it died before it answered"
        if any(trace is not None for _, trace in answers.values()):
            end = min(end, time.monotonic() + grace_s)


def _assert_all_answered(answers: dict[int, Answer], world_size: int, limit_s: float) -> None:
    said = "".join(f"\nrank {rank}: {trace}" for rank, (_, trace) in answers.items() if trace)
    assert len(answers) == world_size, f"only ranks {sorted(answers)} answered within {limit_s} s{said}"


def _rank(
    rank: int,
    world_size: int,
    folder: str,
    pipe: Connection,
    group_timeout_s: float,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT="1"
    )
    os.chdir(folder)
    store = dist.FileStore(str(Path(folder) / "store"), world_size)  # a file, so that no port can be taken
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=group_timeout_s)
    )
    try:
        # By plain pickle: multiprocessing's own only lends tensors, and this process may be gone when they are fetched.
        answer = pickle.dumps((fn(*args), None))
    except BaseException:
        answer = pickle.dumps((None, traceback.format_exc()))
    try:
        pipe.send_bytes(answer)
        pipe.close()
    finally:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
