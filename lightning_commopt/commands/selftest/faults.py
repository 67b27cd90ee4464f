"""Checks for ``--full``: what is known of collectives, and what the hang monitor reports when a rank fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_commopt.commands.selftest.checks import NotChecked, check
from lightning_commopt.commands.selftest.places import TestDevices
from lightning_commopt.commands.selftest.ranks import run_on
from lightning_commopt.compat.torch import flight_records
from lightning_commopt.watch.hangs import marks as kinds
from lightning_commopt.watch.hangs.flight_recorder import parse_collectives
from lightning_commopt.watch.hangs.rank_side import WatchedRank

_AFTER_S = 2.0
_LIMIT_S = 60.0
_FAULTY_STEP = 3
_RECORDER = dict.fromkeys(("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), "2000")


@check("torch's Flight Recorder has the collectives", is_extra=True, is_on_ranks=False)
def _recorded(place: TestDevices) -> str:
    num, *_ = run_on(place, num_recorded, environment=_RECORDER)
    if not num and place.device_type == "cpu":
        raise NotChecked("this torch records none of gloo")
    assert num == 3, f"{num} of 3 all-reduces are recorded"
    return f"{num} all-reduces"


def num_recorded(place: TestDevices) -> int:
    """Returns how many of three all-reduces are recorded, on every rank."""
    value = torch.ones(5, device=place.device(dist.get_rank()))
    for _ in range(3):
        dist.all_reduce(value)
    value.cpu()
    try:
        collectives = parse_collectives(flight_records())
    except RuntimeError:
        return 0
    return sum("all_reduce" in str(each.signature) and "(5,)" in str(each.signature) for each in collectives)


@check("the hang monitor names a rank that is stopped", is_extra=True, is_on_ranks=False)
def _stopped(place: TestDevices) -> str:
    report = report_of(place, "stopped")
    assert (report["ranks"], report["kind"]) == ([1], "stopped"), report["sentence"]
    return str(report["sentence"])


@check("the hang monitor names a rank that fails on its device", is_extra=True, is_on_ranks=False)
def _failed(place: TestDevices) -> str:
    if place.device_type == "cpu":
        raise NotChecked("no CUDA device")
    report = report_of(place, "failed")
    assert report["ranks"] == [1], report["sentence"]
    return str(report["sentence"])


def report_of(place: TestDevices, fault: str) -> dict[str, Any]:
    """Returns the hang monitor's report after rank 1 was "stopped", or has "failed"."""
    with tempfile.TemporaryDirectory() as folder:
        run_on(place, go_wrong, fault, folder)
        report = json.loads((Path(folder) / "report.json").read_text(encoding="utf-8"))
    assert isinstance(report, dict)
    return report


def go_wrong(fault: str, folder: str, place: TestDevices) -> None:
    """Makes some steps with a watch; in one of them rank 1 keeps rank 0 waiting until that is reported."""
    rank, report = dist.get_rank(), Path(folder) / "report.json"
    device = place.device(rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    options: dict[str, Any] = {"after_s": _AFTER_S, "action": "report", "main_address": ("localhost", 0)}
    watched = WatchedRank(folder=Path(folder), device=device, **options)
    assert watched.meet(), "the watchers have not met"
    value = torch.ones(5, device=device)
    for step in range(_FAULTY_STEP + 2):
        watched.enter(kinds.FORWARD, step)
        if rank == 1 and step == _FAULTY_STEP:
            if fault == "stopped":
                _stop_until(report)
            else:
                _fail(device, watched, report)
                return
        watched.enter(kinds.BACKWARD, step)
        if fault == "failed" and step == _FAULTY_STEP:
            _wait_for(report)  # a collective would raise once rank 1 is gone
            break
        dist.all_reduce(value)
        value.div_(2).cpu()
    watched.enter(kinds.END, step)
    watched.close()


def _fail(device: torch.device, watched: WatchedRank, report: Path) -> None:
    """Makes an error that all later calls of CUDA raise again, and closes the watch, as an exception does."""
    try:
        if device.type == "cpu":
            raise RuntimeError("a fault that was put in")
        torch.zeros(1, device=device)[torch.tensor([10], device=device)]
        torch.cuda.synchronize()
    except RuntimeError as error:
        watched.close(error)
        _wait_for(report)
        return
    raise AssertionError("an index out of range on the device raised nothing")


def _stop_until(report: Path) -> None:
    """Stops this process; another one continues it."""
    continues = (
        f"import os, time\nend = time.monotonic() + {_LIMIT_S}\n"
        f"while not os.path.exists({str(report)!r}) and time.monotonic() < end: time.sleep(0.05)\n"
        f"os.kill({os.getpid()}, {int(signal.SIGCONT)})"
    )
    with subprocess.Popen([sys.executable, "-S", "-c", continues]):
        os.kill(os.getpid(), signal.SIGSTOP)


def _wait_for(report: Path) -> None:
    end_s = time.monotonic() + _LIMIT_S
    while not report.exists():
        assert time.monotonic() < end_s, "nothing has been reported"
        time.sleep(0.05)
