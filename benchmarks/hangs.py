"""Whether a training run that stands still names the rank, the phase and the operation, for one fault after the other.

Each run is a job of 2 or 3 real processes with real Lightning Trainers on gloo, in which one thing goes wrong
(`hanging_script.py`). Those of this host are forked from a process that has imported torch and Lightning. What must be
told of a fault was written down before any run (`hang_judge.py`). Faults of the network need hosts of their own, in the
network lab. Faults at the start are told by `CommOptDDP` before any callback runs.

python benchmarks/hangs.py --num-runs 10 --num-at-once 3 --output benchmarks/results/hangs_HARDWARE_DATE.json
python benchmarks/hangs.py --num-runs 1 --faults killed,network --strategy commopt    # a first look
"""

import argparse
import contextlib
import importlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from hang_judge import FAULTS, MONITOR_LINE, find_message, judge, read_report
from results_file import write_result
from rich.console import Console
from rich.table import Table

from lightning_commopt.launch.fork_server import ForkServer
from lightning_commopt.launch.forked_process import ForkedProcess
from lightning_commopt.netlab import NetLab
from lightning_commopt.netlab.lab import DEVICE, MASTER_PORT

SCRIPT = Path(__file__).with_name("hanging_script.py")
PRELOADED = ("torch._dynamo", "lightning.pytorch", "lightning_commopt.lightning", "lightning_commopt.callbacks")
STRATEGIES = ("ddp", "commopt")
FAULT_STEP = 3
START_S = 180
POLL_S = 0.1
COUNTED = ("is_injected", "is_told", "right_rank", "right_phase", "right_operation", "in_time", "all_ended")
ADD_WRONG_INTERFACE = (
    "ip link add wrong0 type veth peer name wrong1 && ip address add 9.9.9.9/24 dev wrong0"
    " && ip link set wrong0 up && ip link set wrong1 up && export GLOO_SOCKET_IFNAME=wrong0 && "
)
BLOCK_RANK_1 = "ip route add blackhole 10.0.0.2/32 && "

_forking = threading.Lock()


class Job:
    """The processes of one run, with their output in files; all are ended when it is closed.

    Args:
        name: of the fault.
        strategy: "ddp" or "commopt".
        has_monitor: with a `HangMonitor`.
        folder: for everything that the run leaves.
        server: that forks ranks on this host.
        lab: whose hosts the ranks run on; None for processes of this host.
    """

    def __init__(
        self, name: str, strategy: str, has_monitor: bool, folder: Path, server: ForkServer, lab: NetLab | None
    ) -> None:
        self.fault = FAULTS[name]
        self.folder = folder
        self._server, self._has_monitor = server, has_monitor
        self._mark = f"COMMOPT_RUN={uuid.uuid4().hex}"
        master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        if lab is not None:
            master = {"MASTER_ADDR": lab.addresses[0], "MASTER_PORT": str(MASTER_PORT), "GLOO_SOCKET_IFNAME": DEVICE}
        settings = {
            "FAULT": name,
            "FAULT_RANK": str(self.fault.rank),
            "FAULT_STEP": str(FAULT_STEP),
            "FOLDER": str(folder),
            "STRATEGY": strategy,
            "MONITOR": str(int(has_monitor)),
            "GROUP_TIMEOUT_S": str(self.fault.group_timeout_s),
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(self.fault.world_size),
            "LOCAL_WORLD_SIZE": str(1 if lab is not None else self.fault.world_size),
        }
        self.processes = {
            rank: self._start(rank, name, {**os.environ, **settings, **master}, lab)
            for rank in range(self.fault.world_size)
            if not (name == "absent" and rank == self.fault.rank)
        }

    def _start(
        self, rank: int, name: str, env: dict[str, str], lab: NetLab | None
    ) -> subprocess.Popen[bytes] | ForkedProcess:
        key, _, value = self._mark.partition("=")
        env |= {key: value, "LOCAL_RANK": str(rank if lab is None else 0), "NODE_RANK": str(0 if lab is None else rank)}
        output = self.folder / f"rank{rank}.txt"
        if lab is None:
            with _forking:
                forked = self._server.start(
                    [sys.executable, "-m", SCRIPT.stem], env=env, folder=str(SCRIPT.parent), is_session=True
                )
            threading.Thread(target=keep_output, args=(forked, output), daemon=True).start()
            return forked
        before = {("interface", 1): ADD_WRONG_INTERFACE, ("port", 0): BLOCK_RANK_1}.get((name, rank), "")
        with output.open("wb") as file:
            return subprocess.Popen(
                [*lab.enter(rank), "sh", "-c", f"{before}exec {sys.executable} {SCRIPT}"],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def outputs(self) -> list[str]:
        """What each rank has said so far."""
        paths = [self.folder / f"rank{rank}.txt" for rank in range(self.fault.world_size)]
        return [path.read_text(errors="replace") if path.exists() else "" for path in paths]

    @property
    def fault_at_s(self) -> float | None:
        """When the fault began, in seconds since the epoch; None if it has not."""
        try:
            return float((self.folder / "fault").read_text())
        except (OSError, ValueError):
            return None

    @property
    def statuses(self) -> dict[str, int | None]:
        """The exit status of each rank; None for one that runs."""
        return {str(rank): process.poll() for rank, process in self.processes.items()}

    def left(self) -> list[int]:
        """Returns the processes of this run that have not ended, workers of dataloaders included.

        Where no monitor ends it, a rank that was stopped is not among them: it cannot end by itself.
        """
        cannot_end = self.fault.is_survivor and not self._has_monitor
        stopped = self.processes[self.fault.rank].pid if cannot_end else None
        started = [process.pid for process in self.processes.values() if process.poll() is None]
        left = [pid for pid in started if pid != stopped]
        return left or [pid for pid in self._alive() if pid != stopped]

    def close(self) -> None:
        """Ends all processes of the run."""
        for pid in self._alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes.values():
            process.wait()

    def _alive(self) -> list[int]:
        return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and self._owns(entry)]

    def _owns(self, entry: Path) -> bool:
        try:
            state, _, _, session = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:4]
            is_of_rank = int(session) in (process.pid for process in self.processes.values())
            return state not in "ZX" and (is_of_rank or self._mark.encode() in (entry / "environ").read_bytes())
        except OSError:
            return False


def keep_output(process: ForkedProcess, path: Path) -> None:
    """Writes to a file what a rank, and all that it has started, say."""
    assert process.stdout is not None
    with process.stdout as output, path.open("wb", buffering=0) as file:
        shutil.copyfileobj(output, file)


def free_port() -> int:
    """Returns a port that nothing uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_once(name: str, strategy: str, server: ForkServer, has_monitor: bool, wait_s: float) -> dict[str, Any]:
    """Runs one job until all its processes have ended or time is up; returns what was told, and the judgement."""
    fault = FAULTS[name]
    with ExitStack() as closing:
        load = os.getloadavg()[0]
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        lab = closing.enter_context(NetLab(fault.world_size)) if fault.needs_lab else None
        job = Job(name, strategy, has_monitor, folder, server, lab)
        closing.callback(job.close)
        told_at_s = watch(job, wait_s)
        outputs, begin_s, left = job.outputs, job.fault_at_s, job.left()
        report = read_report(folder / "host0") if has_monitor else None
        verdict = judge(fault, report, outputs)
        at_s = told_at_s.get(verdict.source or "") if verdict.is_told else None
        told_s = None if at_s is None or begin_s is None else at_s - begin_s
        is_right = verdict.right_rank and verdict.right_phase and verdict.right_operation
        kept = None if report is None else {key: report[key] for key in report if not is_right or key != "snapshots"}
        return {
            **asdict(verdict),
            "is_injected": begin_s is not None,
            "told_s": told_s,
            "in_time": told_s is not None and told_s <= fault.limit_s,
            "all_ended": not left,
            "statuses": job.statuses,
            "report": kept,
            "load": load,
            "last_lines": None if is_right else [output.splitlines()[-20:] for output in outputs],
        }


def watch(job: Job, wait_s: float) -> dict[str, float]:
    """Waits until all processes have ended, or ``wait_s`` after the fault.

    Returns:
        When a monitor's "report" and a "message" of `CommOptDDP` were first seen, in seconds since the epoch.
    """
    told_at_s: dict[str, float] = {}
    deadline = time.time() + START_S
    while True:
        is_over = not job.left()
        is_over |= time.time() > (deadline if job.fault_at_s is None else wait_s + job.fault_at_s)
        outputs = job.outputs
        if any(MONITOR_LINE.search(output) for output in outputs):
            told_at_s.setdefault("report", time.time())
        if find_message(job.fault, outputs) is not None:
            told_at_s.setdefault("message", time.time())
        if is_over:
            return told_at_s
        time.sleep(POLL_S)


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns how often each thing was right, and the seconds until it was told."""
    told_s = [run["told_s"] for run in runs if run["told_s"] is not None]
    counts = {key: sum(run[key] for run in runs) for key in COUNTED}
    seconds = {"min": min(told_s), "median": float(np.median(told_s)), "max": max(told_s)} if told_s else None
    statuses = sorted({", ".join(str(status) for status in run["statuses"].values()) for run in runs})
    sources = sorted({str(run["source"]) for run in runs})
    return {"num_runs": len(runs), **counts, "told_s": seconds, "statuses": statuses, "sources": sources}


def print_table(results: Sequence[dict[str, Any]]) -> None:
    """Prints one row for each fault and strategy."""
    table = Table()
    headings = ("fault", "strategy", "runs", "rank", "phase", "operation", "in time", "s until told", "ended", "exit")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("fault", "strategy", "exit") else "right")
    for result in results:
        found = result["summary"]
        seconds = found["told_s"]
        table.add_row(
            FAULTS[result["fault"]].what,
            result["strategy"],
            str(found["num_runs"]),
            *(str(found[key]) for key in ("right_rank", "right_phase", "right_operation", "in_time")),
            "-" if seconds is None else f"{seconds['median']:.1f} ({seconds['min']:.1f} to {seconds['max']:.1f})",
            str(found["all_ended"]),
            "; ".join(found["statuses"]),
        )
    Console(width=max(140, Console().width)).print(table)


def main() -> None:
    """Runs all faults in turns, and prints and stores what was told."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-runs", type=int, default=10)
    parser.add_argument("--faults", default=",".join(FAULTS), help="names with commas between them")
    parser.add_argument("--strategy", default=",".join(STRATEGIES), help="ddp, commopt, or both")
    parser.add_argument("--no-monitor", action="store_true", help="what is told without a HangMonitor")
    parser.add_argument("--wait-s", type=float, default=60.0, help="seconds after a fault until the run is ended")
    parser.add_argument("--num-at-once", type=int, default=1, help="runs beside each other")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    names, strategies = arguments.faults.split(","), arguments.strategy.split(",")
    for unknown in (set(names) - FAULTS.keys()) | (set(strategies) - set(STRATEGIES)):
        parser.error(f"{unknown!r} is none of {', '.join([*FAULTS, *STRATEGIES])}")
    load = os.getloadavg()[0]
    for module in PRELOADED:
        importlib.import_module(module)
    server = ForkServer(SCRIPT.stem)
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
    }
    storing = threading.Lock()

    def add_run(result: dict[str, Any]) -> None:
        run = run_once(result["fault"], result["strategy"], server, not arguments.no_monitor, arguments.wait_s)
        is_right = run["right_rank"] and run["right_phase"] and run["right_operation"] and run["in_time"]
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
