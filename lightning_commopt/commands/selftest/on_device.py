"""What the device does: measured times, no synchronization, memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.commands.selftest.checks import NotChecked, check
from lightning_commopt.commands.selftest.gradients import send
from lightning_commopt.commands.selftest.places import TestDevices
from lightning_commopt.commands.selftest.steps import NUM_STEPS, Setup, run_step
from lightning_commopt.compressors.catalog import example_compressors
from lightning_commopt.measure.clock import clock_for
from lightning_commopt.measure.record import covered_s
from lightning_commopt.measure.recorder import StepRecorder
from lightning_commopt.plan import CommPlan
from lightning_commopt.sync.gradient_sync import GradientSync
from lightning_commopt.sync.observed import before_backward

_RTOL_PROFILER = 0.2


@check("collectives take as long as torch.profiler says")
def _recorded_time(place: TestDevices) -> str:
    if place.device_type == "cuda" and "nccl" not in place.backend:
        raise NotChecked("gloo's collectives on CUDA tensors run on the host, between copies that the profiler counts")
    device = place.device(dist.get_rank())
    model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)]).to(device))
    sync = GradientSync(CommPlan())
    recorder = StepRecorder(clock_for(device))
    sync.observers.add(recorder)
    sync.attach(model, timeout=None)
    inputs = torch.randn(64, 512, device=device)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)

    def run(step: int) -> None:
        loss = model(inputs).sum()
        before_backward(model)
        loss.backward()
        recorder.end_step(step, 64)

    for _ in range(5):
        run(0)
    recorder.take(5)
    with torch.profiler.profile(activities=activities) as profiler:
        for step in range(NUM_STEPS):
            run(step)
        recorder.take(0)
        steps = recorder.take(NUM_STEPS)
    ours = [span for step in steps for bucket in step.record.buckets for span in bucket.wire]
    theirs = [
        (event.time_range.start / 1e6, event.time_range.end / 1e6)
        for event in profiler.events() or ()
        if _is_collective(event, device.type)
    ]
    assert len(theirs) == len(ours), f"{len(ours)} collectives, torch.profiler has {len(theirs)}"
    ours_s, theirs_s = covered_s(ours), covered_s(theirs)
    shown = f"{1e3 * ours_s / NUM_STEPS:.3g} ms a step, torch.profiler {1e3 * theirs_s / NUM_STEPS:.3g} ms"
    assert device.type == "cpu" or abs(ours_s / theirs_s - 1) < _RTOL_PROFILER, shown
    return shown


def _is_collective(event: Any, device_type: str) -> bool:
    if device_type == "cpu":
        return event.name == "gloo:all_reduce"
    return "nccl" in event.name.lower() and event.device_type == torch.autograd.DeviceType.CUDA


@check("no step synchronizes the device")
def _no_synchronization(place: TestDevices) -> str:
    if place.device_type == "cpu":
        raise NotChecked("needs a CUDA device")
    setup, compressors = Setup(place=place), example_compressors()
    for name, compressor in compressors.items():
        model, sync = setup.wrap(compressor)
        for step in range(4):
            run_step(model, sync, setup.gradients(step))
        gradients = setup.gradients(4)
        torch.cuda.set_sync_debug_mode("error")
        try:
            send(model, gradients)
        except RuntimeError as error:
            raise AssertionError(f"{name}: {error}") from error
        finally:
            torch.cuda.set_sync_debug_mode("default")
        sync.detach()
    return f"{len(compressors)} compressors"


@check("memory does not grow")
def _memory(place: TestDevices) -> str:
    if place.device_type == "cpu":
        raise NotChecked("torch counts memory on CUDA devices only")
    setup, compressors = Setup(place=place), example_compressors()
    for name, compressor in compressors.items():
        model, sync = setup.wrap(compressor)
        allocated = []
        for step in range(3 * NUM_STEPS):
            run_step(model, sync, setup.gradients(step))
            torch.cuda.synchronize()
            allocated.append(torch.cuda.memory_allocated())
        late = allocated[NUM_STEPS:]
        assert max(late) <= max(allocated[:NUM_STEPS]), f"{name}: grew from {late[0]} to {max(late)} bytes"
        sync.detach()
    return f"{len(compressors)} compressors, {3 * NUM_STEPS} steps each"
