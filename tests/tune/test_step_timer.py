"""Which steps count."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lightning_commopt.measure.clock import HostClock
from lightning_commopt.tune import step_timer
from lightning_commopt.tune.step_timer import StepTimer


def _run(sizes: list[int | None]) -> list[bool]:
    """Returns which steps count, for batches of some sizes; None for a step that is excluded."""
    timer = StepTimer(torch.device("cpu"))
    timer.restart(is_exact=True)
    for size in sizes:
        timer.add_batch({"x": torch.zeros(size or 4, 3), "y": [torch.zeros(size or 4)]})
        if size is None:
            timer.exclude()
        timer.end_step()
    return [not math.isnan(seconds) for seconds in timer.take()]


def test_steps_of_other_shapes_do_not_count() -> None:
    """If it fails, the small last batch of an epoch, or a validation, decides which plan is faster."""
    assert _run([4, 4, 4, 2, 4, None, 4]) == [True, True, True, False, True, False, True]


def test_all_batches_of_a_step_have_usual_shapes() -> None:
    """If it fails, a step whose first batch is small counts under accumulation, or batches of tuples are all alike."""
    timer = StepTimer(torch.device("cpu"))
    timer.restart(is_exact=True)
    for sizes in ((4, 4), (4, 4), (2, 4), (4, 4), (4, 2)):
        for size in sizes:
            timer.add_batch((torch.zeros(size, 3), "name"))
        timer.end_step()
    assert [not math.isnan(seconds) for seconds in timer.take()] == [True, True, False, True, False]


def test_all_count_where_no_shape_is_usual() -> None:
    """If it fails, a plan is never chosen for texts, whose batches all differ."""
    assert all(_run([4, 5, 6, 7, 8, 4]))


class _ScriptedClock(HostClock):
    """Makes these marks, one after the other."""

    def __init__(self, *marks: float) -> None:
        super().__init__()
        self.mark = iter(marks).__next__
        self.waited_for = list[Any]()

    def wait_for(self, mark: Any) -> None:
        self.waited_for.append(mark)


def test_times_are_those_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, time before the first step or of another visit counts."""
    monkeypatch.setattr(step_timer, "HostClock", lambda: _ScriptedClock(10.0, 11.0))
    exact = _ScriptedClock(20.0, 20.5, 22.0)
    monkeypatch.setattr(step_timer, "clock_for", lambda device: exact)
    timer = StepTimer(torch.device("cpu"))
    timer.restart(is_exact=False)
    timer.end_step()
    assert timer.take() == [1.0]
    timer.restart(is_exact=True)
    assert timer.take() == []
    timer.end_step()
    timer.end_step()
    assert timer.take() == [0.5, 1.5]
    assert exact.waited_for == [22.0]
