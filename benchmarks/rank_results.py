"""How rank 0 of a benchmark passes what it has found to the script that started it: as a marked line of its output."""

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from lightning_commopt.launch.lab import NetLab

_MARK = "RESULT "


def print_result(result: Any) -> None:
    """Prints what `printed_results` finds."""
    print(_MARK + json.dumps(result), flush=True)


def printed_results(lines: Iterable[str]) -> Iterator[Any]:
    """Yields the results among the lines of a rank's output."""
    for line in lines:
        if line.startswith(_MARK):
            yield json.loads(line.removeprefix(_MARK))


def torchrun(num_ranks: int, *words: str) -> list[str]:
    """Returns the command that runs a script on some ranks of this machine."""
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}")
    return [sys.executable, *launcher, *words]


def run_command(command: list[str]) -> Any:
    """Runs ranks on this machine; returns the first result that they print."""
    output = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout
    return next(printed_results(output.splitlines()))


def run_in_lab(num_hosts: int, rate: str | None, words: list[str], timeout_s: float) -> Any:
    """Runs a script with one rank on each host of a lab of its own; returns the first result of rank 0."""
    with NetLab(num_hosts, rate) as lab:
        output = lab.run([sys.executable, *words], pin_to_cores=True, timeout_s=timeout_s)[0]
    return next(printed_results(output.splitlines()))
