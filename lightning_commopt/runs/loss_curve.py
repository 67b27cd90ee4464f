"""Collects the loss of a fit as it goes on; `losses` is the file that comes of it."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_commopt.runs.losses import LossPoint


class LossCurve:
    """Collects the losses of batches without ever waiting for the device.

    When ``max_points`` are there, neighbours are averaged and each further point stands for twice as many batches, so
    that memory is bounded however long the fit is.

    Args:
        max_points: an even number.
    """

    def __init__(self, max_points: int = 512) -> None:
        if max_points < 2 or max_points % 2:
            raise ValueError(f"max_points must be an even number above 0, got {max_points!r}")
        self._max_points = max_points
        self._batches_of_a_point = 1
        self._marks: list[tuple[int, float]] = []
        self._means: list[Tensor] = []
        self._sum: Tensor | None = None
        self._num_batches = 0

    def add(self, loss: Tensor, step: int, seconds: float) -> None:
        """Takes in the loss of one batch.

        Args:
            loss: one number, on any device; only read.
            step: optimizer steps made so far.
            seconds: of training so far.
        """
        value = loss.detach().float().reshape(())
        self._sum = value.clone() if self._sum is None else self._sum + value
        self._num_batches += 1
        if self._num_batches < self._batches_of_a_point:
            return
        self._marks.append((step, seconds))
        self._means.append(self._sum / self._num_batches)
        self._sum, self._num_batches = None, 0
        if len(self._means) >= self._max_points:
            self._marks = self._marks[1::2]
            self._means = [(a + b) / 2 for a, b in zip(self._means[::2], self._means[1::2], strict=True)]
            self._batches_of_a_point *= 2

    def values(self, device: torch.device) -> Tensor:
        """Returns the losses of all points, ``(n,)`` float32 on ``device``."""
        return torch.stack(self._means).to(device) if self._means else torch.empty(0, device=device)

    def points(self, values: Tensor) -> list[LossPoint]:
        """Returns the points with other losses, such as the means over ranks.

        Args:
            values: ``(n,)`` as `values` returned.
        """
        return [
            LossPoint(kind="train", step=step, seconds=seconds, loss=loss)
            for (step, seconds), loss in zip(self._marks, values.tolist(), strict=True)
        ]
