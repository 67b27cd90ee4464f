"""LinkModel: predicts how long collectives take on a measured link, with an interval; to JSON and back."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from commopt_diagnose.bench.fit import Point, Segment, errors_left_out, fit_segments, time_at
from commopt_diagnose.bench.result import BenchResult, Case, Row
from commopt_diagnose.bench.settings import size_text
from lightning_commopt.measure.median import CONFIDENCE
from lightning_commopt.measure.plain import from_plain, load_json, write_json
from lightning_commopt.text.formatting import count, number, short_percent

FORMAT = 1  # version of the JSON, raised when a key changes its meaning; new keys keep it
MODEL_KIND = "commopt link model"  # ``kind`` in the JSON
_MIN_SIZES = 3  # with fewer sizes the cross-validation error says nothing


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The expected median time of a message, a 95 % interval of repetitions, and whether the size is unmeasured."""

    time_s: float
    low_s: float
    high_s: float
    is_extrapolated: bool


class Spread(NamedTuple):
    """The interval near a measured size, its ends over the prediction."""

    size_bytes: int
    low_ratio: float
    high_ratio: float


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Time against size for one series of cases."""

    case: Case  # what all cases of the series share; its size and count mean nothing
    segments: tuple[Segment, ...]  # ordered by size
    median_error: float | None  # relative error in leave-one-out cross-validation; None with fewer than three sizes
    max_error: float | None  # the largest of these errors
    spreads: tuple[Spread, ...]  # ordered by size

    def __post_init__(self) -> None:
        if not self.segments or not self.spreads:
            raise ValueError("a curve has no segments, or no spreads")

    @classmethod
    def fit(cls, rows: Sequence[Row]) -> Curve:
        """Fits a curve to the rows of one series, in the order of sizes.

        The interval near a size comes from the repetitions of it and its two neighbours: their times over the
        prediction by a fit without their size. A point's noise is half the interval of its median.
        """
        points = [
            Point(row.case.size_bytes, time_s, (high - low) / 2 / time_s)
            for row in rows
            for time_s, low, high in [row.time_s]
        ]
        segments = fit_segments(points)
        errors = errors_left_out(points, segments)
        ratios = [
            [time_s / point.time_s * (1 + error) for time_s in sorted(row.times_s)]
            for row, point, error in zip(rows, points, errors, strict=True)
        ]
        spreads = [
            _spread(point.size_bytes, chain.from_iterable(ratios[max(0, number - 1) : number + 2]))
            for number, point in enumerate(points)
        ]
        sizes = [abs(error) for error in errors] if len(rows) >= _MIN_SIZES else []
        return cls(
            case=rows[0].case,
            segments=segments,
            median_error=statistics.median(sizes) if sizes else None,
            max_error=max(sizes) if sizes else None,
            spreads=tuple(spreads),
        )

    def predict(self, size_bytes: float) -> Prediction:
        """Predicts the time of a message of at least 1 byte."""
        if not size_bytes >= 1:
            raise ValueError(f"size_bytes must be at least 1, got {size_bytes!r}")
        time_s = time_at(self.segments, size_bytes)
        spread = min(self.spreads, key=lambda near: abs(math.log(near.size_bytes / size_bytes)))
        is_inside = self.segments[0].first_bytes <= size_bytes <= self.segments[-1].last_bytes
        return Prediction(
            time_s=time_s,
            low_s=min(1.0, spread.low_ratio) * time_s,
            high_s=max(1.0, spread.high_ratio) * time_s,
            is_extrapolated=not is_inside,
        )

    @property
    def text(self) -> str:
        ranks = count(self.case.num_ranks, "rank")
        if len(self.spreads) == 1:
            return f"{self.case.label} ({ranks}): one size, whose times show neither a latency nor a bandwidth"
        parts = []
        for segment in self.segments:
            rate = f" + size / {number(1e-6 / segment.s_per_byte)} MB/s" if segment.s_per_byte > 0 else ""
            until = "" if segment is self.segments[-1] else f" up to {size_text(segment.last_bytes)}"
            parts.append(f"{number(1e3 * segment.latency_s)} ms{rate}{until}")
        error = "too few sizes to estimate the error"
        if self.median_error is not None:
            error = f"sizes left out are off by {short_percent(self.median_error)} (median)"
        return f"{self.case.label} ({ranks}): {', then '.join(parts)}; {error}"


@dataclass(frozen=True, kw_only=True)
class LinkModel:
    """Predicts collectives and comm hooks on a measured link."""

    curves: tuple[Curve, ...]  # one for each series: collective, dtype, place, load, scope and number of ranks
    where: Mapping[str, Any]  # conditions, as in `BenchResult.where`

    @classmethod
    def fit(cls, result: BenchResult) -> LinkModel:
        """Fits a curve to every series of a result that has measured rows."""
        if not result.measured:
            raise ValueError("there is nothing to fit a link model to: no case was measured")
        curves = tuple(Curve.fit(rows) for rows in result.by_series().values())
        return cls(curves=curves, where=dict(result.where))

    def curve(self, name: str, **wanted: Any) -> Curve:
        """Returns the curve with a `Case.name` and further attributes of the `Case`, such as ``load="compute"``.

        Raises:
            KeyError: no curve matches; the message lists all.
        """
        for curve in self.curves:
            if curve.case.name == name and all(getattr(curve.case, key) == value for key, value in wanted.items()):
                return curve
        known = "; ".join(curve.case.label for curve in self.curves)
        raise KeyError(f"no curve of {name!r}{f' with {wanted}' if wanted else ''}; there are: {known}")

    def predict(self, name: str, size_bytes: float, **wanted: Any) -> Prediction:
        """Predicts the time of a message; see `curve` for the arguments."""
        return self.curve(name, **wanted).predict(size_bytes)

    def to_plain(self) -> dict[str, Any]:
        curves = []
        for curve in self.curves:
            plain = dataclasses.asdict(curve)
            plain["segments"] = [segment._asdict() for segment in curve.segments]
            plain["spreads"] = [spread._asdict() for spread in curve.spreads]
            curves.append(plain)
        return {"kind": MODEL_KIND, "format": FORMAT, "where": dict(self.where), "curves": curves}

    def save(self, path: Path) -> None:
        """Writes the model as JSON, atomically."""
        write_json(path, self.to_plain())

    @classmethod
    def load(cls, path: Path) -> LinkModel:
        """Reads a file of `save`; for errors see `load_json`."""
        return load_json(path, MODEL_KIND, FORMAT, partial(from_plain, cls))


def _spread(size_bytes: int, ratios: Iterable[float]) -> Spread:
    ordered = sorted(ratios)
    tail = int((1 - CONFIDENCE) / 2 * len(ordered))
    return Spread(size_bytes, ordered[tail], ordered[-1 - tail])
