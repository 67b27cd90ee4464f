"""The results of a single run, for the terminal."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from lightning_commopt.measure.runs.record import RunRecord
from lightning_commopt.text.formatting import megabytes, number, percent
from lightning_commopt.text.terminal import TextTable


def run_table(record: RunRecord) -> TextTable:
    """Returns one row with what was measured, and a dash for what was not."""
    cells = {
        "plan": record.plan_name or record.sync_method,
        "ranks": str(record.world_size or "-"),
        "steps/s": _text(record.steps_per_s, number),
        "samples/s": _text(record.samples_per_s, number),
        "MB on the wire\nper step": _text(record.wire_bytes_per_step, megabytes),
        "exposed": _text(record.exposed_share, percent),
        "final\nvalidation loss": _text(record.val_loss, partial(number, digits=4)),
    }
    table = TextTable(*cells, numbers=list(cells)[1:])
    table.add_row(*cells.values())
    return table


def _text(value: float | None, show: Callable[[float], str]) -> str:
    return "-" if value is None else show(value)
