"""The loss of a fit against steps and against seconds, as it lies in the run's directory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

LOSS_FILE = "loss.jsonl"


@dataclass(frozen=True, kw_only=True)
class LossPoint:
    """One point of the curve.

    Attributes:
        kind: "train" for the mean of the batches since the point before, "val" for a validation.
        step: optimizer steps made so far.
        seconds: of training so far; validation is not in it.
        loss: nats, or whatever the model's loss is.
    """

    kind: Literal["train", "val"]
    step: int
    seconds: float
    loss: float


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


def write_losses(folder: Path, points: Sequence[LossPoint]) -> None:
    """Writes a curve into the run's directory, one line of JSON for each point."""
    text = "".join(json.dumps(asdict(point)) + "\n" for point in points)
    (folder / LOSS_FILE).write_text(text, encoding="utf-8")


def read_losses(folder: Path) -> list[LossPoint]:
    """Reads the curve of a run.

    Returns:
        The points in the order of time; none where there is no file.

    Raises:
        ValueError: a line is no point.
    """
    path = folder / LOSS_FILE
    if not path.is_file():
        return []
    try:
        return [_point(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: a line is no point of a loss curve ({type(error).__name__}: {error})") from error


def _point(line: str) -> LossPoint:
    values = json.loads(line)
    kind: Literal["train", "val"] = "val" if values["kind"] == "val" else "train"
    return LossPoint(kind=kind, step=int(values["step"]), seconds=float(values["seconds"]), loss=float(values["loss"]))
