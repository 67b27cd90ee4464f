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
        kind: "train" for the mean of the batches since the last point, "val" for a validation.
        step: optimizer steps so far.
        seconds: of training so far, without validation.
        loss: in the model's unit.
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
    """Reads the curve of a run, in the order of time; empty without a file.

    Raises:
        ValueError: a line is not a point.
    """
    path = folder / LOSS_FILE
    if not path.is_file():
        return []
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        return [
            LossPoint(
                kind="val" if line["kind"] == "val" else "train",
                step=int(line["step"]),
                seconds=float(line["seconds"]),
                loss=float(line["loss"]),
            )
            for line in lines
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: a line is not a point of a loss curve ({type(error).__name__}: {error})") from error
