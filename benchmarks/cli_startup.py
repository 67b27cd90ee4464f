"""How long commands of ``commopt`` take to start, beside importing torch and importing Lightning.

Runs the commands in turns, in a new order each time, so that other work on the machine falls on all of them.

python benchmarks/cli_startup.py --run-dir RUN_DIR --output benchmarks/results/cli_startup_HARDWARE_DATE.json
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from results_file import median_with_interval, write_result
from rich.console import Console
from rich.table import Table


def commands(run_dir: Path | None, folder: str) -> dict[str, list[str]]:
    """Returns what is timed, by name; the commands that read a run only where there is one."""
    python, commopt = [sys.executable, "-c"], [str(Path(sys.executable).with_name("commopt"))]
    timed = {
        "python": [*python, "pass"],
        "import torch": [*python, "import torch"],
        "import lightning.pytorch": [*python, "import lightning.pytorch"],
        "commopt --help": [*commopt, "--help"],
    }
    if run_dir is not None:
        trace = str(Path(folder) / "trace.json")
        timed["commopt trace"] = [*commopt, "trace", str(run_dir), "--output", trace]
        timed["commopt summary"] = [*commopt, "summary", str(run_dir)]
        timed["commopt report"] = [*commopt, "report", str(run_dir), "--output", folder]
    return timed


def measure(timed: dict[str, list[str]], num_turns: int) -> dict[str, list[float]]:
    """Returns seconds from start to end of every turn, by command; a first turn, which reads the disk, is left out."""
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    generator = np.random.default_rng(0)
    for turn in range(num_turns + 1):
        for name in generator.permutation(list(timed)):
            start = time.perf_counter()
            done = subprocess.run(timed[name], capture_output=True, text=True, check=False)
            took = time.perf_counter() - start
            if done.returncode:
                sys.exit(f"{name} exited with {done.returncode}\n{done.stderr}")
            if turn:
                seconds[str(name)].append(took)
    return seconds


def main() -> None:
    """Measures, prints a table, and stores a result where it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, help="a recorded run, for the commands that read one")
    parser.add_argument("--num-turns", type=int, default=10)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        seconds = measure(commands(arguments.run_dir, folder), arguments.num_turns)
    rows = {name: {**median_with_interval(values), "seconds": values} for name, values in seconds.items()}
    table = Table("s", "median", "min", "max")
    for name, values in seconds.items():
        table.add_row(name, *(f"{value:.2f}" for value in (float(np.median(values)), min(values), max(values))))
    Console().print(table)
    if arguments.output is not None:
        write_result(arguments.output, {"num_turns": arguments.num_turns, "commands": rows}, load)


if __name__ == "__main__":
    main()
