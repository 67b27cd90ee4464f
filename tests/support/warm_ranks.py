"""Ranks that stay for the next function of the same file of tests: a start and a first fit take as long as five more.

For functions that leave nothing behind in their process but what `_forget` puts back.
"""

import gc
import os
import pickle
import random
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commopt.testing.ranks import SECONDS_AFTER_A_FAILURE, Answer, Job, run_job, values_of, wait_for_answers
from support.ranks import PROCESSES


@dataclass
class _Ranks:
    # Removed when all ranks have ended: a FileStore waits for its file when it is deleted.
    folder: tempfile.TemporaryDirectory[str] = field(default_factory=tempfile.TemporaryDirectory)
    processes: list[BaseProcess] = field(default_factory=list)
    pipes: list[Connection] = field(default_factory=list)

    def start(self, world_size: int) -> list[Connection]:
        """Returns a pipe to each of so many ranks."""
        while len(self.pipes) < world_size:
            ours, theirs = PROCESSES.Pipe()
            process = PROCESSES.Process(target=_serve, args=(len(self.pipes), theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
        return self.pipes[:world_size]

    def end(self) -> None:
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()
        self.folder.cleanup()


_KEPT: list[_Ranks] = []
"""The ranks, if there are any."""


def run_ranks(
    fn: Callable[..., Any], *args: Any, world_size: int = 2, limit_s: float = 240, group_timeout_s: float = 180
) -> list[Any]:
    """Like `support.ranks.run_ranks`, but on processes that run further functions afterwards."""
    if not _KEPT:
        _KEPT.append(_Ranks())
    pipes = _KEPT[0].start(world_size)
    answers: dict[int, Answer] = {}
    try:
        folder = tempfile.mkdtemp(dir=_KEPT[0].folder.name)
        order = pickle.dumps((folder, Job(fn, args, world_size, group_timeout_s, "gloo", {})))
        for pipe in pipes:
            pipe.send_bytes(order)
        wait_for_answers(answers, pipes, limit_s, SECONDS_AFTER_A_FAILURE)
        return values_of(answers, world_size, limit_s)
    except BaseException:
        end_ranks()
        raise


def end_ranks() -> None:
    """Ends all ranks, whatever they do."""
    while _KEPT:
        _KEPT.pop().end()


def _serve(rank: int, pipe: Connection) -> None:
    gc.freeze()  # what has been imported: else each collection takes as long as a fit
    environment, state = dict(os.environ), torch.get_rng_state()
    with suppress(EOFError):  # the process that tests has ended
        while True:
            folder, job = pickle.loads(pipe.recv_bytes())
            pipe.send_bytes(run_job(rank, folder, job))
            _forget(environment, state)


def _forget(environment: dict[str, str], state: Tensor) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)
    torch.set_rng_state(state)
    random.seed(0)
    np.random.seed(0)
    gc.collect()
