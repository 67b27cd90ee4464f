"""Figures that others have published for the same experiments, on their hardware; never to be taken for ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_commopt.measure.runs.settings import text_of
from lightning_commopt.report.model import Published

_LADDER_SOURCE = "write-up on ViT-L/32 on 8x L40S and 8x A100"
_METHODS_SOURCE = "write-up on four ways of data parallelism on 4x A100 (PCIe)"
_BUCKETS_SOURCE = "write-up on a GPT of about 120 M parameters on A100"


def _on_l40s(label: str, speedup: float | None = None, *, where: str = "8x L40S (PCIe)") -> Published:
    return Published(label=f"{label} on {where}", source=_LADDER_SOURCE, speedup=speedup)


def _on_a100(label: str, speedup: float | None = None, *, where: str = "8x A100 (NVLink)") -> Published:
    return Published(label=f"{label} on {where}", source=_LADDER_SOURCE, speedup=speedup)


# The speed-ups are over eight GPUs with one bucket, as far as the write-up says them.
_LADDER: dict[str, tuple[Published, ...]] = {
    "one_process": (
        _on_l40s("8.91 steps/s", where="one L40S"),
        _on_a100("5.17 steps/s", where="one A100"),
    ),
    "ddp_one_process": (
        _on_l40s("8.40 steps/s", where="one L40S"),
        _on_a100("5.04 steps/s", where="one A100"),
    ),
    "one_bucket": (
        _on_l40s("more than 6x slower than one GPU, NCCL 84 % of the step,"),
        _on_a100("8 % below one GPU"),
    ),
    "static_graph": (_on_l40s("negligible"), _on_a100("negligible")),
    "bucket_view": (_on_l40s("no more copies after the all-reduce"), _on_a100("about +1 %", 1.01)),
    "bf16": (_on_l40s("+65 %", 1.65), _on_a100("slower")),
    "powersgd": (_on_l40s("7.5 steps/s, over 5x the start,", 5.0),),
    "several_buckets": (_on_l40s("+86 % in all, +12 % over bf16,", 1.86), _on_a100("+4 % in all", 1.04)),
}

_OF_METHODS: dict[tuple[str, str, int], float] = {
    (size, method, num_ranks): figure
    for size, row in {
        "small": (0.60, 0.55, 0.58, 0.56, 0.83, 0.75),
        "medium": (1.10, 1.37, 1.31, 1.35, 1.35, 1.75),
        "large": (1.44, 1.92, 1.56, 2.24, 1.58, 2.31),
        "xlarge": (1.47, 2.06, 1.62, 2.40, 1.65, 2.39),
    }.items()
    for (method, num_ranks), figure in zip(
        [(method, num_ranks) for method in ("naive", "interleaved", "ddp") for num_ranks in (2, 4)], row, strict=True
    )
}

_OF_BUCKETS = {
    "1": "much slower than 25 MB on A100",
    "25": "as fast as 100 MB on A100",
    "100": "as fast as 25 MB on A100",
}


def published_figures(
    settings: Mapping[str, Any], world_size: int, baseline: Mapping[str, Any]
) -> tuple[Published, ...]:
    """Returns what others found for the setting of a run.

    Args:
        settings: of the run, all of them.
        world_size: ranks that it trained on.
        baseline: settings of the baseline; where theirs was another, their speed-ups are left out.
    """
    variant, method = settings.get("variant"), settings.get("method")
    figures: tuple[Published, ...] = ()
    is_same_baseline = True
    if variant is not None:
        figures = _LADDER.get(variant, ())
        is_same_baseline = baseline.get("variant") == "one_bucket"
    elif method is not None:
        speedup = _OF_METHODS.get((settings.get("model.size", ""), method, world_size))
        if speedup is not None:
            label = f"{speedup:.2f} times one GPU on {world_size}x A100 (PCIe)"
            figures = (Published(label=label, source=_METHODS_SOURCE, speedup=speedup),)
        is_same_baseline = baseline.get("method") == "one_process"
    elif settings.get("experiment") == "buckets":
        label = _OF_BUCKETS.get(text_of(settings.get("strategy.bucket_cap_mb")), "")
        figures = (Published(label=label, source=_BUCKETS_SOURCE),) if label else ()
    if is_same_baseline:
        return figures
    return tuple(Published(label=figure.label, source=figure.source) for figure in figures)
