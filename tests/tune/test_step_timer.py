"""Which steps count."""

from __future__ import annotations

import math

import torch

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


def test_all_count_where_no_shape_is_usual() -> None:
    """If it fails, a plan is never chosen for texts, whose batches all differ."""
    assert all(_run([4, 5, 6, 7, 8, 4]))


def test_times_are_those_of_steps() -> None:
    """If it fails, time before the first step or of another visit counts."""
    timer = StepTimer(torch.device("cpu"))
    timer.restart(is_exact=False)
    timer.end_step()
    timer.restart(is_exact=True)
    assert timer.take() == []
    timer.end_step()
    (seconds,) = timer.take()
    assert seconds >= 0
