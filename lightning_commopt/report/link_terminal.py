"""The link model on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_commopt.measure.link.model import LinkModel
from lightning_commopt.measure.link.sizes import size_text
from lightning_commopt.report.bench_terminal import place_lines
from lightning_commopt.text.formatting import number


def predictions(model: LinkModel, sizes_bytes: Sequence[int]) -> list[dict[str, Any]]:
    """Returns what each curve predicts for each size, in types that JSON has."""
    return [
        {"series": curve.case.label, "size_bytes": size, **vars(curve.predict(size))}
        for curve in model.curves
        for size in sizes_bytes
    ]


def model_lines(model: LinkModel, sizes_bytes: Sequence[int]) -> list[str]:
    """Returns a line for each curve, and one for each prediction."""
    lines = ["# link model"]
    for curve in model.curves:
        lines.append(f"#   {curve.text}")
        for size in sizes_bytes:
            found = curve.predict(size)
            beyond = "; beyond what was measured" if found.is_extrapolated else ""
            ends = f"{number(1e3 * found.low_s)} to {number(1e3 * found.high_s)}"
            lines.append(f"#     {size_text(size)}: {number(1e3 * found.time_s)} ms ({ends}){beyond}")
    return lines


def kept_model_lines(model: LinkModel, sizes_bytes: Sequence[int]) -> list[str]:
    """Returns where a model was measured, and its `model_lines`."""
    return [*(f"# {line}" for line in place_lines(model.where)), *model_lines(model, sizes_bytes)]
