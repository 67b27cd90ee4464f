"""Starts the ranks of a bench on this machine, or on hosts of the network lab."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lightning_commopt.commands.bench.cases import num_ranks_of_scopes
from lightning_commopt.launch.lab import NetLab, parse_rate, why_not
from lightning_commopt.launch.process import run_ranks
from lightning_commopt.measure.link.bench_result import BenchResult
from lightning_commopt.measure.link.bench_settings import BenchSettings, size_text
from lightning_commopt.text.validation import check_integer

PROGRESS = "COMMOPT PROGRESS "
"""Begins a line of rank 0 with the arguments of `OnProgress`, as JSON."""

OnProgress = Callable[[int, int, str], None]
"""Called with the number of blocks that are done, the number of all, and the name of the next one."""

_OnOutput = Callable[[int, bytes], None]
_Start = Callable[..., object]  # takes the command of a rank, and `on_output`


def bench_here(
    settings: BenchSettings,
    *,
    num_ranks: int,
    device_type: str = "cpu",
    on_progress: OnProgress = lambda num_done, total, label: None,
) -> BenchResult:
    """Measures on ranks of this machine: on "cpu" over gloo and the loopback device, on "cuda" one rank for each GPU.

    Raises:
        ValueError: ``num_ranks`` is below 2, or the messages do not fit into memory.
        RankError: a rank failed; the message has its last output.
    """
    check_size(settings, num_ranks, num_ranks, device_type)
    envs = [{**os.environ, **_variables(rank, num_ranks, device_type)} for rank in range(num_ranks)]

    def start(command: list[str], on_output: _OnOutput) -> object:
        return run_ranks([(command, env) for env in envs], on_output=on_output)

    return _run(settings, device_type, {}, on_progress, start)


def bench_in_lab(
    settings: BenchSettings,
    *,
    link: str,
    num_hosts: int = 2,
    ranks_per_host: int = 1,
    on_progress: OnProgress = lambda num_done, total, label: None,
) -> BenchResult:
    """Measures on hosts of the network lab, each rank on one core, over gloo; ``link`` is a rate of `parse_rate`.

    Raises:
        ValueError: there are fewer than two ranks, the messages do not fit into memory, or this machine cannot make the
            lab; the message names what is missing.
        RankError: a rank failed; the message has its last output.
    """
    bits_per_s = parse_rate(link)
    check_integer("ranks per host", ranks_per_host, at_least=1)
    check_integer("hosts", num_hosts, at_least=1)
    check_size(settings, num_hosts * ranks_per_host, ranks_per_host, "cpu")
    reason = why_not()
    if reason is not None:
        raise ValueError(f"link {link}: {reason}")
    notes = {"link": link, "link_bits_per_s": bits_per_s, "lab": True}
    environment = {"PYTHONUNBUFFERED": "1"}
    with NetLab(num_hosts, link) as lab:
        start = partial(lab.run, ranks_per_host=ranks_per_host, environment=environment, pin_to_cores=True)
        return _run(settings, "cpu", notes, on_progress, start)


def _run(
    settings: BenchSettings, device_type: str, notes: Mapping[str, Any], on_progress: OnProgress, start: _Start
) -> BenchResult:
    """Returns the result of the ranks that ``start`` runs; rank 0 prints its progress and writes the result."""
    rest = b""

    def on_output(rank: int, output: bytes) -> None:
        """Reads progress from output, which may end within a line."""
        nonlocal rest
        if rank == 0:
            *lines, rest = (rest + output).split(b"\n")
            for line in lines:
                if line.startswith(PROGRESS.encode()):
                    on_progress(*json.loads(line[len(PROGRESS) :]))

    with tempfile.TemporaryDirectory(prefix="commopt-bench-") as folder:
        job, result = Path(folder) / "job.json", Path(folder) / "result.json"
        content = {"settings": settings.to_dict(), "device_type": device_type, "notes": notes}
        content |= {"store": f"{folder}/store", "result": str(result)}
        job.write_text(json.dumps(content), encoding="utf-8")
        start([sys.executable, "-m", "lightning_commopt.commands.bench.job", str(job)], on_output=on_output)
        return BenchResult.load(result)


def check_size(settings: BenchSettings, num_ranks: int, ranks_per_node: int, device_type: str) -> None:
    """Checks that scopes and root fit the ranks, and on CPU that all ranks' buffers fit into this machine.

    A rank needs two messages, and two more for a comm hook's state.

    Raises:
        ValueError: they do not fit.
    """
    num_ranks_of_scopes(settings, num_ranks, ranks_per_node)
    largest = max(settings.sizes_bytes)
    needed = num_ranks * largest * (4 if settings.comm_hooks else 2)
    listing = Path("/proc/meminfo")
    found = re.search(r"^MemAvailable:\s+(\d+) kB", listing.read_text(), re.MULTILINE) if listing.is_file() else None
    if device_type == "cpu" and found is not None and needed > int(found[1]) * 1024:
        raise ValueError(
            f"messages of {size_text(largest)} on {num_ranks} ranks take {needed / 1e9:.1f} GB of memory,"
            f" and {int(found[1]) * 1024 / 1e9:.1f} GB are available: choose a smaller -e"
        )


def _variables(rank: int, num_ranks: int, device_type: str) -> dict[str, str]:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    variables = {name: str(number) for name, number in numbers.items()} | {"PYTHONUNBUFFERED": "1"}
    variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # unused: they meet in a file
    if device_type == "cpu" and "GLOO_SOCKET_IFNAME" not in os.environ:
        variables["GLOO_SOCKET_IFNAME"] = "lo"  # else gloo asks for the address of this host's name
    return variables
