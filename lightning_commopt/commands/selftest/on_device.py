"""What the device does: measured times, no synchronization, memory; for ``--full`` what a bucket and measuring cost."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.commands.selftest.checks import Measured, NotChecked, check
from lightning_commopt.compressors import Compressor, Int8, Layout
from lightning_commopt.compressors.catalog import example_compressors, ready_compressors
from lightning_commopt.compressors.channel import Channel
from lightning_commopt.cost.compressor_cost import time_rounds
from lightning_commopt.measure.clock import HostClock, clock_for
from lightning_commopt.measure.record import covered_s
from lightning_commopt.measure.recorder import StepRecorder
from lightning_commopt.plan import CommPlan
from lightning_commopt.sync.ddp.gradient_sync import GradientSync
from lightning_commopt.sync.ddp.observed import before_backward
from lightning_commopt.testing.places import Place
from lightning_commopt.testing.steps import NUM_STEPS, Setup, large_setup, send

# Marks around a collective include the gap before its kernel begins, which is a large part of a small collective.
_RTOL_PROFILER = 0.2
_SHAPES = ((1024, 4096), (4096,), (2304, 1024), (1024,))  # 25 MiB in float32
# The warm-up compiles kernels and fills the allocator's cache. The least of five times leaves out interrupted ones.
_NUM_WARM_UP, _NUM_TIMED, _NUM_PROFILED = 3, 5, 3


@check("collectives take as long as torch.profiler says")
def _recorded_time(place: Place) -> str:
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
    ours = [span for step in steps for bucket in step.buckets for span in bucket.wire]
    theirs = [
        (event.time_range.start / 1e6, event.time_range.end / 1e6)
        for event in profiler.events() or ()
        if _is_collective(event, device.type)
    ]
    assert len(theirs) == len(ours), f"{len(ours)} collectives, torch.profiler has {len(theirs)}"
    ours_s, theirs_s = covered_s(ours), covered_s(theirs)
    shown = f"{1e3 * ours_s / NUM_STEPS:.3g} ms per step, torch.profiler {1e3 * theirs_s / NUM_STEPS:.3g} ms"
    assert device.type == "cpu" or abs(ours_s / theirs_s - 1) < _RTOL_PROFILER, shown
    return shown


def _is_collective(event: Any, device_type: str) -> bool:
    if device_type == "cpu":
        return bool(event.name == "gloo:all_reduce")
    return "nccl" in event.name.lower() and event.device_type == torch.autograd.DeviceType.CUDA


@check("no step synchronizes the device", needs_cuda=True)
def _no_synchronization(place: Place) -> str:
    setup, compressors = Setup(place=place), example_compressors()
    for name, compressor in compressors.items():
        model, sync = setup.wrap(compressor)
        for step in range(4):
            setup.run_step(model, sync, setup.gradients(step))
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


@check("memory does not grow", needs_cuda=True)
def _memory(place: Place) -> str:
    setup, compressors = Setup(place=place), example_compressors()
    for name, compressor in compressors.items():
        model, sync = setup.wrap(compressor)
        allocated = []
        for step in range(3 * NUM_STEPS):
            setup.run_step(model, sync, setup.gradients(step))
            torch.cuda.synchronize()
            allocated.append(torch.cuda.memory_allocated())
        late = allocated[NUM_STEPS:]
        assert max(late) <= max(allocated[:NUM_STEPS]), f"{name}: grew from {late[0]} to {max(late)} bytes"
        sync.detach()
    return f"{len(compressors)} compressors, {3 * NUM_STEPS} steps each"


@check("what a bucket of 25 MiB costs", is_extra=True)
def _bucket(place: Place) -> Measured:
    device = place.device(dist.get_rank())
    costs = {name: bucket_cost(compressor, device) for name, compressor in ready_compressors().items()}
    lines = []
    for name, cost in costs.items():
        kernels = f", {cost['launches']:.0f} launches, {cost['device_us']:.0f} us of device" if cost["launches"] else ""
        lines.append(f"{name}: {cost['host_us']:.0f} us of host{kernels}, {cost['bucket_gb_per_s']:.3g} GB/s")
    return Measured("\n".join(lines), costs)


def bucket_cost(
    compressor: Compressor, device: torch.device, shapes: tuple[tuple[int, ...], ...] = _SHAPES
) -> dict[str, float]:
    """Returns the cost of a bucket without its collectives.

    Returns:
        ``host_us``, the least of some steps; on CUDA ``device_us`` and ``launches``, else 0; ``bucket_gb_per_s``, the
        bytes of the bucket over the time on the device, on CPU on the host.
    """
    assert dist.group.WORLD is not None
    layout = Layout.of([torch.empty(shape, device="meta") for shape in shapes], torch.float32)
    channel, state = Channel(dist.group.WORLD), compressor.init(layout, device)
    gradients = torch.randn(layout.numel, device=device, generator=torch.Generator(device).manual_seed(0))

    def step(flat: Tensor) -> float:
        """Returns the seconds in which the host does not wait for a collective."""
        [seconds] = time_rounds([compressor.rounds(flat, layout, state, channel)], HostClock())
        return sum(seconds)

    launches = device_s = 0.0
    with torch.no_grad():
        times_s = [step(gradients.clone()) for _ in range(_NUM_WARM_UP + _NUM_TIMED)]
        host_s = min(times_s[_NUM_WARM_UP:])
        if device.type == "cuda":
            copies = [gradients.clone() for _ in range(_NUM_PROFILED)]
            torch.cuda.synchronize()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
                for flat in copies:
                    step(flat)
                torch.cuda.synchronize()
            launches, device_s = count_kernels(profiler.events() or (), _NUM_PROFILED)
    return {
        "host_us": 1e6 * host_s,
        "launches": launches,
        "device_us": 1e6 * device_s,
        "bucket_gb_per_s": 4 * layout.numel / (device_s or host_s) / 1e9,
    }


def count_kernels(events: Any, num_steps: int) -> tuple[float, float]:
    """Returns the number and the seconds of kernels per step in the profiler's events, without NCCL's."""
    kernels = [
        event
        for event in events
        if event.device_type == torch.autograd.DeviceType.CUDA and "nccl" not in event.name.lower()
    ]
    return len(kernels) / num_steps, sum(event.time_range.elapsed_us() for event in kernels) / 1e6 / num_steps


@check("what measuring costs", is_extra=True)
def _monitor(place: Place) -> Measured:
    without_s, with_s = (step_seconds(place, is_measured) for is_measured in (False, True))
    cost_us = 1e6 * (with_s - without_s)
    numbers = {"step_us": 1e6 * without_s, "measured_step_us": 1e6 * with_s}
    return Measured(f"{cost_us:.0f} us of a step of {1e3 * without_s:.3g} ms, by the median of 50", numbers)


def step_seconds(place: Place, is_measured: bool, num_steps: int = 50) -> float:
    """Returns the median time of steps, with or without a recorder that is read every step."""
    setup = large_setup(place)
    model, sync = setup.wrap(Int8())
    recorder, gradients, times_s = StepRecorder(clock_for(setup.device)), setup.gradients(0), []
    if is_measured:
        sync.observers.add(recorder)
    for step in range(num_steps):
        start_s = time.perf_counter()
        recorder.enter("backward")
        setup.run_step(model, sync, gradients)
        if is_measured:
            recorder.end_step(step, 1)
            if recorder.num_pending > recorder.clock.num_lag_steps + 1:
                recorder.take(1)
        times_s.append(time.perf_counter() - start_s)
    sync.detach()
    return sorted(times_s)[num_steps // 2]
