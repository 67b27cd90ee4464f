"""All that a GPU can tell, in one command of about ten minutes that may be cut at any time.

Parts run in order of value, each in processes of its own that are all ended at its limit: first, beside each other,
those that time nothing, then the others one by one. After each row of the result the JSON file and the Markdown table
are written anew. A part that fails is a row with its error, and the next one goes on. With several GPUs each rank has
its own; with one GPU two ranks share it, as two hosts. Slow links are those of the network lab, where this machine can
make one. The exit status is 1 if something is wrong or has failed.

python benchmarks/gpu.py
python benchmarks/gpu.py --limit 480 --output FOLDER --parts parity,ladder
python benchmarks/gpu.py --device cpu --output FOLDER    # a dry run with tiny models: its times mean nothing
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch
from gpu_parts import PARTS, Part, Program, Setting, command_of
from gpu_ranks import ROW, Place, last_error
from gpu_report import Report, read_json
from gpu_rows import row

from lightning_commopt.launch.lab import RankError, why_not
from lightning_commopt.launch.process import InterruptedRun, raise_signals, run_ranks

_LIMIT_S = 600.0
"""In which all parts have the limits of `PARTS`."""
_LEFT_S = 1.0  # of a program's limit for what comes after it
_RUN, _MARK = "COMMOPT_GPU_RUN", "COMMOPT_GPU_PROGRAM"
_RUN_ID = uuid.uuid4().hex
_is_over = threading.Event()  # no program is to be started any more
_GONE_S = 10.0
_POLL_S = 0.05


def run_program(
    command: list[str], environment: dict[str, str], limit_s: float, on_output: Callable[[bytes], None]
) -> tuple[int | None, str]:
    """Runs a program, and ends every process that it has started, those in sessions of their own too.

    Returns:
        Its exit status, None where it reached its limit, and what it has printed.
    """
    mark = uuid.uuid4().hex
    try:
        [output] = run_ranks(
            [(command, {**environment, _RUN: _RUN_ID, _MARK: mark})],
            on_output=lambda _, part: on_output(part),
            timeout_s=limit_s,
        )
        return 0, output
    except RankError as error:
        return error.status, error.outputs[0]
    finally:
        _end_marked(f"{_MARK}={mark}".encode())


def _end_marked(mark: bytes) -> None:
    ends_at = time.monotonic() + _GONE_S
    while (left := _marked(mark)) and time.monotonic() < ends_at:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)


def _marked(mark: bytes) -> list[int]:
    """Returns the processes that had a variable in their environment when they started, and still run."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes():
                state = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
                found += [int(entry.name)] if state not in "ZX" else []
    return found


class Rows:
    """Adds the rows of a program to the report: those that it prints, and those of its file.

    Args:
        report: that they are added to.
        part: theirs.
        program: that makes them.

    Attributes:
        error: why its file could not be read the last time.
    """

    def __init__(self, report: Report, part: str, program: Program) -> None:
        self._report, self._part, self._program = report, part, program
        self._unfinished = b""
        self.error: str | None = None

    def read(self, printed: bytes) -> None:
        """Takes the next part of what the program prints."""
        *lines, self._unfinished = (self._unfinished + printed).split(b"\n")
        for line in lines:
            if line.startswith(ROW.encode()):
                self._report.add(self._part, json.loads(line[len(ROW) :]))
        self.read_file()

    def read_file(self) -> None:
        """Takes what is in the program's file by now."""
        if self._program.output is None or self._program.read is None:
            return
        self.error, found = None, read_json(self._program.output)
        try:
            for each in self._program.read(found) if found is not None else ():
                self._report.add(self._part, each)
        except Exception as error:  # it would end the program, or hide why that has ended
            self.error = f"{type(error).__name__}: {error}"


def run_part(name: str, part: Part, setting: Setting, report: Report, limit_s: float) -> None:
    """Runs the programs of a part one after another."""
    start_s = time.monotonic()
    report.begin(name, part.title, limit_s)
    known = part.known(report.parts)
    for each in (*part.notes(setting), *known):
        report.add(name, each)
    programs = [] if known else part.programs(setting)
    for at, program in enumerate(programs):
        if _is_over.is_set():
            return
        remaining_s = start_s + limit_s - time.monotonic()
        if remaining_s < program.least_s:
            report.add(name, row(program.name, "no time left", "not run"))
            continue
        share_s = remaining_s * program.share / sum(other.share for other in programs[at:])
        own_s = max(share_s, program.least_s)
        if program.output is not None:
            program.output.unlink(missing_ok=True)  # of an earlier run on this day
        rows = Rows(report, name, program)
        environment = {**setting.place.environment, **os.environ}
        try:
            status, output = run_program(command_of(program, own_s - _LEFT_S), environment, own_s, rows.read)
        finally:
            rows.read_file()
        if _is_over.is_set():
            return
        if rows.error is not None:
            report.add(name, row(f"{program.name}, its file", rows.error, "failed"))
        if status is None:
            report.add(name, row(f"{program.name}: what is left", f"cut after {own_s:.0f} s", "cut"))
        elif status:
            report.add(name, row(program.name, f"ended with status {status}: {last_error(output)}", "failed"))
    report.end(name, time.monotonic() - start_s)


def run_all(names: list[str], setting: Setting, report: Report, limit_s: float) -> None:
    """Runs parts until the time is up: those that time nothing beside each other, then the others one by one."""
    ends_at, scale = time.monotonic() + limit_s, limit_s / _LIMIT_S
    beside = [name for name in names if not PARTS[name].is_timed]
    own_s = {name: min(max(PARTS[name].least_s, PARTS[name].limit_s * scale), limit_s) for name in names}
    running: list[Future[None]] = []
    with ThreadPoolExecutor(max(1, len(beside))) as pool:
        try:
            running += [pool.submit(run_part, name, PARTS[name], setting, report, own_s[name]) for name in beside]
            for future in running:
                future.result()
        except BaseException:
            _is_over.set()
            while wait(running, _POLL_S).not_done:  # one may be starting a program right now
                _end_marked(f"{_RUN}={_RUN_ID}".encode())
            raise
    for name in names:
        part, remaining_s = PARTS[name], ends_at - time.monotonic()
        if name in beside:
            continue
        if remaining_s < part.least_s:
            report.begin(name, part.title, 0.0)
            report.add(name, row(part.title, "not run: no time left", "not run"))
            continue
        run_part(name, part, setting, report, min(own_s[name], remaining_s))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", help="folder of the files")
    parser.add_argument("--limit", type=float, default=_LIMIT_S, help="seconds for all parts")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"with commas between them, of {', '.join(PARTS)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu is a dry run over gloo")
    parser.add_argument("--commit", help="of this checkout, for the result; else what git says")
    arguments = parser.parse_args()
    arguments.parts = arguments.parts.split(",")
    for name in arguments.parts:
        if name not in PARTS:
            parser.error(f"--parts must be of {', '.join(PARTS)}, got {name!r}")
    if not 0 < arguments.limit < float("inf"):
        parser.error(f"--limit must be a number of seconds above 0, got {arguments.limit:g}")
    if arguments.commit is not None and not re.fullmatch(r"[0-9a-f]{7,40}", arguments.commit):
        parser.error(f"--commit must be 7 to 40 hexadecimal digits, got {arguments.commit!r}")
    if arguments.output.exists() and not arguments.output.is_dir():
        parser.error(f"--output must be a folder, got {str(arguments.output)!r}")
    if arguments.device == "cuda" and not torch.cuda.device_count():
        parser.error("--device must be cpu, a dry run, as torch finds no CUDA device here; got 'cuda'")
    return arguments


def main() -> None:
    """Runs the parts, and stores what they find."""
    arguments, load = parse(), os.getloadavg()[0]
    num_gpus = torch.cuda.device_count() if arguments.device == "cuda" else 0
    place = Place(device=arguments.device, num_ranks=max(2, num_gpus), shares_gpu=num_gpus == 1)
    names = [name for name in PARTS if name in arguments.parts]
    report = Report(
        arguments.output,
        settings={"parts": names, "limit_s": arguments.limit, "device": arguments.device},
        place=str(place),
        is_dry=arguments.device == "cpu",
        commit=arguments.commit,
        load=load,
    )
    setting = Setting(place=place, folder=arguments.output, suffix=report.suffix, why_no_lab=why_not())
    try:
        with raise_signals():
            run_all(names, setting, report, arguments.limit)
    except InterruptedRun as interrupted:
        report.ended_by = interrupted.signal.name
        report.write()
        sys.exit(128 + interrupted.signal)
    report.write()
    counts = report.count()
    print(f"{', '.join(f'{number} {verdict}' for verdict, number in sorted(counts.items()))}: {report.path.name}")
    sys.exit(1 if counts["wrong"] or counts["failed"] else 0)


if __name__ == "__main__":
    main()
