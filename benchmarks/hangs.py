"""Whether a training run that stands still names the rank, the phase and the operation, for one fault after the other.

Each run is a job of 2 or 3 real processes with real Lightning Trainers on gloo, in which one thing goes wrong
(`hanging_script.py`). What must be told of it was written down before any run (`hang_judge.py`). Faults of the network
need hosts of their own, in the network lab. Faults at the start are told by `CommOptDDP` before any callback runs.

python benchmarks/hangs.py --num-runs 10 --output benchmarks/results/hangs_HARDWARE_DATE.json
python benchmarks/hangs.py --num-runs 1 --faults killed,network --strategy commopt    # a first look
"""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from hang_judge import FAULTS, MONITOR_LINE, Fault, find_message, judge, read_report
from results_file import write_result
from rich.console import Console
from rich.table import Table

from lightning_commopt.netlab import NetLab
from lightning_commopt.netlab.lab import DEVICE, MASTER_PORT

SCRIPT = Path(__file__).with_name("hanging_script.py")
STRATEGIES = ("ddp", "commopt")
FAULT_STEP = 3
START_S = 180
GROUP_TIMEOUT_S = {"interface": 40.0, "port": 40.0, "absent": 40.0}
POLL_S = 0.1
ADD_WRONG_INTERFACE = (
    "ip link add wrong0 type veth peer name wrong1 && ip address add 9.9.9.9/24 dev wrong0"
    " && ip link set wrong0 up && ip link set wrong1 up && export GLOO_SOCKET_IFNAME=wrong0 && "
)
BLOCK_RANK_1 = "ip route add blackhole 10.0.0.2/32 && "


class Job:
    """The processes of one run, with their output in files; all are ended when it is closed.

    Args:
        name: of the fault.
        strategy: "ddp" or "commopt".
        has_monitor: with a `HangMonitor`.
        folder: for everything that the run leaves.
        lab: whose hosts the ranks run on; None for processes of this host.
    """

    def __init__(self, name: str, strategy: str, has_monitor: bool, folder: Path, lab: NetLab | None) -> None:
        self.fault = FAULTS[name]
        self.folder = folder
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
            "GROUP_TIMEOUT_S": str(GROUP_TIMEOUT_S.get(name, 300.0)),
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(self.fault.world_size),
            "LOCAL_WORLD_SIZE": str(1 if lab is not None else self.fault.world_size),
        }
        self.processes = {
            rank: self._start(rank, name, {**os.environ, **settings, **master}, lab)
            for rank in range(self.fault.world_size)
            if not (name == "absent" and rank == self.fault.rank)
        }

    def _start(self, rank: int, name: str, env: dict[str, str], lab: NetLab | None) -> subprocess.Popen[bytes]:
        key, _, value = self._mark.partition("=")
        env |= {key: value, "LOCAL_RANK": str(rank if lab is None else 0), "NODE_RANK": str(0 if lab is None else rank)}
        before = {("interface", 1): ADD_WRONG_INTERFACE, ("port", 0): BLOCK_RANK_1}.get((name, rank), "")
        where = () if lab is None else lab.enter(rank)
        with (self.folder / f"rank{rank}.txt").open("wb") as output:
            return subprocess.Popen(
                [*where, "sh", "-c", f"{before}exec {sys.executable} {SCRIPT}"],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
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

        A rank that was stopped from outside is not among them: it cannot end.
        """
        stopped = self.processes[self.fault.rank].pid if self.fault.is_survivor else None
        started = [process.pid for process in self.processes.values() if process.poll() is None]
        return [pid for pid in {*started, *self._alive()} if pid != stopped]

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
            state = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
            return state not in "ZX" and self._mark.encode() in (entry / "environ").read_bytes()
        except OSError:
            return False


def free_port() -> int:
    """Returns a port that nothing uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_once(name: str, strategy: str, has_monitor: bool, limit_s: float) -> dict[str, Any]:
    """Runs one job until all its processes have ended or time is up; returns what was told, and the judgement."""
    fault = FAULTS[name]
    with ExitStack() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory()))
        lab = closing.enter_context(NetLab(fault.world_size)) if fault.needs_lab else None
        job = Job(name, strategy, has_monitor, folder, lab)
        closing.callback(job.close)
        told_at_s = watch(job, limit_s)
        outputs, begin_s, left = job.outputs, job.fault_at_s, job.left()
        report = read_report(folder / "host0") if has_monitor else None
        verdict = judge(fault, report, outputs)
        told_s = None if told_at_s is None or begin_s is None or not verdict.is_told else told_at_s - begin_s
        return {
            **asdict(verdict),
            "is_injected": begin_s is not None,
            "told_s": told_s,
            "all_ended": not left,
            "statuses": job.statuses,
            "report": report,
            "last_lines": [output.splitlines()[-3:] for output in outputs] if not verdict.right_rank else None,
        }


def watch(job: Job, limit_s: float) -> float | None:
    """Waits until all processes have ended, or the limit after the fault is over.

    Returns:
        When the fault was first told, by a monitor or by `CommOptDDP`, in seconds since the epoch; None if it was not.
    """
    told_at_s = None
    deadline = time.time() + START_S
    while time.time() < (limit_s + job.fault_at_s if job.fault_at_s is not None else deadline):
        if told_at_s is None and is_told(job.fault, job.outputs):
            told_at_s = time.time()
        if not job.left():
            break
        time.sleep(POLL_S)
    if told_at_s is None and is_told(job.fault, job.outputs):
        told_at_s = time.time()
    return told_at_s


def is_told(fault: Fault, outputs: Sequence[str]) -> bool:
    """Returns whether something of ours has been said, right or wrong."""
    return any(MONITOR_LINE.search(output) for output in outputs) or find_message(fault, outputs) is not None


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns how often each thing was right, and the seconds until it was told."""
    told_s = [run["told_s"] for run in runs if run["told_s"] is not None]
    counts = {
        key: [sum(bool(run[key]) for run in runs if run[key] is not None), sum(run[key] is not None for run in runs)]
        for key in ("is_injected", "is_told", "right_rank", "right_phase", "right_operation", "all_ended")
    }
    seconds = {"median": float(np.median(told_s)), "max": max(told_s)} if told_s else None
    statuses = sorted({", ".join(str(status) for status in run["statuses"].values()) for run in runs})
    return {**counts, "told_s": seconds, "statuses": statuses, "sources": sorted({str(run["source"]) for run in runs})}


def print_table(results: Sequence[dict[str, Any]]) -> None:
    """Prints one row for each fault and strategy."""
    table = Table()
    headings = ("fault", "strategy", "runs", "right rank", "phase", "operation", "s until told", "max", "ended", "exit")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("fault", "strategy", "exit") else "right")
    for result in results:
        counts = result["summary"]
        seconds = counts["told_s"]
        table.add_row(
            FAULTS[result["fault"]].what,
            result["strategy"],
            str(len(result["runs"])),
            *(_share(counts[key]) for key in ("right_rank", "right_phase", "right_operation")),
            *(("-", "-") if seconds is None else (f"{seconds['median']:.1f}", f"{seconds['max']:.1f}")),
            _share(counts["all_ended"]),
            "; ".join(counts["statuses"]),
        )
    Console(width=max(140, Console().width)).print(table)


def _share(count: Sequence[int]) -> str:
    return f"{count[0]}/{count[1]}" if count[1] else "-"


def main() -> None:
    """Runs all faults in turns, and prints and stores what was told."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-runs", type=int, default=10)
    parser.add_argument("--faults", default=",".join(FAULTS), help="names with commas between them")
    parser.add_argument("--strategy", default=",".join(STRATEGIES), help="ddp, commopt, or both")
    parser.add_argument("--no-monitor", action="store_true", help="what is told without a HangMonitor")
    parser.add_argument("--limit-s", type=float, default=60.0, help="seconds after a fault until the run is ended")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    names, strategies = arguments.faults.split(","), arguments.strategy.split(",")
    for unknown in (set(names) - FAULTS.keys()) | (set(strategies) - set(STRATEGIES)):
        parser.error(f"{unknown!r} is none of {', '.join([*FAULTS, *STRATEGIES])}")
    load = os.getloadavg()[0]
    results = [
        {"fault": name, "strategy": strategy, "runs": []}
        for name in names
        for strategy in strategies
        if strategy in FAULTS[name].strategies
    ]
    for turn in range(arguments.num_runs):
        for result in results:
            run = run_once(result["fault"], result["strategy"], not arguments.no_monitor, arguments.limit_s)
            result["runs"].append(run)
            result["summary"] = summary(result["runs"])
            mark = "right" if run["right_rank"] else "WRONG" if run["is_injected"] else "NOT INJECTED"
            print(f"{turn} {result['fault']} {result['strategy']}: {mark}: {run['sentence']}", file=sys.stderr)
            if arguments.output:
                settings = {"has_monitor": not arguments.no_monitor, "limit_s": arguments.limit_s}
                write_result(arguments.output, {"settings": settings, "results": results}, load)
    print_table(results)


if __name__ == "__main__":
    main()
