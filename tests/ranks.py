"""Runs a function on several real ranks and hands back what each returned."""

import contextlib
import multiprocessing
import os
import pickle
import queue
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Ranks are forked from a server that has imported the slow packages once.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(
    ["torch.distributed", "torch._dynamo", "lightning.pytorch", "lightning_commopt.strategy.ddp", "pytest"]
)


def run_ranks(
    fn: Callable[..., Any], *args: Any, world_size: int = 2, limit_s: float = 90, group_timeout_s: float = 60
) -> list[Any]:
    """Calls ``fn(*args)`` on every rank of a gloo group, in processes of their own.

    Each rank finds ``LOCAL_RANK`` and its group as a Lightning ``Trainer`` would after
    launching, so that ``Trainer(devices=world_size, accelerator="cpu")`` works inside ``fn``.

    Args:
        fn: a function at module level; it and what it returns are pickled.
        args: handed to ``fn`` on every rank.
        world_size: number of ranks.
        limit_s: seconds to wait for each answer.
        group_timeout_s: seconds after which a collective without an answer raises.

    Returns:
        What each rank returned, in the order of ranks.

    Raises:
        AssertionError: a rank raised (its traceback is in the message) or said nothing
            for ``limit_s`` seconds.
    """
    answers = run_ranks_or_raise(fn, *args, world_size=world_size, limit_s=limit_s, group_timeout_s=group_timeout_s)
    for rank, (_, trace) in enumerate(answers):
        assert trace is None, f"rank {rank} raised\n{trace}"
    return [value for value, _ in answers]


def run_ranks_or_raise(
    fn: Callable[..., Any], *args: Any, world_size: int, limit_s: float = 90, group_timeout_s: float = 60
) -> list[tuple[Any, str | None]]:
    """Like `run_ranks`, for tests of failures: each answer is (value, traceback or None)."""
    answers = _PROCESSES.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            _PROCESSES.Process(
                target=_rank, args=(rank, world_size, folder, answers, group_timeout_s, fn, args), daemon=False
            )
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        returned: dict[int, tuple[Any, str | None]] = {}
        try:
            while len(returned) < world_size:
                rank, value, trace = answers.get(timeout=limit_s)
                returned[rank] = None if value is None else pickle.loads(value), trace
                if trace is not None and group_timeout_s > limit_s:
                    break
        except queue.Empty:
            silent = sorted(set(range(world_size)) - set(returned))
            said = "\n".join(f"rank {rank}: {trace}" for rank, (_, trace) in returned.items() if trace)
            raise AssertionError(f"ranks {silent} said nothing for {limit_s} s\n{said}") from None
        finally:
            for process in ranks:
                process.join(timeout=5 if len(returned) == world_size else 0)
                process.kill()
                process.join()
    return [returned[rank] for rank in range(world_size)]


def _rank(
    rank: int,
    world_size: int,
    folder: str,
    answers: Any,
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
        # As bytes: a queue would only lend tensors, and this process may be gone before they are fetched.
        answers.put((rank, pickle.dumps(fn(*args)), None))
    except BaseException:
        answers.put((rank, None, traceback.format_exc()))
    finally:
        answers.close()
        answers.join_thread()  # the answer is on its way, whatever the end of the group does
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
