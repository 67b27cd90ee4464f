"""Starts a script as every rank of a job, and starts it again behind a case that fails; a part of `gpu.py`.

With several GPUs each rank has its own. With one GPU all ranks share it as hosts of their own, as NCCL refuses two
ranks of one host on one GPU. With ``--rate`` each rank is on a host of the network lab, whose links have this rate.

A script does its cases one after the other. When a rank raises or stands still, all of them end, as its peers would
wait for it; that is a row of the result, and a new job does the cases that are left. What rank 0 prints is passed on.

python benchmarks/gpu_ranks.py --device cpu --cases ddp_32,resume -- benchmarks/gpu_fits.py
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import re
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

from command_line import link_rate

from lightning_commopt.launch.lab import NetLab, RankError
from lightning_commopt.launch.process import run_ranks

FOLDER, ENDS_AT = "COMMOPT_JOB_FOLDER", "COMMOPT_JOB_ENDS_AT"
"""Variables with a folder for all ranks of a job, which is removed after it; and when its limit is, by the clock that
all processes of a machine have in common."""

ROW, CASE = "ROW ", "CASE "
"""Begin a line that is a row of the result, as JSON, and one that names the case that begins."""

_ERROR = re.compile(
    r"^(?:\[rank\d+\]: )?((?:[\w.]+\.)?\w*(?:Error|Exception|Timeout|Interrupt|Exit)\b.*)$", re.MULTILINE
)
_OF_STARTERS = ("CalledProcessError", "ChildFailedError", "SignalException")  # which say that a rank has failed
_LEAST_S = 5.0
_END_S = 2.0  # for what a job that has reached its limit still has to say


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where ranks run.

    Attributes:
        device: "cpu" or "cuda".
        num_ranks: on all GPUs, or two.
        shares_gpu: all ranks have GPU 0.
    """

    device: str
    num_ranks: int = 2
    shares_gpu: bool = False

    def __str__(self) -> str:
        if self.device == "cpu":
            return f"{self.num_ranks} ranks on the CPU over gloo, a dry run: its times mean nothing"
        if self.shares_gpu:
            number = "two" if self.num_ranks == 2 else str(self.num_ranks)
            return f"{number} ranks share one GPU, as hosts of their own with NCCL over sockets"
        return f"{self.num_ranks} ranks on as many GPUs of one host, NCCL"

    @property
    def options(self) -> list[str]:
        """Of all scripts that start ranks."""
        return ["--device", self.device, *(["--share-gpu"] if self.shares_gpu else [])]

    @property
    def environment(self) -> dict[str, str]:
        """Variables for everything that is started here: only the loopback device is there for certain."""
        found = {"GLOO_SOCKET_IFNAME": "lo"}
        return found | ({"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"} if self.shares_gpu else {})


def emit(name: str, result: str, verdict: str = "measured", **numbers: Any) -> None:
    """Prints a row on rank 0, which replaces an earlier one of this name.

    Args:
        name: what was run.
        result: what came of it, in words.
        verdict: "right" or "wrong" where it is known what must come of it, "measured" where not; "failed", "cut" or
            "not run" where nothing did.
        **numbers: for the JSON.
    """
    if os.environ.get("RANK", "0") == "0":
        row = {"name": name, "result": result, "verdict": verdict, "numbers": numbers}
        print(f"{ROW}{json.dumps(row)}", flush=True)


def begin_case(name: str, limit_s: float) -> None:
    """Names the case that begins; a rank that is still in it after ``limit_s`` prints where, and ends."""
    if os.environ["RANK"] == "0":
        print(f"{CASE}{name}", flush=True)
    faulthandler.dump_traceback_later(limit_s, exit=True)


def forget_plans() -> None:
    """Lets ``plan="auto"`` search: no plan that another job has kept is found."""
    from lightning_commopt.compressors.kernels import c_library

    c_library.load()  # from the folder where it is compiled already
    os.environ["XDG_CACHE_HOME"] = os.environ[FOLDER]


def left_s() -> float:
    """Returns the seconds that a rank has until the limit of its job."""
    return float(os.environ[ENDS_AT]) - time.monotonic()


def last_error(output: str) -> str:
    """Returns the line of an output that says best why it ends: that of its last exception, else its last one."""
    found = _ERROR.findall(output)
    errors = [line for line in found if not line.partition(":")[0].endswith(_OF_STARTERS)] or found
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return (errors or lines or ["no output"])[-1][:300]


def _variables(place: Place) -> Iterator[dict[str, str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    for rank in range(place.num_ranks):
        host, local_rank, size = (rank, 0, 1) if place.shares_gpu else (0, rank, place.num_ranks)
        own = {"NCCL_HOSTID": f"host{rank}"} if place.shares_gpu else {}
        yield own | {
            "RANK": str(rank),
            "WORLD_SIZE": str(place.num_ranks),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(size),
            "NODE_RANK": str(host),
            "GROUP_RANK": str(host),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }


def run_job(command: list[str], place: Place, *, rate: str | None, limit_s: float) -> None:
    """Runs a command as every rank, which all have one empty folder, and passes on what rank 0 prints.

    Raises:
        JobError: a rank failed, or exceeded the limit.
    """
    printed = bytearray()

    def forward(rank: int, output: bytes) -> None:
        if rank == 0:
            printed.extend(output)
            sys.stdout.buffer.write(output)
            sys.stdout.flush()

    with ExitStack() as closing:
        folder = closing.enter_context(TemporaryDirectory(ignore_cleanup_errors=True))
        shared = {FOLDER: folder, ENDS_AT: str(time.monotonic() + limit_s)}
        try:
            if rate is None:
                programs = [(command, {**os.environ, **shared, **variables}) for variables in _variables(place)]
                run_ranks(programs, on_output=forward, timeout_s=limit_s)
                return
            lab = closing.enter_context(NetLab(place.num_ranks, rate))
            own = "NCCL_HOSTID=host$RANK"
            if not place.shares_gpu:
                gpus = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(place.num_ranks)))
                own += f" CUDA_VISIBLE_DEVICES=$(echo {shlex.quote(gpus)} | cut -d, -f$((RANK + 1)))"
            as_host = ["sh", "-c", f'{own} exec "$@"', "sh", *command]
            lab.run(as_host, environment=shared, timeout_s=limit_s, on_output=forward)
        except RankError as error:
            raise JobError(_last_case(printed), error) from error


class JobError(RuntimeError):
    """A job failed in a case ("" before the first), or exceeded its limit there, as a RankError says."""

    def __init__(self, case: str, error: RankError) -> None:
        super().__init__(str(error))
        self.case, self.rank, self.is_cut = case, error.rank, error.status is None


def _last_case(printed: bytearray) -> str:
    names = [line for line in printed.decode(errors="replace").splitlines() if line.startswith(CASE)]
    return names[-1].removeprefix(CASE) if names else ""


def run_cases(script: list[str], cases: list[str], place: Place, *, rate: str | None, limit_s: float) -> None:
    """Runs all cases of a script, in one job if none fails."""
    ends_at, left = time.monotonic() + limit_s - _END_S, cases
    while left:
        remaining_s = ends_at - time.monotonic()
        if remaining_s < _LEAST_S:
            emit(", ".join(left), "no time left", "not run")
            return
        command = [sys.executable, *script, *place.options, "--cases", ",".join(left)]
        try:
            run_job(command, place, rate=rate, limit_s=remaining_s)
            return
        except JobError as error:
            if error.rank != 0:
                print(error, flush=True)
            if error.is_cut:
                emit(f"{error.case or left[0]}: what is left", f"cut after {limit_s:.0f} s", "cut")
            else:
                emit(error.case or ", ".join(left), last_error(str(error)), "failed")
            if error.case not in left:  # none has begun
                return
            left = left[left.index(error.case) + 1 :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--num-ranks", type=int, default=2)
    parser.add_argument("--share-gpu", action="store_true", help="all ranks have GPU 0, as hosts of their own")
    parser.add_argument("--rate", type=link_rate, help="each rank is on a host of the lab, with such a link")
    parser.add_argument("--limit-s", type=float, default=300, help="of all cases")
    parser.add_argument("--cases", required=True, help="of the script, with commas between them")
    parser.add_argument("script", nargs="+", help="behind --: a Python script that takes --cases, with its options")
    arguments = parser.parse_args()
    if arguments.num_ranks < 2:
        parser.error(f"--num-ranks must be at least 2, got {arguments.num_ranks}")
    if arguments.limit_s <= 0:
        parser.error(f"--limit-s must be above 0, got {arguments.limit_s:g}")
    place = Place(device=arguments.device, num_ranks=arguments.num_ranks, shares_gpu=arguments.share_gpu)
    os.environ.update({**place.environment, **os.environ})
    cases = arguments.cases.split(",")
    run_cases(arguments.script, cases, place, rate=arguments.rate, limit_s=arguments.limit_s)


if __name__ == "__main__":
    main()
