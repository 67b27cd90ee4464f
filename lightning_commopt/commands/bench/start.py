"""Starts the ranks of a bench on this machine, or on hosts of the network lab; torch is imported by them, not here."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning_commopt.commands.bench.cases import num_ranks_of_scopes
from lightning_commopt.commands.bench.rank_lines import MODULE, LineReader
from lightning_commopt.launch.fork_server import server_for, start_in_place
from lightning_commopt.launch.lab import NetLab, parse_rate, why_not
from lightning_commopt.launch.lab.ranks import Process, RankProcess, error_of, start_program, watch
from lightning_commopt.measure.link.bench_result import BenchResult
from lightning_commopt.measure.link.bench_settings import BenchSettings
from lightning_commopt.measure.link.sizes import size_text
from lightning_commopt.text.validation import check_integer

OnProgress = Callable[[int, int, str], None]


def bench_here(
    settings: BenchSettings,
    *,
    num_ranks: int,
    device_type: str = "cpu",
    on_progress: OnProgress = lambda num_done, total, label: None,
) -> BenchResult:
    """Measures on ranks of this machine: on CPU over gloo and the loopback device, on CUDA one rank for each GPU.

    Args:
        settings: what to measure.
        num_ranks: at least 2.
        device_type: "cpu" or "cuda".
        on_progress: called with the blocks that are done, those that there are, and the name of the next one.

    Raises:
        ValueError: ``num_ranks`` is below 2, or the messages do not fit into memory.
        RankError: a rank failed; the message has its last output.
    """
    num_ranks_of_scopes(settings, num_ranks, num_ranks)
    if device_type == "cpu":
        check_memory(settings, num_ranks)
    with _Job(settings, device_type, {}) as job, ExitStack() as closing:
        ranks = []
        for rank in range(num_ranks):
            process = RankProcess(rank, _start(job.command, _variables(rank, num_ranks, device_type)), job.on_output)
            ranks.append(process)
            closing.callback(_end, process)
        job.lines.on_progress = on_progress
        stopped = watch(ranks, None)
        status = stopped.process.returncode if stopped else None
        closing.close()
        if stopped:
            raise error_of(stopped, status, None, ranks)
        return job.result()


def bench_in_lab(
    settings: BenchSettings,
    *,
    link: str,
    num_hosts: int = 2,
    ranks_per_host: int = 1,
    on_progress: OnProgress = lambda num_done, total, label: None,
) -> BenchResult:
    """Measures on hosts of the network lab, each rank on one core, over gloo.

    Args:
        settings: what to measure.
        link: rate of each host in each direction, as `parse_rate` takes it.
        num_hosts: at least 1.
        ranks_per_host: at least 1; two ranks at least in all.
        on_progress: see `bench_here`.

    Raises:
        ValueError: an argument is out of range, the messages do not fit into memory, or this machine cannot make the
            lab; the message says what is missing.
        RankError: a rank failed; the message has its last output.
    """
    bits_per_s = parse_rate(link)
    check_integer("ranks per host", ranks_per_host, at_least=1)
    check_integer("hosts", num_hosts, at_least=1)
    num_ranks_of_scopes(settings, num_hosts * ranks_per_host, ranks_per_host)
    check_memory(settings, num_hosts * ranks_per_host)
    reason = why_not()
    if reason is not None:
        raise ValueError(f"link {link}: {reason}")
    notes = {"link": link, "link_bits_per_s": bits_per_s, "lab": True}
    with _Job(settings, "cpu", notes) as job, NetLab(num_hosts, link) as lab:
        job.lines.on_progress = on_progress
        lab.run(
            job.command,
            ranks_per_host=ranks_per_host,
            environment={"PYTHONUNBUFFERED": "1"},
            pin_to_cores=True,
            on_output=job.on_output,
            start=start_in_place if server_for(job.command) else None,
        )
        return job.result()


class _Job:
    """The files that a bench and its ranks share, and what rank 0 says; to be used in a ``with`` statement."""

    def __init__(self, settings: BenchSettings, device_type: str, notes: Mapping[str, Any]) -> None:
        self._content = {"settings": settings.to_dict(), "device_type": device_type, "notes": dict(notes)}
        self.lines = LineReader()

    def __enter__(self) -> _Job:
        self._closing = ExitStack()
        folder = Path(self._closing.enter_context(tempfile.TemporaryDirectory(prefix="commopt-bench-")))
        self._result = folder / "result.json"
        path = folder / "job.json"
        content = {**self._content, "store": str(folder / "store"), "result": str(self._result)}
        path.write_text(json.dumps(content), encoding="utf-8")
        self.command = [sys.executable, "-m", MODULE, str(path)]
        return self

    def __exit__(self, *_: Any) -> None:
        self._closing.close()

    def on_output(self, rank: int, output: bytes) -> None:
        """Takes in what a rank prints."""
        if rank == 0:
            self.lines.read(output)

    def result(self) -> BenchResult:
        """Returns what rank 0 has left."""
        return BenchResult.load(self._result)


def check_memory(settings: BenchSettings, num_ranks: int) -> None:
    """Checks that all ranks' buffers fit into this machine: two messages each, and two more for a comm hook's state.

    Raises:
        ValueError: they do not.
    """
    largest = max(settings.sizes_bytes)
    needed = num_ranks * largest * (4 if settings.comm_hooks else 2)
    listing = Path("/proc/meminfo")
    found = re.search(r"^MemAvailable:\s+(\d+) kB", listing.read_text(), re.MULTILINE) if listing.is_file() else None
    if found is not None and needed > int(found[1]) * 1024:
        raise ValueError(
            f"messages of {size_text(largest)} on {num_ranks} ranks take {needed / 1e9:.1f} GB of memory,"
            f" and {int(found[1]) * 1024 / 1e9:.1f} GB are available: choose a smaller -e"
        )


def _start(command: Sequence[str], variables: Mapping[str, str]) -> Process:
    env = {**os.environ, **variables}
    server = server_for(command)
    return start_program(command, env) if server is None else server.start(command, env=env, is_session=True)


def _end(process: RankProcess) -> None:
    if process.process.poll() is None:
        os.killpg(process.process.pid, 9)
    process.close()


def _variables(rank: int, num_ranks: int, device_type: str) -> dict[str, str]:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    variables = {name: str(number) for name, number in numbers.items()} | {"PYTHONUNBUFFERED": "1"}
    if device_type == "cpu" and "GLOO_SOCKET_IFNAME" not in os.environ:
        variables["GLOO_SOCKET_IFNAME"] = "lo"  # else gloo asks for the address of this host's name
    return variables
