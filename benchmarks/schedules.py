"""Random programs of two or three ranks, healthy and faulty, and how each ends.

Usage: schedules.py [--num 200] [--first 0] [--at-once 2] [--output FILE] [--fail]

A healthy program must end with status 0, without an alarm and with equal weights on all ranks; a faulty one with a
status that its fault allows and a message that names it. No process may be left. Only outcomes count, no times, so
other work may run beside it. Results are written after every ten programs; one that is in the file already is not run
again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forked_ranks import ForkedProcess, start
from results_file import write_result
from schedule_job import Schedule, draw, run

_SCRIPT = Path(__file__).with_name("schedule_job.py")
_TORCHRUN = ("-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0")
_LIMIT_S = 900.0
"""Of a program that runs beside other work; torch's own limits are half an hour."""
_GONE_S = 300.0
_WRITE_EVERY = 10
_ALARM = re.compile(r"has waited for .* and ends|has died|HangMonitor: rank|before it joined|Segmentation fault")
_CUT_OFF = "Connection (closed|reset)|terminated with code"
"""Over gloo, ranks often notice by themselves that a process has gone, and Lightning reports children of rank 0."""


def allowed_statuses(schedule: Schedule) -> set[int]:
    """Returns the statuses with which the program may end: that of rank 0, or of torchrun."""
    if not schedule.fault:
        return {0}
    if schedule.launcher == "torchrun":
        return {1}
    killed_by_lightning = -signal.SIGKILL  # which ends rank 0 when a child has failed
    what, number, *_ = schedule.fault.split()
    if schedule.fault_rank > 0:
        statuses = {1, killed_by_lightning}
        return statuses | {0} if schedule.fault == "raise after" else statuses
    own = {"raise": 1, "kill": -signal.SIGKILL, "exit": int(number) if number.isdecimal() else 0}[what]
    return {own} if own == 0 else {own, killed_by_lightning}


def expected_message(schedule: Schedule) -> str:
    """Returns a pattern of what a faulty program must print."""
    rank, fault = schedule.fault_rank, schedule.fault
    if fault.startswith("raise"):
        return rf"ArithmeticError: broken on purpose {fault.partition(' ')[2]}, seed {schedule.seed}"
    if fault == "exit 0 before":
        return rf"rank {rank} on \S+ has ended( with status 0)? before it joined"
    if fault == "exit 3 in step":
        return rf"Rank {rank} has ended the fit with SystemExit\(3\)|exitcode +: 3|{_CUT_OFF}"
    return rf"[Rr]ank {rank} .*(has died|SIGKILL|has ended before it joined)|Signal 9|{_CUT_OFF}"


class Program:
    """A program that runs."""

    def __init__(self, schedule: Schedule, folder: Path) -> None:
        self.schedule, self.folder = schedule, folder
        self._output = folder / "output.txt"
        self._output.touch()
        self._mark = f"COMMOPT_RUN={uuid.uuid4().hex}"
        self._deadline = time.monotonic() + _LIMIT_S
        name, _, value = self._mark.partition("=")
        environment = {**os.environ, name: value, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._process: ForkedProcess | subprocess.Popen[bytes]
        if schedule.launcher == "forked":
            self._process = start(lambda: run(schedule, folder), self._output, environment)
            return
        torchrun = (*_TORCHRUN, f"--nproc-per-node={schedule.num_ranks}") if schedule.launcher == "torchrun" else ()
        command = [sys.executable, *torchrun, str(_SCRIPT), str(schedule.seed), str(folder)]
        with self._output.open("w") as output:
            self._process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    @property
    def is_over(self) -> bool:
        """Whether none of its processes is left, or time is up."""
        if self._process.poll() is not None:
            self._deadline = min(self._deadline, time.monotonic() + _GONE_S)
        return (self._process.poll() is not None and not self._left()) or time.monotonic() > self._deadline

    def result(self) -> dict[str, Any]:
        """Returns how the program has ended, and what is wrong with that; ends what is left of it."""
        status, left, output = self._process.poll(), self._left(), self._output.read_text(errors="replace")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wrong = [f"{len(left)} processes are left"] if left else []
        if status not in (allowed := allowed_statuses(self.schedule)):
            wrong.append(f"status {status}, not in {sorted(allowed)}")
        if self.schedule.fault:
            if not re.search(expected_message(self.schedule), output):
                wrong.append(f"the output has no {expected_message(self.schedule)}")
        else:
            wrong += [f"alarm: {found[0]}" for found in _ALARM.finditer(output)]
            wrong += self._compare_weights()
        result = {**asdict(self.schedule), "status": status, "wrong": wrong}
        return result | {"output": output[-6000:]} if wrong else result

    def _compare_weights(self) -> list[str]:
        digests = [path.read_text() for path in self.folder.glob("weights*")]
        if len(digests) != self.schedule.num_ranks:
            return [f"{len(digests)} ranks have come to their end"]
        return ["weights differ between ranks"] if len(set(digests)) > 1 else []

    def _left(self) -> list[int]:
        return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal() and self._owns(entry)]

    def _owns(self, entry: Path) -> bool:
        try:
            state, _, _, session = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:4]
            is_marked = int(session) == self._process.pid or self._mark.encode() in (entry / "environ").read_bytes()
            return state not in "ZX" and is_marked
        except OSError:
            return False


def run_all(schedules: list[Schedule], at_once: int, on_result: Any) -> None:
    """Runs programs, some of them at once; hands over the result of each."""
    waiting, running = [*schedules], list[Program]()
    root = tempfile.mkdtemp()  # a TemporaryDirectory would be removed by the first forked program that ends
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                folder = Path(root, str(waiting[0].seed))
                folder.mkdir()
                running.append(Program(waiting.pop(0), folder))
            for program in [program for program in running if program.is_over]:
                running.remove(program)
                on_result(program.result())
            time.sleep(0.2)
    finally:
        shutil.rmtree(root)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--fail", action="store_true", help="end with status 1 if a program ends otherwise")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    results: list[dict[str, Any]] = []
    if options.output is not None and options.output.exists():
        results = json.loads(options.output.read_text())["schedules"]
    done = {result["seed"] for result in results}
    schedules = [draw(seed) for seed in range(options.first, options.first + options.num) if seed not in done]

    def keep(result: dict[str, Any]) -> None:
        results.append(result)
        verdict = "; ".join(result["wrong"]) or "right"
        program = f"{result['seed']}: {result['strategy']}, {result['launcher']}, {result['fault'] or 'healthy'}"
        print(f"{program}: {verdict}", flush=True)
        is_last = len(results) == len(done) + len(schedules)
        if options.output is not None and (is_last or len(results) % _WRITE_EVERY == 0):
            write_result(options.output, _summary(results), load)

    run_all(schedules, options.at_once, keep)
    wrong = [result for result in results if result["wrong"]]
    print(f"{len(results) - len(wrong)} of {len(results)} programs have ended as they must")
    if options.fail and wrong:
        sys.exit(json.dumps(wrong, indent=1))


def _summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    faulty = [result for result in results if result["fault"]]
    return {
        "num_healthy": len(results) - len(faulty),
        "num_faulty": len(faulty),
        "num_wrong": sum(bool(result["wrong"]) for result in results),
        "schedules": sorted(results, key=lambda result: result["seed"]),
    }


if __name__ == "__main__":
    main()
