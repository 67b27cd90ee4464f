"""Starts the ranks of a training under Nsight Systems, each with its own report.

Source: Nsight Systems User Guide, "CLI Profile Command Switch Options".
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

# With "stop" the training continues after cudaProfilerStop; nsys's default, "stop-shutdown", ends it.
_OPTIONS = {"--capture-range": "cudaProfilerApi", "--capture-range-end": "stop", "--trace": "cuda,nvtx,osrt"}
_LONG_NAMES = {"-c": "--capture-range", "-t": "--trace", "-o": "--output", "-f": "--force-overwrite"}

_MISSING = (
    "nsys is not on PATH. Install Nsight Systems (NVIDIA's package nsight-systems-cli, or the CUDA toolkit's"
    " cuda-nsight-systems), or add its directory to PATH, often /usr/local/cuda/bin. --print shows the command"
    " without it."
)

NO_REPORTS = (
    "there are no reports: nsys collects between cudaProfilerStart and cudaProfilerStop, which the training has to call"
    " (in Python torch.cuda.profiler.start() and stop())."
)
"""Printed after a run without reports."""

NO_IMPORT = (
    "nsys collected this, but made no report of it, which needs its importer: QdstrmImporter -i FILE, from an"
    " installation of the same version."
)
"""Printed after a run that has left the raw data of a report."""

_REPORT_SUFFIXES = (".nsys-rep", ".qdrep")  # the second until 2021, as with CUDA 11
_RAW_SUFFIX = ".qdstrm"
_LAUNCHER_MODULE = "torch.distributed.run"
_FORMER_MODULE = "torch.distributed.launch"
_OTHER_LAUNCHERS = ("accelerate", "deepspeed", "fabric", "horovodrun", "jsrun", "mpiexec", "mpirun", "srun")
# These modules start ranks as well, behind python -m; the beginning of a name is enough.
_OTHER_MODULES = (
    *("accelerate.commands.", "deepspeed.launcher.", "horovod.runner", "lightning.fabric.cli", "lightning_fabric.cli"),
)
_NAME_OPTIONS = ("-n", "--name", "-p", "--prefix")  # of conda run: an environment may be named like a launcher


def nsys_command(
    command: Sequence[str], *, nproc_per_node: int | None = None, output_dir: str | Path = "nsys", nsys_args: str = ""
) -> list[str]:
    """Returns the command that runs every rank of a training under ``nsys profile``.

    nsys runs between torch's launcher and the program: around the launcher it would write one report of all ranks. It
    collects from ``cudaProfilerStart`` to ``cudaProfilerStop``, once.

    Args:
        command: starts one rank; or begins with ``torchrun`` or ``python -m torch.distributed.run`` and its options.
        nproc_per_node: ranks on this machine, if ``command`` has no launcher; None for the number of CUDA devices.
        output_dir: directory of the reports, ``rank_<rank>.nsys-rep``.
        nsys_args: further options of ``nsys profile``, as in a shell. They replace default options of the same name.

    Raises:
        ValueError: the arguments contradict each other, the launcher's options have no script after them, or torch's
            launcher is not the first word, but behind another program's, as in ``uv run torchrun``.
    """
    nsys = ["nsys", "profile", *_nsys_options(output_dir, nsys_args)]
    launcher, rest = _split_launcher(command)
    if not launcher:
        ranks = nproc_per_node or max(1, torch.cuda.device_count())
        launcher = [sys.executable, "-m", _LAUNCHER_MODULE, "--standalone", "--nproc-per-node", str(ranks)]
        return [*launcher, "--no-python", *nsys, *command]
    if nproc_per_node is not None:
        raise ValueError(
            f"--nproc-per-node={nproc_per_node} is for a command without a launcher: give it to {shlex.join(launcher)}"
        )
    options, program = _split_options(rest)
    return [*launcher, *options, "--no-python", *nsys, *program]


def make_ready(output_dir: str | Path, nsys_args: str = "") -> None:
    """Makes the directory of the reports; for the arguments see `nsys_command`.

    Raises:
        FileNotFoundError: nsys is not installed.
        FileExistsError: the directory has reports, and nsys has no option to overwrite them.
    """
    if shutil.which("nsys") is None:
        raise FileNotFoundError(_MISSING)
    existing = reports(output_dir)
    if existing and "--force-overwrite" not in _option_names(shlex.split(nsys_args)):
        raise FileExistsError(
            f"{existing[0]} exists, and nsys would not replace it: choose another --output-dir, or give"
            " --nsys-args=--force-overwrite=true"
        )
    Path(output_dir).mkdir(parents=True, exist_ok=True)


def reports(output_dir: str | Path) -> list[Path]:
    """Returns the reports in a directory."""
    return sorted(path for path in Path(output_dir).glob("rank_*") if path.suffix in _REPORT_SUFFIXES)


def raw_reports(output_dir: str | Path) -> list[Path]:
    """Returns the files in a directory that nsys has collected, but not turned into reports."""
    stems = {path.stem for path in reports(output_dir)}
    raw = (path for path in Path(output_dir).glob("rank_*") if path.suffix == _RAW_SUFFIX)
    return sorted(path for path in raw if path.stem not in stems)


def run(command: Sequence[str]) -> int:
    """Runs a command in the foreground, and waits for its end even after a signal: nsys still writes its report then.

    Returns:
        Its exit status; 128 plus the number of a signal that has ended it, as in a shell.
    """
    process = subprocess.Popen(command)
    # A terminal sends these to all of its processes, and a launcher that receives one twice abandons its ranks.
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    before[signal.SIGTERM] = signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number))
    try:
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 - status if status < 0 else status


def _nsys_options(output_dir: str | Path, nsys_args: str) -> list[str]:
    try:
        given = shlex.split(nsys_args)
    except ValueError as error:
        raise ValueError(f"--nsys-args={nsys_args!r}: {error}") from None
    names = _option_names(given)
    if "--output" in names:
        raise ValueError(f"--nsys-args={nsys_args!r}: the reports are written to --output-dir, so leave out --output")
    options = dict(_OPTIONS)
    if _traces_nccl():
        options["--trace"] += ",nccl"
    ours = [f"{name}={value}" for name, value in options.items() if name not in names]
    folder = str(output_dir).replace("%", "%%")
    return [*ours, f"--output={folder}/rank_%q{{RANK}}", *given]


def _traces_nccl() -> bool:
    """Returns whether the nsys on PATH can trace NCCL, as 2026.1 can; older ones refuse it. True without nsys."""
    if shutil.which("nsys") is None:
        return True
    options = subprocess.run(["nsys", "profile", "--help"], capture_output=True, text=True).stdout
    return re.search(r"\bnccl\b", options) is not None


def _option_names(words: Sequence[str]) -> set[str]:
    return {_LONG_NAMES.get(word[:2], word.partition("=")[0]) for word in words}


def _split_launcher(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits torch's launcher from the rest of a command; it is empty if there is none."""
    words = list(command)
    place, length = _find_launcher(words)
    launcher = words[place : place + length]
    if launcher and place > 0:
        before, after = shlex.join(words[:place]), shlex.join(launcher)
        raise ValueError(
            f"{before} is in front of {after}: put it in front of commopt nsys, as in {before} commopt nsys {after} ..."
        )
    return launcher, words[length:]


def _of_other(launcher: str) -> str:
    return (
        f"{launcher} starts the ranks by itself: put nsys between it and the program; commopt nsys --print -- PROGRAM"
        " prints its options"
    )


def _find_launcher(words: list[str]) -> tuple[int, int]:
    """Returns where in a command a launcher begins, and its number of words; 0 words if there is none.

    A program's arguments may be named like a launcher, so the search ends at the first Python program.

    Raises:
        ValueError: it is not torch's, or torch's former launcher; or there is an nsys already.
    """
    for place, (word, before) in enumerate(zip(words, ["", *words], strict=False)):
        name, rest = Path(word).name, words[place + 1 :]
        if before in _NAME_OPTIONS:
            continue
        if name == "torchrun":
            return place, 1
        if name == "nsys":
            raise ValueError("commopt nsys starts nsys itself: leave it out, and give its options as --nsys-args")
        if name in _OTHER_LAUNCHERS:
            raise ValueError(_of_other(name))
        if name.startswith("python") and rest and rest[0].startswith("-"):
            num_options = next((number for number, other in enumerate(rest) if not other.startswith("-")), len(rest))
            started = rest[num_options - 1 : num_options + 1]
            if started[0] == "-m" and started[1:] and started[1].startswith(_OTHER_MODULES):
                raise ValueError(_of_other(started[1]))
            if started == ["-m", _FORMER_MODULE]:
                raise ValueError(f"{_FORMER_MODULE} is deprecated: use torchrun, or python -m {_LAUNCHER_MODULE}")
            return place, num_options + 2 if started == ["-m", _LAUNCHER_MODULE] else 0
        if name.endswith(".py"):
            break
    return 0, 0


def _split_options(words: list[str]) -> tuple[list[str], list[str]]:
    """Splits the launcher's options from the program, which is changed to run with ``--no-python``."""
    from torch.distributed.run import get_args_parser

    def fail(message: str) -> NoReturn:
        raise ValueError(f"{shlex.join(['torchrun', *words])}: {message}")

    parser: Any = get_args_parser()
    parser.error = fail
    parsed = parser.parse_args(words)
    if getattr(parsed, "run_path", False):
        raise ValueError("torchrun's --run-path starts no program that nsys could profile: leave it out")
    num_options = len(words) - 1 - len(parsed.training_script_args)
    options, program = words[:num_options], words[num_options:]
    if parsed.no_python:
        return [word for word in options if word not in ("--no-python", "--no_python", "--")], program
    python = [os.environ.get("PYTHON_EXEC", sys.executable), "-u", *(["-m"] if parsed.module else [])]
    return [word for word in options if word not in ("-m", "--module", "--")], [*python, *program]
