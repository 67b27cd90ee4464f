"""Starts the ranks of a bench on this machine, or on hosts of the network lab."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from commopt_diagnose.bench.cases import num_ranks_of_scopes
from commopt_diagnose.bench.result import BenchResult
from commopt_diagnose.bench.settings import BenchSettings, size_text
from commopt_diagnose.control_groups import control_groups
from lightning_commopt.launch.lab import NetLab, parse_rate, why_not
from lightning_commopt.launch.process import run_ranks
from lightning_commopt.text.validation import check_integer

PROGRESS = "COMMOPT PROGRESS "
"""Begins a line of rank 0 with the arguments of `OnProgress`, as JSON."""

OnProgress = Callable[[int, int, str], None]
"""Called with the number of blocks that are done, the number of all, and the name of the next one."""


def start_bench(
    settings: BenchSettings,
    *,
    link: str | None = None,
    num_hosts: int = 1,
    ranks_per_host: int = 1,
    device_type: str = "cpu",
    on_progress: OnProgress = lambda num_done, total, label: None,
) -> BenchResult:
    """Measures on ranks of this machine, or with a link on hosts of the network lab, each rank on one core.

    Args:
        settings: the cases to measure, and how often.
        link: rate between the hosts, as for `parse_rate`; None for the ranks of one host: this machine.
        num_hosts: number of hosts in the lab.
        ranks_per_host: number of ranks on each host; there must be at least two ranks in all.
        device_type: "cpu" for gloo, over the loopback device without a link; "cuda" for NCCL, a rank for each GPU.
        on_progress: called before each block.

    Raises:
        ValueError: there are fewer than two ranks, the messages do not fit into memory, or this machine cannot make the
            lab; the message names what is missing.
        RankError: a rank failed; the message has its last output.
    """
    check_integer("ranks per host", ranks_per_host, at_least=1)
    check_integer("hosts", num_hosts, at_least=1)
    num_ranks = num_hosts * ranks_per_host
    check_size(settings, num_ranks, ranks_per_host, device_type)
    notes = {} if link is None else {"link": link, "link_bits_per_s": parse_rate(link), "lab": True}
    if link is not None and (reason := why_not()) is not None:
        raise ValueError(f"link {link}: {reason}")
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
        command = [sys.executable, "-m", "commopt_diagnose.bench.job", str(job)]
        if link is None:
            envs = [{**os.environ, **_variables(rank, num_ranks, device_type)} for rank in range(num_ranks)]
            run_ranks([(command, env) for env in envs], on_output=on_output)
        else:
            with NetLab(num_hosts, link) as lab:
                lab.run(
                    command,
                    ranks_per_host=ranks_per_host,
                    environment={"PYTHONUNBUFFERED": "1"},
                    pin_to_cores=True,
                    on_output=on_output,
                )
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
    available = available_bytes() if device_type == "cpu" else None
    if available is not None and needed > available:
        raise ValueError(
            f"messages of {size_text(largest)} on {num_ranks} ranks take {needed / 1e9:.1f} GB of memory,"
            f" and {available / 1e9:.1f} GB are available: choose a smaller -e"
        )


def available_bytes(root: Path = Path("/")) -> int | None:
    """Returns the memory that this host has left, at most the limit of this container or job; None if unknown."""
    meminfo = root / "proc/meminfo"
    text = meminfo.read_text() if meminfo.is_file() else ""
    found = [int(number) * 1024 for number in re.findall(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)]
    for folder in control_groups("memory", root):
        limits = (folder / name for name in ("memory.max", "memory.limit_in_bytes"))
        found += [int(text) for limit in limits if limit.is_file() and (text := limit.read_text().strip()).isdecimal()]
    return min(found, default=None)


def _variables(rank: int, num_ranks: int, device_type: str) -> dict[str, str]:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    variables = {name: str(number) for name, number in numbers.items()} | {"PYTHONUNBUFFERED": "1"}
    variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # not used, as the ranks meet in a file
    if device_type == "cpu" and "GLOO_SOCKET_IFNAME" not in os.environ:
        # Otherwise gloo looks up the address of the host's name.
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    return variables
