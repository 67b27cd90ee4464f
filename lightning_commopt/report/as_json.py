"""A report for other programs: JSON with all numbers, CSV with a row for each setting."""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_commopt.report.model import Group, Interval, Report, Run, Setting
from lightning_commopt.report.settings import chosen_settings

FORMAT = 1
"""Of the JSON. A later version that changes what a key means raises it; new keys do not."""

_INTERVALS = (
    *("samples_per_s", "steps_per_s", "speedup", "step_s", "comm_s", "exposed_s", "exposed_share"),
    *("val_loss", "val_accuracy"),
)
_NUMBERS = ("speedup_limit", "efficiency", "wire_bytes", "peak_memory_bytes")
_OF_RUN = (
    *("samples_per_s", "steps_per_s", "seconds", "exposed_share", "wire_bytes_per_step", "peak_memory_bytes"),
    *("val_loss", "val_accuracy"),
)


def to_plain(report: Report) -> dict[str, Any]:
    """Returns a report in types that JSON has; what is not finite is None."""
    plain = {
        "format": FORMAT,
        "title": report.title,
        "conditions": dict(report.conditions),
        "problems": list(report.problems),
        "groups": [_plain_group(group) for group in report.groups],
        "failed": [{**_plain_run(run), "error": run.record.error} for run in report.failed],
    }
    return {name: finite(value) for name, value in plain.items()}


def write_csv(report: Report, path: Path) -> None:
    """Writes a row for each setting: names as in the JSON, ``_low`` and ``_high`` behind those of intervals' ends."""
    rows = [_row(group, setting) for group in report.groups for setting in group.settings]
    varied = list(dict.fromkeys(name for _, values in rows for name in values))
    columns = [*_row_names(), *varied]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows({**numbers, **values} for numbers, values in rows)


def _plain_group(group: Group) -> dict[str, Any]:
    return {
        "name": group.name,
        "reference": group.reference.name,
        "fastest": group.fastest.name,
        "recommended": None if group.recommended is None else group.recommended.name,
        "answer": list(group.answer),
        "settings": [_plain_setting(setting) for setting in group.settings],
        "scalings": [dataclasses.asdict(scaling) for scaling in group.scalings],
    }


def _plain_setting(setting: Setting) -> dict[str, Any]:
    return {
        "name": setting.name,
        "values": dict(setting.values),
        "settings": chosen_settings(setting.runs[0]),
        "plan_name": setting.plan_name,
        "world_size": setting.world_size,
        "bucket_cap_mb": setting.bucket_cap_mb,
        "is_lossy": setting.is_lossy,
        "num_diverged": setting.num_diverged,
        "difference": setting.difference,
        "is_beyond_limit": setting.is_beyond_limit,
        **{name: _plain_interval(getattr(setting, name)) for name in _INTERVALS},
        **{name: getattr(setting, name) for name in _NUMBERS},
        "published": [dataclasses.asdict(published) for published in setting.published],
        "config_lines": list(setting.config_lines),
        "runs": [_plain_run(run) for run in setting.runs],
    }


def _plain_run(run: Run) -> dict[str, Any]:
    return {
        "name": run.name,
        "group": run.group,
        "setting": run.setting,
        "plan_name": run.record.plan_name,
        "repetition": run.repetition,
        "settings": chosen_settings(run),
        "overrides": list(run.record.overrides),
        **{name: getattr(run.record, name) for name in _OF_RUN},
    }


def _plain_interval(interval: Interval | None) -> dict[str, Any] | None:
    return None if interval is None else dataclasses.asdict(interval)


def finite(value: Any) -> Any:
    """Returns a value with None for each number that JSON does not know."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return value


def _row_names() -> list[str]:
    ends = [f"{name}{end}" for name in _INTERVALS for end in ("", "_low", "_high")]
    first = ["group", "setting", "plan_name", "world_size", "bucket_cap_mb", "is_lossy", "repetitions", "num_diverged"]
    return [*first, "difference", *ends, *_NUMBERS, "published"]


def _row(group: Group, setting: Setting) -> tuple[dict[str, Any], dict[str, str]]:
    numbers: dict[str, Any] = {
        "group": group.name,
        "setting": setting.name,
        "plan_name": setting.plan_name,
        "world_size": setting.world_size,
        "bucket_cap_mb": setting.bucket_cap_mb,
        "is_lossy": setting.is_lossy,
        "repetitions": len(setting.runs),
        "num_diverged": setting.num_diverged,
        "difference": "reference" if setting is group.reference else setting.difference,
        "published": "; ".join(f"{published.label} ({published.source})" for published in setting.published),
    }
    for name in _INTERVALS:
        interval: Interval | None = getattr(setting, name)
        ends = (None, None, None) if interval is None else (interval.median, interval.low, interval.high)
        numbers |= {f"{name}{end}": value for end, value in zip(("", "_low", "_high"), ends, strict=True)}
    numbers |= {name: getattr(setting, name) for name in _NUMBERS}
    values = {name if name not in _row_names() else f"override {name}": value for name, value in setting.values.items()}
    return numbers, values
