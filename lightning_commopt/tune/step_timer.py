"""StepTimer: the wall time of those optimizer steps that can be compared."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any

import torch

from lightning_commopt.measure.clock import HostClock, clock_for


class StepTimer:
    """Times steps from the start of one to the start of the next, with waiting for data and callbacks.

    A step does not count if `exclude` was called in it, or if its batches have other shapes than most steps had, like
    the last one of an epoch. If no shape accounts for most steps (texts of varying length), every step counts.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._clock: Any = HostClock()
        self._start: Any = None
        self._spans: list[tuple[Any, Any, bool]] = []
        self._shapes = 0  # hash of all shapes in the present step
        self._counts: Counter[int] = Counter()
        self._is_excluded = False

    def restart(self, *, is_exact: bool) -> None:
        """Starts with a step that begins now.

        With ``is_exact`` it uses the device's clock; otherwise the host's, which costs nothing but may be ahead.
        """
        self._clock = clock_for(self._device) if is_exact else HostClock()
        self._spans.clear()
        self._start = self._clock.mark()

    def end_step(self) -> None:
        """Ends a step; the next one starts."""
        shapes, self._shapes = self._shapes, 0
        self._counts[shapes] += 1
        usual, num_usual = self._counts.most_common(1)[0]
        is_unusual = shapes != usual and 2 * num_usual > self._counts.total()
        mark = self._clock.mark()
        self._spans.append((self._start, mark, not (is_unusual or self._is_excluded)))
        self._start, self._is_excluded = mark, False

    def add_batch(self, batch: Any) -> None:
        """Records a batch of the present step."""
        self._shapes = hash((self._shapes, shapes_of(batch)))

    def exclude(self) -> None:
        """Makes the present step not count."""
        self._is_excluded = True

    def take(self) -> list[float]:
        """Returns the seconds of all steps since `restart`, NaN for those that do not count; waits for the device."""
        if self._spans:
            self._clock.wait_for(self._spans[-1][1])
        seconds = self._clock.seconds
        return [seconds(end) - seconds(start) if counts else math.nan for start, end, counts in self._spans]


def shapes_of(batch: Any) -> Hashable:
    """Returns the shapes of all tensors in nested dicts, lists and tuples.

    >>> shapes_of({"x": torch.zeros(2, 3), "y": [torch.zeros(2), "name"]})
    ((2, 3), ((2,), None))
    """
    if isinstance(batch, torch.Tensor):
        return tuple(batch.shape)
    if isinstance(batch, Mapping):
        return tuple(map(shapes_of, batch.values()))
    if isinstance(batch, list | tuple):
        return tuple(map(shapes_of, batch))
    return None
