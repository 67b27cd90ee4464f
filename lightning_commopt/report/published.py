"""Figures that others published for the same experiments, on their hardware: `published.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from lightning_commopt.measure.runs.settings import text_of
from lightning_commopt.report.model import Published


def published_figures(
    settings: Mapping[str, Any], world_size: int, baseline: Mapping[str, Any]
) -> tuple[Published, ...]:
    """Returns the published figures for a run's settings; without their speed-ups if their baseline was another."""
    variant, method = settings.get("variant"), settings.get("method")
    is_same_baseline = True
    if variant is not None:
        known = _published()["ladder"]
        figures = known["figures"].get(text_of(variant), ())
        is_same_baseline = baseline.get("variant") == "one_bucket"
    elif method is not None:
        known = _published()["methods"]
        of_size = known["speedups"].get(text_of(settings.get("model.size")), {})
        speedup = of_size.get(text_of(method), {}).get(world_size)
        figures = []
        if speedup is not None:
            figures = [{"label": f"{speedup:.2f} times one GPU on {world_size}x A100 (PCIe)", "speedup": speedup}]
        is_same_baseline = baseline.get("method") == "one_process"
    elif settings.get("experiment") == "buckets":
        known = _published()["buckets"]
        figures = known["figures"].get(text_of(settings.get("strategy.bucket_cap_mb")), ())
    else:
        return ()
    shown = figures if is_same_baseline else [{"label": figure["label"]} for figure in figures]
    return tuple(Published(**figure, source=known["source"]) for figure in shown)


@cache
def _published() -> dict[str, dict[str, Any]]:
    return yaml.safe_load((files("lightning_commopt.report") / "published.yaml").read_text(encoding="utf-8"))
