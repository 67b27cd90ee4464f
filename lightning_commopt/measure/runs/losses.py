"""The loss curve of a run, as a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from lightning_commopt.measure.runs.files import LOSS_FILE


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


def write_losses(folder: Path, points: Sequence[LossPoint]) -> None:
    """Writes a curve into the run's directory, one line of JSON for each point."""
    text = "".join(json.dumps(asdict(point)) + "\n" for point in points)
    (folder / LOSS_FILE).write_text(text, encoding="utf-8")


def read_losses(folder: Path) -> list[LossPoint]:
    """Reads the curve of a run.

    Returns:
        The points in the order of time; none where there is no file.

    Raises:
        ValueError: a line is not a point.
    """
    path = folder / LOSS_FILE
    if not path.is_file():
        return []
    try:
        return [_point(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: a line is not a point of a loss curve ({type(error).__name__}: {error})") from error


def _point(line: str) -> LossPoint:
    values = json.loads(line)
    kind: Literal["train", "val"] = "val" if values["kind"] == "val" else "train"
    return LossPoint(kind=kind, step=int(values["step"]), seconds=float(values["seconds"]), loss=float(values["loss"]))
