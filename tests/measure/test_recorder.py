"""StepRecorder: marks become records when the device has passed them, and nobody waits for it."""

import json
from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.compressors import PowerSGD
from lightning_commopt.measure.clock import CudaClock, HostClock
from lightning_commopt.measure.observer import (
    APPLIED,
    ARRIVE,
    DUE,
    END,
    SEND,
    START,
    BucketInfo,
    BucketSync,
    Observers,
    SyncObserver,
)
from lightning_commopt.measure.operations import OperationTotals
from lightning_commopt.measure.record import EXCHANGE, Collective, Phase, StepRecord
from lightning_commopt.measure.recorder import StepRecorder, issued_by, parts_of_one
from lightning_commopt.sync.ddp.attach import attach_bucket_hook
from support.ranks import run_ranks


class LateClock(CudaClock):
    """A device that is at ``reached`` while marks are made at ``now``; both in seconds."""

    num_lag_steps = 0

    def __init__(self) -> None:
        self.now, self.reached = 0.0, 0.0

    def mark(self) -> float:
        self.now += 1
        return self.now

    def has_passed(self, mark: float) -> bool:
        return mark <= self.reached

    def wait_for(self, mark: float) -> None:
        self.reached = max(self.reached, mark)

    def seconds(self, mark: float) -> float:
        assert self.has_passed(mark), "it would have to wait"
        return mark

    def release(self, marks: Iterable[float]) -> None:
        pass


def bucket(index: int, is_last: bool) -> BucketInfo:
    return BucketInfo(index, 8, (f"p{index}",), is_last)


def test_a_step_is_recorded_when_the_device_has_passed_it() -> None:
    clock = LateClock()
    recorder = StepRecorder(clock)
    recorder.enter("forward")
    recorder.enter("backward")
    first, last = recorder.ready(bucket(0, False)), recorder.ready(bucket(1, True))
    for sync in (first, last):
        sync.note(START)
        sync.note(SEND)
        sync.note(ARRIVE)
        sync.note(END, 4)
    recorder.enter("optimizer")
    recorder.end_step(7, 3)
    assert recorder.num_pending == 1
    assert not recorder.has(1)
    clock.reached = clock.now - 1
    assert not recorder.has(1)
    clock.reached = clock.now
    assert recorder.has(1)
    assert not recorder.has(2)
    (record,) = recorder.take(1)
    assert (record.step, record.num_samples) == (7, 3)
    assert record.phases == (Phase("forward", 1, 2), Phase("backward", 2, 13), Phase("optimizer", 13, 14))
    spans = [(b.index, b.ready_s, b.start_s, b.wire, b.end_s, b.wire_bytes) for b in record.buckets]
    assert spans == [(0, 3, 5, ((6, 7),), 8, 4), (1, 4, 9, ((10, 11),), 12, 4)]
    assert record.layout == {0: bucket(0, False), 1: bucket(1, True)}
    assert recorder.num_pending == 0


class CountingClock(HostClock):
    """Counts seconds by its marks."""

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        self.now += 1
        return self.now

    def seconds(self, mark: float) -> float:
        return mark


def issue_some(recorder: StepRecorder) -> tuple[Collective, ...]:
    recorder.issue("barrier", 0)
    recorder.enter("data")
    with issued_by("lightning"):
        broadcast = recorder.issue("broadcast", 8)
    recorder.enter("backward")
    recorder.issue("reduce_scatter", 16)
    recorder.issue("all_gather", 32)
    assert broadcast is not None
    broadcast.end()
    recorder.end_step(0, 1)
    (step,) = recorder.take(1)
    return step.collectives


def test_collectives_without_an_end_last_until_the_next_event() -> None:
    """If it fails, gloo's reduce_scatter takes no time, or that of what follows it."""
    assert issue_some(StepRecorder(CountingClock())) == (
        Collective("barrier", "pause", "", 0, 1, 2),
        Collective("broadcast", "data", "lightning", 8, 3, 7),
        Collective("reduce_scatter", "backward", "", 16, 5, 6),
        Collective("all_gather", "backward", "", 32, 6, 8),
    )


def test_collectives_of_a_device_have_no_times() -> None:
    """If it fails, events in a stream that a collective is not in are taken for its time."""
    assert {(one.start_s, one.end_s) for one in issue_some(StepRecorder(LateClock()))} == {(None, None)}


def test_a_collective_in_a_stream_stands_for_its_parts() -> None:
    """If it fails, FSDP2's collectives have no times on CUDA, or count twice."""
    recorder = StepRecorder(clock := LateClock())
    assert recorder.wait() is None
    recorder.issue_in_stream("all_gather", 16).end()
    assert clock.now == 0, "a validation makes events for each of its collectives"
    recorder.enter("forward")
    gather = recorder.issue_in_stream("all_gather", 32)  # from 2
    with parts_of_one():
        assert recorder.issue("all_gather", 32) is None
    gather.end()  # until 3
    never = recorder.issue_in_stream("all_gather", 8)
    wait = recorder.wait()  # from 5
    assert wait is not None
    recorder.issue("barrier", 0)
    wait.end()  # until 6
    recorder.end_step(0, 1)
    clock.reached = clock.now
    never.end()  # after all that the device has passed
    (step,) = recorder.take(1)
    assert step.collectives == (
        Collective("all_gather", "pause", "", 16, None, None),
        Collective("all_gather", "forward", "", 32, 2, 3),
        Collective("all_gather", "forward", "", 8, None, None),
        Collective("barrier", "forward", "", 0, None, None),
    )
    assert step.waits == ((5, 6),)


@pytest.mark.parametrize(("is_prompt", "host_bound_s"), [((True, True), 4), ((True, False), 1), ((False, False), 0)])
def test_backward_is_host_bound_where_the_device_has_caught_up(is_prompt: tuple[bool, bool], host_bound_s: int) -> None:
    """If it fails, who waits for the host is told to send less, or somebody's model is blamed for a slow link."""
    recorder = StepRecorder(clock := LateClock())
    recorder.enter("backward")  # at 1
    for number, prompt in enumerate(is_prompt):
        sync = recorder.ready(bucket(number, number == 1))  # at 2, and at 5
        clock.reached = clock.now if prompt else 0.0
        sync.note(START)
        sync.note(END, 8)
    recorder.enter("optimizer")
    recorder.end_step(0, 1)
    (step,) = recorder.take(1)
    assert step.host_bound_s == host_bound_s
    assert StepRecord.from_dict(json.loads(step.to_json())).host_bound_s == host_bound_s
    totals = OperationTotals()
    totals.add([step, step])
    computed_s = step.totals.backward_s - step.totals.exposed_s
    assert totals.host_bound_share == host_bound_s / computed_s


def test_a_sync_that_failed_is_left_out() -> None:
    clock = LateClock()
    clock.reached = 100
    recorder = StepRecorder(clock)
    recorder.enter("backward")
    recorder.ready(bucket(0, False)).note(START)
    recorder.end_step(0, 1)
    assert recorder.take(1)[0].buckets == ()


def test_taking_waits_for_the_device_and_gives_what_there_is() -> None:
    clock = LateClock()
    recorder = StepRecorder(clock)
    assert recorder.take(3) == []
    for step in range(2):
        recorder.enter("forward")
        recorder.end_step(step, 1)
    assert [step.step for step in recorder.take(3)] == [0, 1]


def test_what_is_between_phases_is_no_part_of_a_step() -> None:
    clock = LateClock()
    clock.reached = 100
    recorder = StepRecorder(clock)
    recorder.enter("forward")
    recorder.enter(None)
    clock.now = 50
    recorder.enter("data")
    recorder.end_step(0, 1)
    assert recorder.take(1)[0].totals.step_s == 2


def test_the_hosts_clock_counts_from_its_origin() -> None:
    clock = HostClock()
    first, second = clock.mark(), clock.mark()
    assert clock.has_passed(second)
    assert 0 <= clock.seconds(first) <= clock.seconds(second) < 60


def record_on_cuda() -> tuple[float, float, int]:
    device = torch.device("cuda")
    recorder, observers = StepRecorder(CudaClock(device)), Observers()
    observers.add(recorder)
    layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))).to(device)
    # gloo's collectives on CUDA tensors would make the host wait.
    model = DistributedDataParallel(layers, bucket_cap_mb=0.3, process_group=dist.new_group(backend="nccl"))
    hook = attach_bucket_hook(model, PowerSGD(), None, observers=observers)
    for step in range(8):
        if step == 4:  # the first steps make buckets and compile kernels
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        recorder.enter("forward")
        loss = model(torch.ones(64, 256, device=device)).sum()
        recorder.enter("backward")
        loss.backward()
        recorder.end_step(step, 64)
        recorder.has(step + 1)
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert recorder.has(8)
    record = recorder.take(8)[-1]
    hook.close()
    return record.totals.step_s, record.totals.comm_s, len(record.buckets)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nothing_waits_for_the_device() -> None:
    ((step_s, comm_s, num_buckets),) = run_ranks(record_on_cuda, world_size=1)
    assert 0 < comm_s < step_s < 10
    assert num_buckets >= 3


class _Buckets(SyncObserver):
    def ready(self, bucket: BucketInfo) -> BucketSync:
        raise AssertionError("an exchange is no bucket")


def test_an_exchange_belongs_to_the_step_that_applies_it() -> None:
    """If it fails, an exchange that goes on beside steps is lost, or lengthens the communication of another step."""
    recorder = StepRecorder(HostClock())
    observers = Observers([recorder, _Buckets()])
    for step in range(3):
        recorder.enter("forward")
        if step == 0:
            under_way = observers.exchange(bucket(1, True))
            under_way.note(START)
            under_way.note(SEND)
        recorder.enter("other")
        if step == 2:
            under_way.note(DUE)
            under_way.note(ARRIVE)
            under_way.note(END, 6)
            under_way.note(APPLIED)
        recorder.end_step(step, 1)
    first, second, last = recorder.take(3)
    assert not any((first.buckets, first.waits, second.buckets, second.waits))
    (span,), (wait,) = last.buckets, last.waits
    assert (span.index, span.backward, span.gradient_bytes, span.wire_bytes) == (1, EXCHANGE, 8, 6)
    assert first.start_s <= span.ready_s <= span.start_s <= span.wire[0][0] <= first.end_s
    assert last.start_s <= wait[0] <= span.wire[0][1] <= span.end_s <= wait[1] <= last.end_s
    totals = last.totals
    assert totals.comm_s == span.end_s - span.ready_s
    assert totals.exposed_s == pytest.approx(wait[1] - wait[0])
    assert totals.exposed_s < totals.comm_s
    assert (totals.gradient_bytes, totals.wire_bytes) == (8, 6)
    read = StepRecord.from_dict(json.loads(last.to_json()))
    assert read.totals == pytest.approx(totals, abs=1e-6)
