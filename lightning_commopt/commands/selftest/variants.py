"""Checks for ``--full``: kernels, streams and odd sizes do not change averages, and nothing is compiled late.

They also check that collectives are recorded, and that the hang monitor names a rank that fails.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.commands.selftest.checks import NotChecked, check
from lightning_commopt.compat.torch import FLIGHT_RECORDER_ON, flight_records
from lightning_commopt.compressors import Layout
from lightning_commopt.compressors.catalog import example_compressors, ready_compressors
from lightning_commopt.compressors.channel import Channel
from lightning_commopt.compressors.kernels.dispatch import in_plain_torch
from lightning_commopt.sync.ddp.hook import BucketHook
from lightning_commopt.sync.executors import Executor, SideStreams, WorkerThread
from lightning_commopt.sync.warm_up import run_alone
from lightning_commopt.testing.places import Place
from lightning_commopt.testing.ranks import OutOfTime, run_on
from lightning_commopt.testing.steps import flatten, large_setup, run_steps, send
from lightning_commopt.watch.hangs import marks as kinds
from lightning_commopt.watch.hangs.flight_recorder import parse_collectives
from lightning_commopt.watch.hangs.rank_side import WatchedRank

NUM_STEPS = 25  # a race shows in some steps only; each costs time with all compressors, three times
_SANITIZER = "compute-sanitizer"
_SANITIZER_S = 120.0  # a sanitizer that hangs must leave time for the other checks
# One more than powers of two, so that the last tile of a kernel has a single row, column or element.
_ODD_SHAPES = ((257, 129), (7,), (33, 65), (4097,))
_AFTER_S = 2.0  # the healthy steps take milliseconds, so a report this early is no false one
_LIMIT_S = 60.0  # many times `_AFTER_S`, as collecting stacks and reports takes seconds on a busy machine
_FAULTY_STEP = 3  # the steps before it show that the ranks train


@check("compiled kernels give what plain torch gives", is_extra=True)
def _kernels(place: Place) -> str:
    setup, compressors, worst = large_setup(place), example_compressors(), 0.0
    for name, compressor in compressors.items():
        fast = run_steps(setup, compressor)
        with in_plain_torch():
            plain = run_steps(setup, compressor)
        atol = max(1e-3, 4 * compressor.claims.untracked_error)
        for quantity in ("received", "residual"):
            is_off = (getattr(fast, quantity) - getattr(plain, quantity)).abs() > atol
            share_off = is_off.float().mean().item()
            assert share_off < 0.01, f"{name}: {share_off:.1%} of the elements are off in {quantity!r}"
            worst = max(worst, share_off)
    return f"{len(compressors)} compressors, at most {worst:.2%} of the elements off by a rounding"


@check(
    f"the same bits over {NUM_STEPS} steps with one stream, with two, and with blocking launches",
    is_extra=True,
    is_on_ranks=False,
)
def _streams(place: Place) -> str:
    blocking = {"CUDA_LAUNCH_BLOCKING": "1"}
    modes = {"two streams": (2, {}), "one stream": (1, {}), "blocking launches": (2, blocking)}
    if place.device_type == "cpu":
        modes = {"a run": (2, {}), "another": (2, {})}
    results = {label: run_on(place, digests, num, environment=variables) for label, (num, variables) in modes.items()}
    first_label, (first, *others) = next(iter(results.items()))
    assert all(other == first for other in others), f"{first_label}: ranks differ"
    for label, (ours, *_) in results.items():
        wrong = [name for name in first if ours[name] != first[name]]
        assert not wrong, f"{', '.join(wrong)}: {label} and {first_label} differ"
    return f"{len(first)} compressors: {', '.join(results)}"


def digests(num_streams: int, place: Place, num_steps: int = NUM_STEPS) -> dict[str, str]:
    """Returns a digest of all averages of each compressor; on every rank."""
    setup, by_name = large_setup(place), {}
    assert dist.group.WORLD is not None
    if place.device_type == "cuda":
        torch.cuda.set_device(setup.device)
    for name, compressor in ready_compressors().items():
        model = DistributedDataParallel(setup.net().to(setup.device), **setup.options)
        names = {id(parameter): key for key, parameter in model.module.named_parameters()}
        on_cpu = setup.device.type == "cpu"
        executor: Executor = WorkerThread() if on_cpu else SideStreams(setup.device, num_streams)
        hook = BucketHook(compressor, Channel(dist.group.WORLD), names, executor)
        model.register_comm_hook(None, hook.reduce)
        digest = hashlib.blake2b()
        gradients = [setup.gradients(step) for step in range(4)]
        for step in range(num_steps):
            digest.update(flatten(send(model, gradients[step % 4])).numpy().tobytes())
        hook.close()
        by_name[name] = digest.hexdigest()
    return by_name


@check("nothing is compiled after the hook is attached", is_extra=True, is_on_ranks=False, needs_cuda=True)
def _compiled_early(place: Place) -> str:
    with tempfile.TemporaryDirectory() as cache:
        late = run_on(place, compiled_late, environment={"TRITON_CACHE_DIR": cache})
    assert not any(late), f"compiled in the first steps: {late[0] or late[1]}"
    return f"{len(example_compressors())} compressors"


def compiled_late(place: Place) -> dict[str, list[str]]:
    """Returns what Triton writes to its cache in the first steps with each compressor, on every rank."""
    cache, setup, late = Path(os.environ["TRITON_CACHE_DIR"]), large_setup(place), {}
    if place.device_type == "cuda":
        torch.cuda.set_device(setup.device)
    for name, compressor in example_compressors().items():
        model, sync = setup.wrap(compressor)
        dist.barrier()  # the other rank writes there, too
        before = set(cache.rglob("*.json"))
        dist.barrier()
        for step in range(4):
            setup.run_step(model, sync, setup.gradients(step))
        sync.detach()
        if compiled := sorted(path.stem for path in set(cache.rglob("*.json")) - before):
            late[name] = compiled
    return late


@check(f"{_SANITIZER} finds no fault in a bucket of odd size", is_extra=True, is_on_ranks=False, needs_cuda=True)
def _sanitized(place: Place) -> str:
    left_s = place.ends_at - time.monotonic()
    try:
        return run_sanitizer("cuda", min(_SANITIZER_S, left_s))
    except subprocess.TimeoutExpired:
        if left_s < _SANITIZER_S:
            raise OutOfTime from None
        raise


def run_sanitizer(device: str, limit_s: float) -> str:
    """Runs `run_one_bucket` below the sanitizer.

    Raises:
        NotChecked: it is not installed.
    """
    program = shutil.which(_SANITIZER)
    if program is None:
        raise NotChecked(f"{_SANITIZER} is not installed")
    code = f"from {__name__} import run_one_bucket; print(run_one_bucket({device!r}))"
    command = [program, "--error-exitcode", "9", sys.executable, "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-2000:]
    return ran.stdout.strip().splitlines()[0]


def run_one_bucket(device: str) -> str:
    """Runs every compressor on a bucket of odd size, in a group of one rank."""
    layout = Layout.of([torch.empty(shape, device="meta") for shape in _ODD_SHAPES], torch.float32)
    compressors = ready_compressors()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        assert dist.group.WORLD is not None
        for compressor in compressors.values():
            flat = torch.ones(layout.numel, device=device)
            run_alone(compressor, layout, flat, Channel(dist.group.WORLD))
            assert flat.isfinite().all()
        dist.destroy_process_group()
    return f"{len(compressors)} compressors"


@check("torch's Flight Recorder has the collectives", is_extra=True, is_on_ranks=False)
def _recorded(place: Place) -> str:
    num, *_ = run_on(place, num_recorded, environment=FLIGHT_RECORDER_ON)
    if not num and place.device_type == "cpu":
        raise NotChecked("this torch does not record gloo's collectives")
    assert num == 3, f"{num} of 3 all-reduces are recorded"
    return f"{num} all-reduces"


def num_recorded(place: Place) -> int:
    """Returns how many of three all-reduces are recorded, on every rank."""
    value = torch.ones(5, device=place.device(dist.get_rank()))
    for _ in range(3):
        dist.all_reduce(value)
    value.cpu()
    try:
        collectives = parse_collectives(flight_records())
    except RuntimeError:
        return 0
    signatures = [str(collective.signature) for collective in collectives]
    return sum("all_reduce" in signature and "(5,)" in signature for signature in signatures)


@check("the hang monitor names a rank that is stopped", is_extra=True, is_on_ranks=False)
def _stopped(place: Place) -> str:
    report = report_of(place, "stopped")
    assert (report["ranks"], report["kind"]) == ([1], "stopped"), report["sentence"]
    return str(report["sentence"])


@check("the hang monitor names a rank that fails on its device", is_extra=True, is_on_ranks=False, needs_cuda=True)
def _failed(place: Place) -> str:
    report = report_of(place, "failed")
    assert report["ranks"] == [1], report["sentence"]
    return str(report["sentence"])


def report_of(place: Place, fault: str) -> dict[str, Any]:
    """Returns the hang monitor's report after rank 1 was "stopped", or has "failed"."""
    with tempfile.TemporaryDirectory() as folder:
        run_on(place, go_wrong, fault, folder)
        report = json.loads((Path(folder) / "report.json").read_text(encoding="utf-8"))
    assert isinstance(report, dict)
    return report


def go_wrong(fault: str, folder: str, place: Place) -> None:
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
            raise RuntimeError("an injected fault")
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
