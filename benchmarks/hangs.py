"""Whether a training run that stands still names the rank, the phase and the operation, for one fault after the other.

Each run is a job of 2 or 3 real processes with real Lightning Trainers on gloo, in which one thing goes wrong
(`hanging_script.py`, `hanging_callbacks.py`). What must be reported of a fault was written down before any run
(`hang_faults.py`); `hang_judge.py` compares. Faults of the network need hosts of their own, in the network lab. Faults
at the start are reported by `CommOptDDP` before any callback runs.

python benchmarks/hangs.py --num-runs 10 --num-at-once 3 --output benchmarks/results/hangs_HARDWARE_DATE.json
python benchmarks/hangs.py --num-runs 1 --faults killed,network --strategy commopt    # a first look
python benchmarks/hangs.py --num-runs 1 --faults stopped --device cuda --share-gpu    # all ranks on one GPU
"""

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from hang_faults import FAULTS
from hang_job import CPU, Devices, Job
from hang_judge import MONITOR_LINE, find_message, judge, read_report
from results_file import write_result
from rich.console import Console
from rich.table import Table

from lightning_commopt.launch.lab import NetLab

STRATEGIES = ("ddp", "commopt")
START_S = 180
POLL_S = 0.1
COUNTED = (
    "is_injected",
    "is_reported",
    "right_rank",
    "right_phase",
    "right_operation",
    "right_sentence",
    "in_time",
    "all_ended",
)


def run_once(name: str, strategy: str, has_monitor: bool, wait_s: float, where: Devices = CPU) -> dict[str, Any]:
    """Runs one job until all its processes have ended or time is up; returns what was reported, and the judgement."""
    fault = FAULTS[name]
    with ExitStack() as closing:
        load = os.getloadavg()[0]
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        lab = closing.enter_context(NetLab(fault.world_size)) if fault.needs_lab else None
        job = Job(name, strategy, has_monitor, folder, lab, where)
        closing.callback(job.close)
        reported_at_s = watch(job, wait_s)
        outputs, begin_s, left = job.outputs, job.fault_at_s, job.left()
        # The watcher of a rank that has failed may report, in the folder of its own host.
        reports = [read_report(folder / f"host{host}") for host in range(fault.world_size)] if has_monitor else []
        report = next(filter(None, reports), None)
        verdict = judge(fault, report, outputs)
        at_s = reported_at_s.get(verdict.source or "") if verdict.is_reported else None
        reported_s = None if at_s is None or begin_s is None else at_s - begin_s
        is_right = verdict.right_rank and verdict.right_phase and verdict.right_operation and verdict.right_sentence
        shown = [output.replace(sys.prefix, ".venv").splitlines()[-20:] for output in outputs]
        kept = None if report is None else {key: report[key] for key in report if not is_right or key != "snapshots"}
        return {
            **asdict(verdict),
            "is_injected": begin_s is not None,
            "reported_s": reported_s,
            "in_time": reported_s is not None and reported_s <= fault.limit_s,
            "all_ended": not left,
            "statuses": job.statuses,
            "report": kept,
            "load": load,
            "last_lines": None if is_right else shown,
        }


def watch(job: Job, wait_s: float) -> dict[str, float]:
    """Waits until all processes have ended, or ``wait_s`` after the fault.

    Returns:
        When a monitor's "report" and a "message" of `CommOptDDP` were first seen, in seconds since the epoch.
    """
    reported_at_s: dict[str, float] = {}
    deadline = time.time() + START_S
    while True:
        is_over = not job.left()
        is_over |= time.time() > (deadline if job.fault_at_s is None else wait_s + job.fault_at_s)
        outputs = job.outputs
        if any(MONITOR_LINE.search(output) for output in outputs):
            reported_at_s.setdefault("report", time.time())
        if find_message(job.fault, outputs) is not None:
            reported_at_s.setdefault("message", time.time())
        if is_over:
            return reported_at_s
        time.sleep(POLL_S)


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns how often each thing was right, and the seconds until it was reported."""
    reported_s = [run["reported_s"] for run in runs if run["reported_s"] is not None]
    counts = {key: sum(run[key] for run in runs) for key in COUNTED}
    seconds = (
        {"min": min(reported_s), "median": float(np.median(reported_s)), "max": max(reported_s)} if reported_s else None
    )
    statuses = sorted({", ".join(str(status) for status in run["statuses"].values()) for run in runs})
    sources = sorted({str(run["source"]) for run in runs})
    return {"num_runs": len(runs), **counts, "reported_s": seconds, "statuses": statuses, "sources": sources}


def print_table(results: Sequence[dict[str, Any]]) -> None:
    """Prints one row for each fault and strategy."""
    table = Table()
    headings = (
        "fault",
        "strategy",
        "runs",
        "rank",
        "phase",
        "operation",
        "sentence",
        "in time",
        "s until reported",
        "ended",
        "exit",
    )
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("fault", "strategy", "exit") else "right")
    for result in results:
        found = result["summary"]
        seconds = found["reported_s"]
        table.add_row(
            FAULTS[result["fault"]].what,
            result["strategy"],
            str(found["num_runs"]),
            *(str(found[key]) for key in COUNTED[2:7]),
            "-" if seconds is None else f"{seconds['median']:.1f} ({seconds['min']:.1f} to {seconds['max']:.1f})",
            str(found["all_ended"]),
            "; ".join(found["statuses"]),
        )
    Console(width=max(140, Console().width)).print(table)


def main() -> None:
    """Runs all faults in turns, and prints and stores what was reported."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-runs", type=int, default=10)
    parser.add_argument("--faults", default=",".join(FAULTS), help="names with commas between them")
    parser.add_argument("--strategy", default=",".join(STRATEGIES), help="ddp, commopt, or both")
    parser.add_argument("--no-monitor", action="store_true", help="what is reported without a HangMonitor")
    parser.add_argument("--wait-s", type=float, default=90.0, help="seconds after a fault until the run is ended")
    parser.add_argument("--num-at-once", type=int, default=1, help="runs beside each other")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--share-gpu", action="store_true", help="all ranks on GPU 0, as hosts of their own")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    where = Devices(arguments.device, arguments.share_gpu)
    names, strategies = arguments.faults.split(","), arguments.strategy.split(",")
    for unknown in (set(names) - FAULTS.keys()) | (set(strategies) - set(STRATEGIES)):
        parser.error(f"{unknown!r} is none of {', '.join([*FAULTS, *STRATEGIES])}")
    load = os.getloadavg()[0]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and so would ranks
    results: list[dict[str, Any]] = [
        {"fault": name, "strategy": strategy, "runs": []}
        for name in names
        for strategy in strategies
        if strategy in FAULTS[name].strategies
    ]
    settings = {
        "has_monitor": not arguments.no_monitor,
        "wait_s": arguments.wait_s,
        "num_at_once": arguments.num_at_once,
        "device": arguments.device,
        "share_gpu": arguments.share_gpu,
    }
    storing = threading.Lock()

    def add_run(result: dict[str, Any]) -> None:
        run = run_once(result["fault"], result["strategy"], not arguments.no_monitor, arguments.wait_s, where)
        is_right = all(run[key] for key in COUNTED if key.startswith("right_")) and run["in_time"]
        mark = "right" if is_right else "WRONG" if run["is_injected"] else "NOT INJECTED"
        with storing:
            result["runs"].append(run)
            result["summary"] = summary(result["runs"])
            print(f"{result['fault']} {result['strategy']}: {mark}: {run['sentence']}", file=sys.stderr, flush=True)
            if arguments.output:
                write_result(arguments.output, {"settings": settings, "results": results}, load)

    with ThreadPoolExecutor(arguments.num_at_once) as pool:
        list(pool.map(add_run, results * arguments.num_runs))
    print_table(results)


if __name__ == "__main__":
    main()
