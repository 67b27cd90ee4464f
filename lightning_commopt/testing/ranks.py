"""Runs a function on several real ranks and hands back what each returned."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lightning_commopt.testing.places import Place, candidates

# Ranks are forked from a server that has imported the slow packages once, so that two of them start in 0.15 s. As that
# is fast, each call has new ranks, which find nothing that earlier ones have left.
PROCESSES = multiprocessing.get_context("forkserver")

Answer = tuple[Any, str | None]
"""What a rank returned, and the traceback if it raised instead."""

DIED = "it died before it answered"
"""Stands for the traceback of a rank that could not send one."""

SECONDS_AFTER_A_FAILURE = 5  # time for ranks with errors of their own to report them; the others may never answer
LIMIT_S: float = 120
"""Time after which `run_on` ends ranks that have not answered. It is no measure of speed: a law takes seconds on busy
cores."""


class RankError(RuntimeError):
    """A rank raised (its traceback is in the message), died, or did not answer in time."""


class OutOfTime(Exception):  # noqa: N818 (no error)
    """The ranks could not answer in the time that was left for them, which was less than any check may take."""


def run_ranks(
    fn: Callable[..., Any],
    *args: Any,
    world_size: int = 2,
    limit_s: float = 240,
    group_timeout_s: float = 180,
    backend: str = "gloo",
    environment: Mapping[str, Mapping[str, str]] | None = None,
) -> list[Any]:
    """Calls ``fn(*args)`` on every rank of a process group, in processes of their own.

    Each rank finds ``LOCAL_RANK`` and its group as a Lightning ``Trainer`` would after
    launching, so that ``Trainer(devices=world_size, accelerator="cpu")`` works inside ``fn``.

    Args:
        fn: a function at module level; it and what it returns are pickled.
        args: handed to ``fn`` on every rank.
        world_size: number of ranks.
        limit_s: seconds after which ranks that have not answered are ended.
        group_timeout_s: seconds after which a collective without an answer raises.
        backend: backend of the process group.
        environment: variables of each rank, by its number as text.

    Returns:
        What each rank returned, in the order of ranks.

    Raises:
        RankError: a rank raised (its traceback is in the message), died, or sent nothing
            for ``limit_s`` seconds.
    """
    job = Job(fn, args, world_size, group_timeout_s, backend, environment or {})
    return values_of(collect_answers(job, limit_s, SECONDS_AFTER_A_FAILURE), world_size, limit_s)


def run_on(place: Place, fn: Callable[..., Any], *args: Any, environment: Mapping[str, str] | None = None) -> Any:
    """Calls ``fn(*args, place)`` on the ranks of this place, with further variables of all of them; see `run_ranks`.

    Raises:
        OutOfTime: the place's time ends before `LIMIT_S`.
    """
    left_s = place.ends_at - time.monotonic()
    if left_s <= 0:
        raise OutOfTime
    ranks = map(str, range(place.num_ranks))
    variables = {rank: {**place.environment.get(rank, {}), **(environment or {})} for rank in ranks}
    options: dict[str, Any] = {"world_size": place.num_ranks, "backend": place.backend, "environment": variables}
    try:
        limit_s = min(LIMIT_S, left_s)
        return run_ranks(fn, *args, place, **options, limit_s=limit_s, group_timeout_s=place.timeout_s)
    except RankError:
        if left_s < LIMIT_S and time.monotonic() >= place.ends_at:
            raise OutOfTime from None
        raise


def find_place(device: str, num_ranks: int = 2) -> tuple[Place, dict[str, str]]:
    """Returns the best place where ranks run, and those that refuse them, with why.

    Args:
        device: one of `DEVICES`.
        num_ranks: how many ranks.

    Raises:
        ValueError: the device is unknown, or there is none of its kind.
        RankError: ranks can run nowhere here.
    """
    refused: dict[str, str] = {}
    for place in candidates(device, num_ranks):
        try:
            run_on(place, _try)
            return place, refused
        except RankError as error:
            refused[place.name] = last_line(error)
    raise RankError("; ".join(f"{name}: {reason}" for name, reason in refused.items()))


def _try(place: Place) -> None:
    value = torch.ones(1, device=place.device(dist.get_rank()))
    dist.all_reduce(value)
    assert value.item() == dist.get_world_size()


def prepare_rank(place: Place) -> None:
    """Makes a rank's device the current one, for what compressors compute there."""
    if place.device_type == "cuda":
        torch.cuda.set_device(place.device(dist.get_rank()))
    # Compressors for nodes are tried on one host, where each rank counts as a node.
    warnings.filterwarnings("ignore", message="comm_hook: 'hierarchical' has no effect")


def last_line(error: Exception) -> str:
    """Returns the last line of an error's text, which in a `RankError` is what the rank has raised."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1].removeprefix("AssertionError: ")


class Job(NamedTuple):
    """What ranks are started for; see `run_ranks`."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    world_size: int
    group_timeout_s: float
    backend: str
    environment: Mapping[str, Mapping[str, str]]


def collect_answers(job: Job, limit_s: float, grace_s: float) -> dict[int, Answer]:
    """Starts the ranks, collects the answers that come in time, and leaves no process behind."""
    answers: dict[int, Answer] = {}
    with tempfile.TemporaryDirectory() as folder:
        pipes = [PROCESSES.Pipe(duplex=False) for _ in range(job.world_size)]
        processes = [
            PROCESSES.Process(target=_rank, args=(rank, folder, pipe, job), daemon=False)
            for rank, (_, pipe) in enumerate(pipes)
        ]
        try:
            for process, (_, pipe) in zip(processes, pipes, strict=True):
                process.start()
                pipe.close()  # the rank's end is only the rank's now: when it dies, ours is at its end
            wait_for_answers(answers, [pipe for pipe, _ in pipes], limit_s, grace_s)
        finally:
            for rank, process in enumerate(processes):
                if process.pid is not None:
                    process.join(timeout=5 if rank in answers else 0)
                    process.kill()
                    process.join()
            for pipe, _ in pipes:
                pipe.close()
    return answers


def wait_for_answers(answers: dict[int, Answer], pipes: list[Connection], limit_s: float, grace_s: float) -> None:
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
                answers[waiting[pipe]] = None, DIED
        if any(trace is not None for _, trace in answers.values()):
            end = min(end, time.monotonic() + grace_s)


def values_of(answers: dict[int, Answer], world_size: int, limit_s: float) -> list[Any]:
    """Returns what ranks returned, in their order; raises a RankError if one has raised, or not answered."""
    # Answers are in the order in which they came, so that the rank that failed first is named.
    for rank, (_, trace) in answers.items():
        if trace is not None:
            raise RankError(f"rank {rank} raised\n{trace}")
    check_all_answered(answers, world_size, limit_s)
    return [answers[rank][0] for rank in range(world_size)]


def check_all_answered(answers: dict[int, Answer], world_size: int, limit_s: float) -> None:
    """Raises a RankError if a rank's answer is missing."""
    if len(answers) < world_size:
        traces = "".join(f"\nrank {rank}: {trace}" for rank, (_, trace) in answers.items() if trace)
        raise RankError(f"only ranks {sorted(answers)} answered within {limit_s} s{traces}")


def _rank(rank: int, folder: str, pipe: Connection, job: Job) -> None:
    answer = run_job(rank, folder, job)
    try:
        pipe.send_bytes(answer)
        pipe.close()
    finally:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def run_job(rank: int, folder: str, job: Job) -> bytes:
    """Makes this process a rank of a new group that meets in an empty folder; returns its pickled `Answer`."""
    if sys.stderr is not None:  # as with 2>&-
        faulthandler.enable()  # otherwise a rank that crashes leaves no trace
    torch.set_num_threads(1)
    os.environ.update(job.environment.get(str(rank), {}))
    os.environ.update(
        LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(job.world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT="1"
    )
    os.chdir(folder)
    try:
        store = dist.FileStore(str(Path(folder) / "store"), job.world_size)  # a file, so that no port can be taken
        timeout = timedelta(seconds=job.group_timeout_s)
        dist.init_process_group(job.backend, store=store, rank=rank, world_size=job.world_size, timeout=timeout)
        store.set(f"connected/{rank}", "")  # gloo fails on a rank that still connects to one that has ended
        store.wait([f"connected/{other}" for other in range(job.world_size)])
        # By plain pickle: multiprocessing's own only lends tensors, and this process may be gone when they are fetched.
        return pickle.dumps((job.fn(*job.args), None))
    except BaseException:
        return pickle.dumps((None, traceback.format_exc()))
