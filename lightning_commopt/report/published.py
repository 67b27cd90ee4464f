"""Figures that others published for the same experiments, on their hardware."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from lightning_commopt.measure.runs.settings import text_of
from lightning_commopt.report.model import Published

_LADDER_SOURCE = "write-up on ViT-L/32 on 8x L40S and 8x A100"
_METHODS_SOURCE = "write-up on four ways of data parallelism on 4x A100 (PCIe)"
_BUCKETS_SOURCE = "write-up on a GPT of about 120 M parameters on A100"


def _on(hardware: str, label: str, speedup: float | None = None) -> Published:
    return Published(label=f"{label} on {hardware}", source=_LADDER_SOURCE, speedup=speedup)


_on_l40s, _on_a100 = partial(_on, "8x L40S (PCIe)"), partial(_on, "8x A100 (NVLink)")
# Speed-ups are over eight GPUs with one bucket, where the write-up gives them.
_LADDER: dict[str, tuple[Published, ...]] = {
    "one_process": (_on("one L40S", "8.91 steps/s"), _on("one A100", "5.17 steps/s")),
    "ddp_one_process": (_on("one L40S", "8.40 steps/s"), _on("one A100", "5.04 steps/s")),
    "one_bucket": (_on_l40s("more than 6x slower than one GPU, NCCL 84 % of the step,"), _on_a100("8 % below one GPU")),
    "static_graph": (_on_l40s("negligible"), _on_a100("negligible")),
    "bucket_view": (_on_l40s("no more copies after the all-reduce"), _on_a100("about +1 %", 1.01)),
    "bf16": (_on_l40s("+65 %", 1.65), _on_a100("slower")),
    "powersgd": (_on_l40s("7.5 steps/s, over 5x the start,", 5.0),),
    "several_buckets": (_on_l40s("+86 % in all, +12 % over bf16,", 1.86), _on_a100("+4 % in all", 1.04)),
}

_METHODS = {  # by size of the model, on two and on four GPUs
    "small": {"naive": {2: 0.60, 4: 0.55}, "interleaved": {2: 0.58, 4: 0.56}, "ddp": {2: 0.83, 4: 0.75}},
    "medium": {"naive": {2: 1.10, 4: 1.37}, "interleaved": {2: 1.31, 4: 1.35}, "ddp": {2: 1.35, 4: 1.75}},
    "large": {"naive": {2: 1.44, 4: 1.92}, "interleaved": {2: 1.56, 4: 2.24}, "ddp": {2: 1.58, 4: 2.31}},
    "xlarge": {"naive": {2: 1.47, 4: 2.06}, "interleaved": {2: 1.62, 4: 2.40}, "ddp": {2: 1.65, 4: 2.39}},
}

_BUCKETS = {"1": "much slower than 25 MB on A100", "25": "as fast as 100 MB on A100", "100": "as fast as 25 MB on A100"}


def published_figures(
    settings: Mapping[str, Any], world_size: int, baseline: Mapping[str, Any]
) -> tuple[Published, ...]:
    """Returns the published figures for a run's settings; without their speed-ups if their baseline was another."""
    variant, method = settings.get("variant"), settings.get("method")
    figures: tuple[Published, ...] = ()
    is_same_baseline = True
    if variant is not None:
        figures = _LADDER.get(text_of(variant), ())
        is_same_baseline = baseline.get("variant") == "one_bucket"
    elif method is not None:
        speedup = _METHODS.get(text_of(settings.get("model.size")), {}).get(text_of(method), {}).get(world_size)
        if speedup is not None:
            label = f"{speedup:.2f} times one GPU on {world_size}x A100 (PCIe)"
            figures = (Published(label=label, source=_METHODS_SOURCE, speedup=speedup),)
        is_same_baseline = baseline.get("method") == "one_process"
    elif settings.get("experiment") == "buckets":
        label = _BUCKETS.get(text_of(settings.get("strategy.bucket_cap_mb")), "")
        figures = (Published(label=label, source=_BUCKETS_SOURCE),) if label else ()
    if is_same_baseline:
        return figures
    return tuple(Published(label=figure.label, source=figure.source) for figure in figures)
