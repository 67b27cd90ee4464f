"""Writes a report's files: the page; for other programs JSON with all numbers, and CSV with a row for each setting."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_commopt.measure.plain import write_rows
from lightning_commopt.measure.runs.files import PAGE_FILE, TABLE_FILE
from lightning_commopt.measure.runs.settings import Value, text_of
from lightning_commopt.report.model import COLUMNS, Group, Report, Run, Setting

FORMAT = 1  # version of the JSON, raised when a key changes its meaning; new keys keep it

_RUN_FIELDS = (
    *(
        "samples_per_s",
        "steps_per_s",
        "seconds",
        "load_at_start",
        "load_at_end",
        "exposed_share",
        "wire_bytes_per_step",
        "peak_memory_bytes",
    ),
    *("val_loss", "val_accuracy"),
)
_SETTING_FIELDS = (
    *("sync_method", "world_size", "bucket_cap_mb", "is_lossy", "num_diverged", "difference", "is_beyond_limit"),
)
_INTERVALS = [field.name for field in dataclasses.fields(Setting) if "Interval" in str(field.type)]


def to_plain(report: Report) -> dict[str, Any]:
    """Returns a report in JSON types, with None for numbers that are not finite."""
    plain = {
        "format": FORMAT,
        "title": report.title,
        "conditions": report.conditions,
        "problems": report.problems,
        "groups": [
            {
                "name": group.name,
                "baseline": group.baseline.name,
                "fastest": group.fastest.name,
                "recommended": None if group.recommended is None else group.recommended.name,
                "answer": group.answer,
                "settings": [_plain_setting(setting) for setting in group.settings],
                "scalings": group.scalings,
            }
            for group in report.groups
        ],
        "failed": [{**_plain_run(run), "error": run.record.error} for run in report.failed],
    }
    return {name: finite(value) for name, value in plain.items()}


def write_files(report: Report, output: Path, table: Path | None = None) -> tuple[Path, Path]:
    """Writes the page, and a CSV table for other programs; returns their paths.

    ``output`` is a folder, which is made, or, with the suffix ``.html`` or ``.htm``, the page. Without a path the table
    is ``report.csv`` beside the page, or has the page's name with ``.csv``.

    Raises:
        ValueError: ``output`` is a file with another suffix.
    """
    # Not at the top of the module, as a report on the terminal should not wait for jinja2.
    from lightning_commopt.report.page import write_page

    if output.suffix.lower() in (".html", ".htm"):
        page, beside = output, output.with_suffix(".csv")
    elif output.is_file():
        raise ValueError(f"--output={output} is a file: name a folder, or a page with the suffix .html")
    else:
        page, beside = output / PAGE_FILE, output / TABLE_FILE
    table = beside if table is None else table
    for path in (page, table):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_page(report, page)
    write_csv(report, table)
    return page, table


def write_csv(report: Report, path: Path) -> None:
    """Writes a row for each setting: names as in the JSON, with ``_low`` and ``_high`` for the ends of intervals.

    Searches of ``plan="auto"`` have ``chosen`` and ``lost_steps`` of all repetitions, with "; " between them.
    """
    rows = [_row(group, setting) for group in report.groups for setting in group.settings]
    results = dict.fromkeys(name for numbers, _ in rows for name in numbers)
    write_rows(path, [{**numbers, **values} for numbers, values in rows], first=results)


def _plain_setting(setting: Setting) -> dict[str, Any]:
    return {
        "name": setting.name,
        "values": _texts(setting.values),
        "settings": _texts(setting.runs[0].choices),
        **{name: getattr(setting, name) for name in _SETTING_FIELDS},
        **{column.key: getattr(setting, column.key) for column in COLUMNS},
        "config_lines": setting.config_lines,
        "runs": [_plain_run(run) for run in setting.runs],
    }


def _plain_run(run: Run) -> dict[str, Any]:
    return {
        "name": run.name,
        "group": run.group,
        "setting": run.setting,
        "sync_method": run.record.sync_method,
        "plan_name": run.record.plan_name,
        "repetition": run.repetition,
        "settings": _texts(run.choices),
        "overrides": run.settings.overrides,
        **{name: getattr(run.record, name) for name in _RUN_FIELDS},
        "tuning": run.tuning,
    }


def finite(value: Any) -> Any:
    """Returns a value in types that JSON has, with None for each number that is not finite."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return value


def _row(group: Group, setting: Setting) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the results and the values of a setting, by the names of the columns."""
    row: dict[str, Any] = {"group": group.name, "setting": setting.name, "repetitions": len(setting.runs)}
    row |= {name: getattr(setting, name) for name in _SETTING_FIELDS}
    row["difference"] = "baseline" if setting is group.baseline else setting.difference
    for column in COLUMNS:
        value = getattr(setting, column.key)
        if isinstance(value, tuple):
            value = "; ".join(f"{figure.label} ({figure.source})" for figure in value)
        if column.key in _INTERVALS:
            for suffix, end in (("", "median"), ("_low", "low"), ("_high", "high")):
                row[f"{column.key}{suffix}"] = None if value is None else getattr(value, end)
        else:
            row[column.key] = value
    if searches := [run.tuning for run in setting.runs if run.tuning is not None]:
        row["chosen"] = "; ".join(search.chosen for search in searches)
        row["lost_steps"] = "; ".join(f"{search.lost_steps:g}" for search in searches)
    values = {name if name not in row else f"setting {name}": value for name, value in _texts(setting.values).items()}
    return row, values


def _texts(values: Mapping[str, Value]) -> dict[str, str]:
    return {name: text_of(value) for name, value in values.items()}
