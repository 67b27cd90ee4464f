"""The loss curve of a run: collected while it trains, written to a file and read."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lightning_commopt.measure.plain import check_numbers, from_plain, parse_json
from lightning_commopt.measure.runs.files import LOSS_FILE

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LossPoint:
    """One point of the curve."""

    kind: Literal["train", "val"]  # "train" for the mean of the batches since the last point, "val" for a validation
    step: int  # optimizer steps so far
    seconds: float  # training time so far, without validation
    loss: float


def write_losses(folder: Path, points: Sequence[LossPoint]) -> None:
    """Writes a curve into the run's directory, one line of JSON for each point."""
    text = "".join(json.dumps(asdict(point)) + "\n" for point in points)
    (folder / LOSS_FILE).write_text(text, encoding="utf-8")


def read_losses(folder: Path) -> list[LossPoint]:
    """Reads the curve of a run, in the order of time; empty without a file.

    Raises:
        ValueError: a line is not a point; the message has its number.
    """
    path = folder / LOSS_FILE
    points = []
    for number, line in enumerate(path.read_bytes().splitlines() if path.is_file() else (), 1):
        if not line.strip():
            continue
        try:
            point = from_plain(LossPoint, parse_json(line))
            check_numbers(point.seconds, "seconds")  # the loss itself may be infinite or NaN
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}, line {number} is not a point of a loss curve: {error}") from None
        points.append(point)
    return points


class LossCurve:
    """Collects the losses of batches without ever waiting for the device.

    Every point is the mean of equally many consecutive batches. When there are ``max_points`` points (an even number),
    neighbours are merged, and points then hold twice as many batches, so memory is bounded.
    """

    def __init__(self, max_points: int = 512) -> None:
        self._max_points = max_points
        self._batches_per_point = 1
        self._num_batches = 0
        # Each point is the last batch's step and seconds, the sum of the losses, and their number.
        self._points: list[tuple[int, float, Tensor | float, int]] = []

    def add(self, loss: Tensor | None, step: int, seconds: float) -> None:
        """Adds one batch, with its loss on any device, or None, and the steps and seconds of training so far."""
        if self._num_batches == self._max_points * self._batches_per_point:
            self._points = self._merged(2)
            self._batches_per_point *= 2
        if self._num_batches % self._batches_per_point == 0:
            self._points.append((step, seconds, 0.0, 0))
        self._num_batches += 1
        *_, total, count = self._points[-1]
        if loss is not None:
            total, count = total + loss.detach().float().reshape(()), count + 1
        self._points[-1] = step, seconds, total, count

    def points(
        self,
        device: torch.device | None = None,
        reduce: Callable[[Tensor, Literal["sum", "max"]], Tensor] | None = None,
    ) -> list[LossPoint]:
        """Returns the mean loss of every point that has a loss.

        With ``reduce`` the n-th batches of all ranks make one point, whose loss is the mean over the ranks that have
        one; its step and seconds come from the rank that is ahead. Ranks may have different numbers of batches and of
        losses. All ranks must then call it.
        ``reduce`` all-reduces a float64 tensor on ``device``, None for the CPU, in place or not.
        """
        import torch  # not at the top of the module, because reading a curve must not import torch

        device = device or torch.device("cpu")
        size = torch.tensor([self._batches_per_point, self._num_batches], dtype=torch.float64, device=device)
        batches_per_point, num_batches = map(int, (size if reduce is None else reduce(size, "max")).tolist())
        points = self._merged(batches_per_point // self._batches_per_point)
        num_points = -(-num_batches // batches_per_point)
        totals = torch.zeros(4, num_points, dtype=torch.float64, device=device)
        if points:
            steps, seconds, sums, counts = zip(*points, strict=True)
            totals[0, : len(points)] = torch.stack([torch.as_tensor(value, device=device) for value in sums])
            totals[1:, : len(points)] = totals.new_tensor([counts, steps, seconds])
        if reduce is not None and num_points:
            totals = torch.cat([reduce(totals[:2].clone(), "sum"), reduce(totals[2:].clone(), "max")])
        # Once the rank that was ahead has ended, the next point's seconds come from a rank whose clock may be behind.
        totals[3] = totals[3].cummax(0).values
        return [
            LossPoint(kind="train", step=int(step), seconds=seconds, loss=total / count)
            for total, count, step, seconds in totals.T.tolist()
            if count
        ]

    def _merged(self, num: int) -> list[tuple[int, float, Tensor | float, int]]:
        """Returns the points with ``num`` neighbours merged into one."""
        groups = [list(zip(*self._points[at : at + num], strict=True)) for at in range(0, len(self._points), num)]
        return [(steps[-1], seconds[-1], sum(sums), sum(counts)) for steps, seconds, sums, counts in groups]
