"""Tables of what runs came to, for the terminal."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from lightning_commopt.run_record import RunRecord
from lightning_commopt.sweep.job import JobResult

_BYTES_IN_MB = 1e6
_MEASURED = ("steps_per_s", "samples_per_s", "exposed_share", "val_loss")


def sweep_table(results: Sequence[JobResult]) -> Table:
    """Returns one row for each setting, with a column for every override in which the settings differ.

    Repetitions of a setting share a row, with the medians of those that finished.
    """
    records: dict[tuple[str, ...], list[RunRecord]] = {}
    for result in results:
        setting = tuple(override for override in result.job.overrides if _split(override)[0] != "repetition")
        records.setdefault(setting, []).append(result.record)
    values = [dict(map(_split, setting)) for setting in records]
    names = dict.fromkeys(name for value in values for name in value)
    varying = [name for name in names if len({value.get(name) for value in values}) > 1]
    has_ranks = all(result.record.world_size is not None for result in results)
    in_other_columns = ("strategy", "strategy/comm_hook", *(["ranks"] if has_ranks else []))
    shown = [name for name in varying if name not in in_other_columns]
    has_failed = any(result.record.status != "finished" for result in results)
    has_several = len(records) < len(results)
    first = ("plan", *(name.rpartition(".")[2] for name in shown), *(["runs"] if has_several else []))
    table = _table(*first, has_status=has_failed)
    for value, of_setting in zip(values, records.values(), strict=True):
        num_runs = [str(len(of_setting))] if has_several else []
        cells = _cells(_median(of_setting), [*(value.get(name, "") for name in shown), *num_runs])
        status = _status(of_setting)
        style = None if status == "finished" else "red"
        table.add_row(*cells, *([status] if has_failed else []), style=style)
    return table


def run_table(record: RunRecord) -> Table:
    """Returns the result of a single run."""
    table = _table("plan", has_status=False)
    table.add_row(*_cells(record, []))
    return table


def failures(results: Sequence[JobResult]) -> list[Text]:
    """Returns for each failed job the reason, and where the output is."""
    return [
        Text(f"job {result.job.number} failed: {result.record.error}\n  log: {result.job.log}", style="red")
        for result in results
        if result.record.status != "finished"
    ]


def _median(records: Sequence[RunRecord]) -> RunRecord:
    """Returns a record with the medians of what was measured in the runs that finished; the first record without."""
    finished = [record for record in records if record.status == "finished"]
    if not finished:
        return records[0]
    known = {name: [v for v in (getattr(r, name) for r in finished) if v is not None] for name in _MEASURED}
    medians: dict[str, Any] = {name: statistics.median(values) if values else None for name, values in known.items()}
    return dataclasses.replace(finished[0], **medians)


def _status(records: Sequence[RunRecord]) -> str:
    num_failed = sum(record.status != "finished" for record in records)
    if num_failed == 0:
        return "finished"
    return f"{num_failed} of {len(records)} failed" if len(records) > 1 else records[0].status


def _split(override: str) -> tuple[str, str]:
    name, _, value = override.partition("=")
    return name.lstrip("+~"), value


def _table(*first: str, has_status: bool) -> Table:
    table = Table(*first, box=box.SIMPLE_HEAD, pad_edge=False)
    columns = ("ranks", "steps/s", "samples/s", "MB on the wire\nper step", "exposed", "final\nvalidation loss")
    for column in columns:
        table.add_column(column, justify="right")
    if has_status:
        table.add_column("status")
    for column_shown in table.columns:
        column_shown.overflow = "fold"  # a number must not lose digits in a narrow terminal
    return table


def _cells(record: RunRecord, settings: Sequence[str]) -> list[str]:
    wire_mb = None if record.wire_bytes_per_step is None else record.wire_bytes_per_step / _BYTES_IN_MB
    return [
        record.plan_name,
        *settings,
        str(record.world_size or "-"),
        _number(record.steps_per_s, 2),
        _number(record.samples_per_s, 1),
        _number(wire_mb, 3),
        "-" if record.exposed_share is None else f"{100 * record.exposed_share:.1f} %",
        _number(record.val_loss, 4),
    ]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
