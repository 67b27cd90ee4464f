"""Reads a topology from a file or from this machine."""

from __future__ import annotations

import dataclasses
import gzip
import io
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

from commopt_diagnose.topology.machine import Machine, TopologyError
from commopt_diagnose.topology.nccl_xml import read_nccl_xml
from commopt_diagnose.topology.nvml import read_nvml
from commopt_diagnose.topology.smi_text import read_smi_text

_MAX_BYTES = 64 << 20
_LIMIT_S = 60


def read_file(path: Path) -> Machine:
    """Reads text of ``nvidia-smi topo -m`` or XML of ``NCCL_TOPO_DUMP_FILE``, with any text around it.

    ``-`` is the standard input.

    Raises:
        OSError: the file cannot be read.
        TopologyError: there is no topology in it.
    """
    if str(path) == "-":
        return read_content(sys.stdin.buffer.read(_MAX_BYTES), "input")
    with path.open("rb") as file:
        return read_content(file.read(_MAX_BYTES), str(path))


def read_content(content: bytes, source: str) -> Machine:
    """Reads the content of a file: UTF-8, or UTF-16 with a byte order mark, as PowerShell writes it; perhaps gzipped.

    Raises:
        TopologyError: there is no topology in it.
    """
    if content.startswith(b"\x1f\x8b"):
        try:
            content = gzip.GzipFile(fileobj=io.BytesIO(content)).read(_MAX_BYTES)
        except (OSError, EOFError, zlib.error) as error:
            raise TopologyError(f"{source}: the gzip file is damaged: {error}") from None
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        text = content.decode("utf-16", errors="replace")
    elif b"\0" in content:
        raise TopologyError(f"{source}: not a text file")
    else:
        text = content.decode("utf-8-sig", errors="replace")
    if not text.strip():
        raise TopologyError(f"{source}: the file is empty")
    if "<system" in text and "<cpu" in text:
        return read_nccl_xml(text, source)
    try:
        return read_smi_text(text, source)
    except TopologyError:
        if "<pci busid=" in text:
            return read_nccl_xml(text, source)  # its error says what is cut off
        raise


def read_machine(source: str = "auto", environment: Mapping[str, str] = os.environ) -> Machine:
    """Reads the topology of this machine; of a rank under a launcher also which cores it may use.

    The source is ``nvml``, ``nvidia-smi``, or ``auto`` for the first of them that works.

    Raises:
        TopologyError: there is no GPU, or no tool that lists them.
        ValueError: there is no such source.
    """
    if source not in (*_SOURCES, "auto"):
        raise ValueError(f"--source must be auto, {' or '.join(_SOURCES)}, got {source!r}")
    refusals = []
    for name in _SOURCES if source == "auto" else (source,):
        try:
            return _with_own_rank(_SOURCES[name](), environment)
        except (TopologyError, ImportError) as error:
            refusals.append(str(error))
    raise TopologyError(f"no GPU found here ({'; '.join(refusals)}); commopt topo FILE reads that of another machine")


def local_rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """Returns which of a host's ranks this process is; None without a launcher."""
    names = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
    text = next(filter(None, map(environment.get, names)), "")
    return int(text) if text.isdecimal() else None


def read_nvidia_smi() -> Machine:
    """Runs ``nvidia-smi topo -m``, and ``nvidia-smi -L`` for names.

    Raises:
        TopologyError: there is no such program, or it fails.
    """
    if shutil.which("nvidia-smi") is None:
        raise TopologyError("nvidia-smi is not on PATH")
    return read_smi_text(f"{_output('nvidia-smi', 'topo', '-m')}\n{_output('nvidia-smi', '-L')}", "nvidia-smi topo -m")


def _with_own_rank(machine: Machine, environment: Mapping[str, str]) -> Machine:
    """Adds this process to the processes, on the GPU of its local rank, if a launcher has started it.

    Names of GPUs in ``CUDA_VISIBLE_DEVICES``, such as UUIDs, do not tell which GPU that is: the process is left out.
    """
    rank = local_rank(environment)
    if rank is None:
        return machine
    labels = [gpu.label for gpu in machine.gpus]
    if visible := environment.get("CUDA_VISIBLE_DEVICES"):
        numbers = [number.strip() for number in visible.split(",")]
        if not all(number.isdecimal() for number in numbers):
            return machine
        labels = [f"GPU{int(number)}" for number in numbers]
    # If a launcher shows each rank only its own GPU, there are fewer labels than ranks.
    own = (labels[min(rank, len(labels) - 1)], os.getpid(), frozenset(os.sched_getaffinity(0)))
    return dataclasses.replace(machine, processes=(*machine.processes, own))


def _output(*command: str) -> str:
    try:
        ran = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, errors="replace", timeout=_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TopologyError(f"{command[0]}: {error}") from None
    if ran.returncode != 0:
        printed = " ".join((ran.stdout + ran.stderr).split())
        raise TopologyError(f"{' '.join(command)}: {printed[:200] or f'status {ran.returncode}'}")
    return ran.stdout


_SOURCES: Mapping[str, Callable[[], Machine]] = {"nvml": read_nvml, "nvidia-smi": read_nvidia_smi}
