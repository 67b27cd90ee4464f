"""CudaClock with events that only count: how many are made, and what is asked of them in a step."""

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch

from lightning_commopt.measure.clock import CudaClock
from lightning_commopt.measure.observer import ARRIVE, END, SEND, START, BucketInfo
from lightning_commopt.measure.recorder import StepRecorder

NUM_BUCKETS, NUM_PHASES = 3, 4  # data, forward, backward, and the pause
MARKS_PER_STEP = NUM_PHASES + 5 * NUM_BUCKETS + 4  # ready, start, send, arrival, end; a collective, and a wait for it
WINDOW = 50


class Device:
    """A device that is behind the host: it has passed what was recorded some marks ago."""

    def __init__(self, seconds_per_mark: float = 1e-3) -> None:
        self.calls: Counter[str] = Counter()
        self.now, self.num_behind, self.seconds_per_mark = 0, 0, seconds_per_mark

    def event_class(device) -> Any:  # noqa: N805
        class Event:
            def __init__(self, enable_timing: bool) -> None:
                device.calls["made"] += 1
                self.at: int | None = None

            def record(self, stream: Any) -> None:
                device.now += 1
                self.at = device.now

            def query(self) -> bool:
                device.calls["queried"] += 1
                assert self.at is not None
                return self.at <= device.now - device.num_behind

            def synchronize(self) -> None:
                device.calls["waited for"] += 1

            def elapsed_time(self, end: "Event") -> float:
                device.calls["read"] += 1
                assert self.at is not None
                assert end.at is not None
                return 1e3 * device.seconds_per_mark * (end.at - self.at)

        return Event


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", device.event_class())
    for name in ("current_stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, mock.Mock())
    return device


def one_step(recorder: StepRecorder, step: int) -> None:
    for phase in ("data", "forward", "backward"):
        recorder.enter(phase)
    recorder.issue_in_stream("all_gather", 8).end()
    wait = recorder.wait()
    assert wait is not None
    wait.end()
    for index in range(NUM_BUCKETS):
        sync = recorder.ready(BucketInfo(index, 8, (f"p{index}",), index == NUM_BUCKETS - 1))
        sync.note(START)
        sync.note(SEND)
        sync.note(ARRIVE)
        sync.note(END, 4)
    recorder.end_step(step, 1)


def test_events_are_reused_and_read_a_step_at_a_time(device: Device) -> None:
    """If it fails, every step makes events anew, or all of a window are read at once, which holds up training."""
    recorder = StepRecorder(CudaClock(torch.device("cuda")))
    lag = recorder.clock.num_lag_steps
    most: Counter[str] = Counter()
    for step in range(3 * WINDOW):
        before = Counter(device.calls)
        one_step(recorder, step)
        most |= device.calls - before
        if recorder.num_pending == WINDOW + lag:
            before = Counter(device.calls)
            taken = recorder.take(WINDOW)
            assert device.calls == before, "reads while the window is sent"
            assert [each.step for each in taken] == list(range(step + 1 - lag - WINDOW, step + 1 - lag))
            seconds = [each.totals.step_s for each in taken]
            assert seconds == pytest.approx([1e-3 * (MARKS_PER_STEP - 1)] * WINDOW)
    assert device.calls["made"] <= MARKS_PER_STEP * (lag + 2) + 1
    assert (most["queried"], most["read"]) == (2 + NUM_BUCKETS, MARKS_PER_STEP)
    assert device.calls["waited for"] == 0


def test_what_the_device_has_not_passed_is_not_read(device: Device) -> None:
    """If it fails, training waits for the device, or reads events that are recorded anew."""
    recorder = StepRecorder(CudaClock(torch.device("cuda")))
    lag = recorder.clock.num_lag_steps
    device.num_behind = 30 * MARKS_PER_STEP
    for step in range(lag + 5):
        one_step(recorder, step)
    assert device.calls["read"] == 0
    assert recorder.num_pending == lag + 5
    assert not recorder.has(1)
    device.num_behind = 0
    one_step(recorder, lag + 5)
    assert device.calls["read"] == 2 * MARKS_PER_STEP  # it catches up
    assert recorder.has(lag + 6)
    steps = recorder.take(lag + 6)
    assert device.calls["waited for"] == 1
    assert [each.step for each in steps] == list(range(lag + 6))
    starts = [each.start_s for each in steps]
    assert starts == pytest.approx([1e-3 * (1 + MARKS_PER_STEP * step) for step in range(lag + 6)])


def test_times_stay_exact_while_the_base_follows(device: Device) -> None:
    """If it fails, an event is recorded anew while others are measured from it."""
    device.seconds_per_mark = 0.3  # a base lives 10 s
    recorder = StepRecorder(CudaClock(torch.device("cuda")))
    for step in range(200):
        one_step(recorder, step)
    starts = [each.start_s for each in recorder.take(200)]
    assert starts == pytest.approx([0.3 * (1 + MARKS_PER_STEP * step) for step in range(200)])
