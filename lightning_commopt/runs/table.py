"""What a single run came to, for the terminal."""

from __future__ import annotations

from rich import box
from rich.table import Table

from lightning_commopt.runs.record import RunRecord

_BYTES_IN_MB = 1e6


def run_table(record: RunRecord) -> Table:
    """Returns one row with what was measured, and a dash for what was not."""
    wire_mb = None if record.wire_bytes_per_step is None else record.wire_bytes_per_step / _BYTES_IN_MB
    cells = {
        "plan": record.plan_name,
        "ranks": str(record.world_size or "-"),
        "steps/s": _number(record.steps_per_s, 2),
        "samples/s": _number(record.samples_per_s, 1),
        "MB on the wire\nper step": _number(wire_mb, 3),
        "exposed": "-" if record.exposed_share is None else f"{100 * record.exposed_share:.1f} %",
        "final\nvalidation loss": _number(record.val_loss, 4),
    }
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in cells:
        # A number must not lose digits in a narrow terminal.
        table.add_column(name, justify="left" if name == "plan" else "right", overflow="fold")
    table.add_row(*cells.values())
    return table


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
