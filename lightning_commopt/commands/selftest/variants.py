"""Checks for ``--full``: what must not change averages, such as kernels and streams, and what may not happen."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.commands.selftest import one_bucket
from lightning_commopt.commands.selftest.checks import NotChecked, check
from lightning_commopt.commands.selftest.gradients import LargeNet, flatten, send
from lightning_commopt.commands.selftest.laws import BUCKET_CAP_MB
from lightning_commopt.commands.selftest.places import TestDevices
from lightning_commopt.commands.selftest.ranks import run_on
from lightning_commopt.commands.selftest.steps import Setup, run_step, run_steps
from lightning_commopt.compressors.catalog import example_compressors, ready_compressors
from lightning_commopt.compressors.channel import Channel
from lightning_commopt.compressors.kernels.dispatch import in_plain_torch
from lightning_commopt.sync.executors import Executor, SideStreams, WorkerThread
from lightning_commopt.sync.hook import BucketHook

NUM_STEPS = 100
_SANITIZER = "compute-sanitizer"


def large_setup(place: TestDevices) -> Setup:
    """Returns the setup of several buckets with odd sizes."""
    return Setup(place=place, net=LargeNet, ddp={"bucket_cap_mb": BUCKET_CAP_MB})


@check("compiled kernels give what plain torch gives", is_extra=True)
def _kernels(place: TestDevices) -> str:
    setup, compressors, worst = large_setup(place), example_compressors(), 0.0
    for name, compressor in compressors.items():
        fast = run_steps(setup, compressor)
        with in_plain_torch():
            plain = run_steps(setup, compressor)
        atol = max(1e-3, 4 * compressor.claims.untracked_error)
        for what in ("received", "residual"):
            is_off = (getattr(fast, what) - getattr(plain, what)).abs() > atol
            share_off = is_off.float().mean().item()
            assert share_off < 0.01, f"{name}: {share_off:.1%} of the elements are off in {what!r}"
            worst = max(worst, share_off)
    return f"{len(compressors)} compressors, at most {worst:.2%} of the elements off by a rounding"


@check(
    f"the same bits over {NUM_STEPS} steps with one stream, with two, and with blocking launches",
    is_extra=True,
    is_on_ranks=False,
)
def _streams(place: TestDevices) -> str:
    blocking = {"CUDA_LAUNCH_BLOCKING": "1"}
    ways = {"two streams": (2, {}), "one stream": (1, {}), "blocking launches": (2, blocking)}
    if place.device_type == "cpu":
        ways = {"a run": (2, {}), "another": (2, {})}
    found = {way: run_on(place, digests, num, environment=variables) for way, (num, variables) in ways.items()}
    first_way, (first, *others) = next(iter(found.items()))
    assert all(other == first for other in others), f"{first_way}: ranks differ"
    for way, (ours, *_) in found.items():
        wrong = [name for name in first if ours[name] != first[name]]
        assert not wrong, f"{', '.join(wrong)}: {way} and {first_way} differ"
    return f"{len(first)} compressors: {', '.join(found)}"


def digests(num_streams: int, place: TestDevices, num_steps: int = NUM_STEPS) -> dict[str, str]:
    """Returns a digest of all averages of each compressor; on every rank."""
    setup, found = large_setup(place), {}
    assert dist.group.WORLD is not None
    if place.device_type == "cuda":
        torch.cuda.set_device(setup.device)
    for name, compressor in ready_compressors().items():
        model = DistributedDataParallel(setup.net().to(setup.device), **setup.ddp)
        names = {id(parameter): its_name for its_name, parameter in model.module.named_parameters()}
        on_cpu = setup.device.type == "cpu"
        executor: Executor = WorkerThread() if on_cpu else SideStreams(setup.device, num_streams)
        hook = BucketHook(compressor, Channel(dist.group.WORLD), names, executor)
        model.register_comm_hook(None, hook.reduce)
        digest = hashlib.blake2b()
        gradients = [setup.gradients(step) for step in range(4)]
        for step in range(num_steps):
            digest.update(flatten(send(model, gradients[step % 4])).numpy().tobytes())
        hook.close()
        found[name] = digest.hexdigest()
    return found


@check("nothing is compiled after the hook is attached", is_extra=True, is_on_ranks=False)
def _compiled_early(place: TestDevices) -> str:
    if place.device_type == "cpu":
        raise NotChecked("no CUDA device")
    with tempfile.TemporaryDirectory() as cache:
        late = run_on(place, compiled_late, environment={"TRITON_CACHE_DIR": cache})
    assert not any(late), f"compiled in the first steps: {late[0] or late[1]}"
    return f"{len(example_compressors())} compressors"


def compiled_late(place: TestDevices) -> dict[str, list[str]]:
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
            run_step(model, sync, setup.gradients(step))
        sync.detach()
        if found := sorted(path.stem for path in set(cache.rglob("*.json")) - before):
            late[name] = found
    return late


@check(f"{_SANITIZER} finds no fault in a bucket of odd size", is_extra=True, is_on_ranks=False)
def _sanitized(place: TestDevices) -> str:
    if place.device_type == "cpu":
        raise NotChecked("no CUDA device")
    return run_sanitizer("cuda")


def run_sanitizer(device: str) -> str:
    """Runs `one_bucket` below the sanitizer.

    Raises:
        NotChecked: it is not installed.
    """
    program = shutil.which(_SANITIZER)
    if program is None:
        raise NotChecked(f"{_SANITIZER} is not installed")
    command = [program, "--error-exitcode", "9", sys.executable, "-m", one_bucket.__name__, device]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-2000:]
    return ran.stdout.strip().splitlines()[0]
