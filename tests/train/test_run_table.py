from typing import Any

from lightning_commopt.measure.runs.record import RunRecord
from lightning_commopt.train.train import run_table
from support.narrow import check_numbers_are_whole, printed


def row(**values):
    record = RunRecord(status="finished", sync_method="bf16", **values)
    return printed(lambda console: console.print(run_table(record)), 120).split("─")[-1].split()


def test_what_was_measured_is_shown_with_its_digits():
    values = {"world_size": 2, "steps_per_s": 1234.567, "samples_per_s": 9876.54, "wire_bytes_per_step": 1.5e6}
    shown = ["bf16", "2", "1235", "9877", "1.50", "12.3", "%", "0.5000"]
    known: dict[str, Any] = {**values, "comm_time": {"exposed_share": 0.1234}, "metrics": {"val_loss": 0.5}}
    assert row(**known) == shown
    record = RunRecord(status="finished", sync_method="alternating_powersgd", **known)
    check_numbers_are_whole(lambda console: console.print(run_table(record)))


def test_what_was_not_measured_is_a_dash():
    assert row() == ["bf16", *6 * "-"]
