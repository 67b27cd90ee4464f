"""The fake device as tests see it: ranks that run on it, and there, the schedules of its streams."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fake_device.build import Libraries
from fake_device.loading import begin_schedule, end_schedule, runtime

_STREAMS = Path(__file__).parents[1]
_NOT_FINITE = "(not finite)"
_GRACE_S = 60  # of the launcher, which has limits of its own


class Outcome(NamedTuple):
    """Digests of what is at the end of a run on a rank."""

    parameters: str
    residuals: str  # which ranks have of their own
    buffers: str = ""  # likewise


class FakeDevice:
    """A process whose ranks have the fake device.

    Args:
        libraries: of the device.
    """

    def __init__(self, libraries: Libraries) -> None:
        self._libraries = libraries
        self._start()

    def _start(self) -> None:
        self._jobs, theirs = multiprocessing.Pipe()
        path = os.pathsep.join([*sys.path, str(_STREAMS)])  # where pytest finds what jobs import
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fake_device.launcher", str(theirs.fileno()), *map(str, self._libraries)],
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()

    def run_ranks(self, fn: Callable[..., Any], *args: Any, world_size: int = 2, limit_s: float = 120) -> list[Any]:
        """Calls ``fn(*args)`` on every rank; returns what each has returned. See `run_ranks` of the selftest."""
        self._jobs.send((fn, args, {"world_size": world_size, "limit_s": limit_s, "group_timeout_s": limit_s}))
        if not self._jobs.poll(limit_s + _GRACE_S):
            raise RuntimeError(f"ranks on the fake device have not answered within {limit_s + _GRACE_S} s")
        answers, error = self._jobs.recv()
        if error is not None:
            raise RuntimeError(error)
        return answers

    def close(self) -> None:
        """Ends the process, and ranks that it may have."""
        self._jobs.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def in_all_schedules(run: Callable[[], Outcome]) -> dict[str, Outcome]:
    """Runs a program of this rank with all streams prompt, with all of them late, and with each of them prompt alone.

    Returns:
        What it returned each time.
    """
    with _schedule(late=0):
        results = {"all prompt": run()}
    num_streams = runtime().fake_device_num_streams()
    everything = (1 << num_streams) - 1
    with _schedule(everything):
        results["all late"] = run()
    for number in range(num_streams):
        with _schedule(everything & ~(1 << number)):
            results[f"only stream {number} prompt"] = run()
    return results


def differences(found: Sequence[Mapping[str, Outcome]]) -> list[str]:
    """Says where a run has not ended as with all streams prompt: there nothing is too early. Ranks must agree."""
    expected = found[0]["all prompt"].parameters
    return [
        f"rank {rank}, {schedule}: {outcome} instead of {its_own['all prompt']}, with parameters {expected}"
        for rank, its_own in enumerate(found)
        for schedule, outcome in its_own.items()
        if outcome != its_own["all prompt"]._replace(parameters=expected) or _NOT_FINITE in "".join(outcome)
    ]


def digest(tensors: Iterable[Tensor]) -> str:
    """Returns a short name for the bits of tensors, which says whether all of them are finite."""
    values = torch.cat([torch.zeros(0), *(tensor.detach().float().flatten().cpu() for tensor in tensors)])
    short = hashlib.sha256(values.numpy().tobytes()).hexdigest()[:12]
    return short if values.isfinite().all() else f"{short} {_NOT_FINITE}"


@contextmanager
def _schedule(late: int) -> Iterator[None]:
    """Makes those streams late whose bits are set, in the order of their first work in this context."""
    begin_schedule(late)
    try:
        yield
    finally:
        end_schedule()
