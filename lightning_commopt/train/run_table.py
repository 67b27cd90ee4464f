"""The table of a single run's results, for the terminal."""

from __future__ import annotations

import math

from lightning_commopt.measure.runs.record import RunRecord
from lightning_commopt.text.formatting import megabytes, number, percent
from lightning_commopt.text.terminal import TextTable


def run_table(record: RunRecord) -> TextTable:
    """Returns one row; a dash for what was not measured."""

    def known(value: float | None) -> float:
        return math.nan if value is None else value

    cells = {
        "plan": record.plan_name or record.sync_method,
        "ranks": str(record.world_size or "-"),
        "steps/s": number(known(record.steps_per_s)),
        "samples/s": number(known(record.samples_per_s)),
        "MB on the wire\nper step": megabytes(known(record.wire_bytes_per_step)),
        "exposed": percent(known(record.exposed_share)),
        "final\nvalidation loss": number(known(record.val_loss), digits=4),
    }
    table = TextTable(*cells, numbers=list(cells)[1:])
    table.add_row(*cells.values())
    return table
