"""What watches a run leaves healthy ones alone: random schedules of slow ranks, with the smallest limits.

All run with ``--all``. With ``COMMOPT_SEEDS=17`` a schedule that failed is run again; with
``COMMOPT_NUM_SCHEDULES=200`` there are 200 of them, which take ten minutes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
import uuid
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from healthy_fits import LIMIT_S, run_on_rank
from healthy_schedules import Schedule, draw, draw_single_fit

from support.marked_processes import Program, marked_processes
from support.ranks import PROCESSES

_HERE = Path(__file__).parent
_LAUNCHERS = ("popen", "fork", "torchrun")
_TORCHRUN = ["-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
_NUM_AT_ONCE = 4
_AFTER_S = 0.4
_LATE = 0.25
"""A rank that was late by that part of ``after_s`` may have been over its limit because of it."""
_NUM_TRIES, _MORE_TIME = 4, 3
_OF_LATENESS = ("exit statuses", "an alarm", "has not come", "report.json exists")
"""Faults that a late machine may be the reason of; wrong weights and processes that are left never are."""
_ALARM = re.compile(r"HangMonitor|^\[rank \d+\] (?!\d+ s in init_process_group)", re.MULTILINE)
"""But for a rank that has taken more than 20 s to import: it is told of, and may take its time."""
_MARK = "COMMOPT_TEST"
_GONE_S = 60.0
_FAILED_S = 5.0

_RAISING = 26
"""Of its schedule, a rank waits for a slow one while another has raised what all will catch."""
_DRAWN = [*range(int(os.environ.get("COMMOPT_NUM_SCHEDULES", "5"))), _RAISING]
_SEEDS = [int(seed) for seed in os.environ["COMMOPT_SEEDS"].split(",")] if "COMMOPT_SEEDS" in os.environ else _DRAWN


class Run:
    """The ranks of one schedule, while they run.

    Args:
        schedule: of what they do.
        launcher: "forkserver" for processes that have imported everything; or one of `_LAUNCHERS`.
        after_s: of their HangMonitor.
        folder: for all that they leave.
    """

    def __init__(self, schedule: Schedule, launcher: str, after_s: float, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.schedule, self.launcher, self.after_s, self.folder = schedule, launcher, after_s, folder
        self._mark = uuid.uuid4().hex
        self._deadline = time.monotonic() + LIMIT_S
        self._program: Program | None = None
        self._processes: list[Any] = []
        if launcher == "forkserver":
            self._processes = [
                PROCESSES.Process(target=_rank, args=(rank, schedule, after_s, folder, self._mark), daemon=False)
                for rank in range(schedule.world_size)
            ]
            for process in self._processes:
                process.start()
        else:
            start_method = "popen" if launcher == "torchrun" else launcher
            arguments = [str(_HERE / "healthy_fits.py"), str(folder), str(schedule.seed), str(after_s), start_method]
            torchrun = [*_TORCHRUN, f"--nproc-per-node={schedule.world_size}"] if launcher == "torchrun" else []
            self._program = Program([*torchrun, *arguments], folder)

    @property
    def is_over(self) -> bool:
        """Whether all ranks have ended; ends them when time is up."""
        statuses = self._statuses
        if any(statuses):
            self._deadline = min(self._deadline, time.monotonic() + _FAILED_S)
        if time.monotonic() > self._deadline:
            self.close()
        return None not in statuses and not (self._program is not None and self._program.processes())

    @property
    def _statuses(self) -> list[int | None]:
        if self._program is not None:
            return [self._program.process.poll()]
        return [process.exitcode for process in self._processes]

    def close(self) -> None:
        """Ends the ranks."""
        if self._program is not None:
            self._program.kill()
        for process in self._processes:
            process.kill()
            process.join()

    def faults(self) -> list[str]:
        """Returns what is wrong, once all ranks have ended."""
        faults = []
        if any(self._statuses):
            faults.append(f"exit statuses {self._statuses}")
        faults += [f"an alarm in {path.name}" for path in self._outputs if _ALARM.search(path.read_text())]
        for rank in range(1 if self.launcher == "fork" else self.schedule.world_size):
            faults += self._faults_of_result(rank)
        faults += [f"{path} exists" for path in self.folder.rglob("*report.json")]
        return faults + self._left()

    def _faults_of_result(self, rank: int) -> Iterable[str]:
        try:
            result = json.loads(self._read(f"result{rank}.json"))
        except ValueError:
            yield f"rank {rank} has not come to its end"
            return
        if result["steps"] != result["expected_steps"]:
            yield f"rank {rank} has made {result['steps']} steps, not {result['expected_steps']}"
        if result["differing_weights"]:
            yield f"rank {rank} has other weights: {result['differing_weights']}"
        if result["left"]:
            yield f"rank {rank} is left with {result['left']}"

    def _left(self) -> list[str]:
        deadline = time.monotonic() + _GONE_S
        while (left := marked_processes(f"{_MARK}={self._mark}")) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return [f"processes {left} are left"] if left else []

    @property
    def was_late(self) -> bool:
        """Whether the machine may have been too busy for these limits."""
        late_s = [float(path.read_text() or 0) for path in self.folder.glob("late*.txt")]
        return max(late_s, default=0.0) > _LATE * self.after_s

    @property
    def story(self) -> str:
        """All that there is to know of a run that has failed."""
        outputs = (f"{path.name}:\n{path.read_text()}" for path in self._outputs)
        return "\n".join([f"{self.launcher}, {self.schedule}", *outputs])

    @property
    def _outputs(self) -> list[Path]:
        return sorted(self.folder.glob("output*.txt"))

    def _read(self, name: str) -> str:
        path = self.folder / name
        return path.read_text(errors="replace") if path.exists() else ""


def _rank(rank: int, schedule: Schedule, after_s: float, folder: Path, mark: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
        "WORLD_SIZE": str(schedule.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        _MARK: mark,
    }
    output = os.open(folder / f"output{rank}.txt", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.chdir(folder)
    store = dist.FileStore(str(folder / "store"), schedule.world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=schedule.world_size, timeout=timedelta(seconds=LIMIT_S)
    )
    run_on_rank(schedule, after_s, folder)
    sys.stderr.flush()


def find_faults(cases: Sequence[tuple[Schedule, str]], folder: Path) -> list[str]:
    """Runs schedules with launchers, some of them at once, and returns what was wrong."""
    waiting = [(schedule, launcher, _AFTER_S, 1) for schedule, launcher in cases]
    running: list[tuple[Run, int]] = []
    found = []
    try:
        while waiting or running:
            while waiting and len(running) < _NUM_AT_ONCE:
                schedule, launcher, after_s, number = waiting.pop(0)
                run = Run(schedule, launcher, after_s, folder / f"{launcher}-{schedule.seed}-{number}")
                running.append((run, number))
            for run, number in [each for each in running if each[0].is_over]:
                running.remove((run, number))
                if faults := run.faults():
                    may_be_late = all(any(part in fault for part in _OF_LATENESS) for fault in faults)
                    if run.was_late and may_be_late and number < _NUM_TRIES:
                        waiting.append((run.schedule, run.launcher, _MORE_TIME * run.after_s, number + 1))
                    else:
                        found.append("\n".join([*faults, run.story]))
            time.sleep(0.02)
    finally:
        for run, _ in running:
            run.close()
    return found


@pytest.mark.exhaustive
def test_healthy_fits_are_left_alone(tmp_path: Path) -> None:
    """If it fails, what is to guard a run has raised a false alarm, ended it, or changed what it trains."""
    faults = find_faults([(draw(seed), "forkserver") for seed in _SEEDS], tmp_path)
    assert not faults, "\n\n".join([f"{len(faults)} of {len(_SEEDS)} schedules", *faults])


@pytest.mark.exhaustive
def test_ranks_end_later_than_others(tmp_path: Path) -> None:
    """If it fails, a rank that still uploads is ended when the process that started it has gone, or others have."""
    faults = find_faults([(draw_single_fit(seed), name) for seed, name in enumerate(_LAUNCHERS, 1)], tmp_path)
    assert not faults, "\n\n".join(faults)
