"""What the monitors show of a fit with DiLoCo, whose exchanges take place after some steps only."""

from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from small_fit import NUM_STEPS, PARAMETERS, fit

from lightning_commopt import CommOptDiLoCo
from lightning_commopt.callbacks import CommTimeMonitor, HangMonitor, NVTXRanges
from lightning_commopt.compat.collectives import has_collective_hooks
from lightning_commopt.cost.basis import basis_of_run
from lightning_commopt.measure.files import read_run
from lightning_commopt.measure.record import EXCHANGE
from lightning_commopt.measure.summary import summarize_run
from lightning_commopt.measure.trace import to_trace
from lightning_commopt.sync.diloco.report import Report
from lightning_commopt.sync.store import poll
from support.lightnings import Callback, Trainer
from support.warm_ranks import run_ranks

_OF_FIRST, _OF_SECOND = 8 * 16 + 16, 16 * 4 + 4  # parameters of the two layers, each of which is a fragment
_REPORT_BYTES = Report(samples=1.0).to_tensor().nbytes  # beside each difference


def _fit(folder: Path, **options: Any) -> tuple[dict[str, float], str]:
    monitor = CommTimeMonitor(num_warmup_steps=0, every_n_steps=5, dirpath=folder)
    strategy = CommOptDiLoCo(**options)
    fit(monitor, strategy, callbacks=[HangMonitor(), NVTXRanges()], default_root_dir=folder)
    assert monitor.verdict is not None
    return monitor.summary, monitor.verdict.headline


def test_exchanges_are_in_the_records_and_in_the_summary(tmp_path: Path) -> None:
    """If it fails, a summary of DiLoCo says that there is no communication, or recommends what DDP has."""
    options: dict[str, Any] = {"sync_every": 4, "fragments": 2, "overlap": 1, "comm_hook": "bf16"}
    (metrics, headline), (others, _) = run_ranks(partial(_fit, **options), tmp_path)
    ranks = read_run(tmp_path)
    for records in ranks:
        exchanges = {step.step: step.buckets for step in records.steps if step.buckets}
        assert [(step, buckets[0].index) for step, buckets in exchanges.items()] == [(2, 1), (4, 0), (6, 1), (8, 0)]
        for step, (exchange,) in exchanges.items():
            number = _OF_SECOND if exchange.index else _OF_FIRST
            assert exchange.backward == EXCHANGE
            assert exchange.gradient_bytes == 4 * number
            assert exchange.wire_bytes == 2 * number + _REPORT_BYTES
            begun, applied = (next(r for r in records.steps if r.step == at) for at in (step - 1, step))
            assert begun.start_s < exchange.ready_s < begun.end_s
            assert exchange.end_s < applied.end_s
            assert 0 < applied.totals.exposed_s <= applied.totals.comm_s
        assert len(records.steps) == NUM_STEPS
    assert metrics == pytest.approx(others, nan_ok=True)
    assert metrics["gradient_bytes"] == pytest.approx(2 * 4 * PARAMETERS / NUM_STEPS)
    assert metrics["wire_bytes"] == pytest.approx((2 * 2 * PARAMETERS + 4 * _REPORT_BYTES) / NUM_STEPS)
    assert "of the time waits for exchanges" in headline
    summary, notices = summarize_run(tmp_path, 0)
    assert not notices
    assert summary.verdict.headline == headline
    console = Console(file=StringIO(), width=200)
    console.print(summary.table())
    assert "of differences per step and rank" in console.file.getvalue()  # type: ignore[attr-defined]
    issued = [call for records in ranks for step in records.steps for call in step.collectives]
    assert any(call.source == "exchange" for call in issued) or not has_collective_hooks()
    assert all(call.source for call in issued if call.phase != "pause")  # others are taken for the user's own
    events = to_trace(ranks, range(NUM_STEPS))["traceEvents"]
    assert {"exchange 0", "exchange 1 on the wire", "waits for an exchange"} <= {event["name"] for event in events}
    with pytest.raises(ValueError, match="what sync_every would save is predicted from a run of DDP"):
        basis_of_run(tmp_path)


class Ahead(Callback):
    """Lets rank 1 take its second step once rank 0 has taken ten."""

    def __init__(self, path: Path) -> None:
        self.path, self.was_ahead = path, False

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 0 and batch_idx == 10:
            self.path.touch()
        elif trainer.global_rank == 1 and batch_idx == 1:
            self.was_ahead = poll(self.path.exists, 20)


def _go_ahead(folder: Path) -> tuple[bool, list[int], float, str]:
    monitor, ahead = CommTimeMonitor(num_warmup_steps=0, every_n_steps=3, dirpath=folder), Ahead(folder / "ahead")
    strategy = CommOptDiLoCo(sync_every=40)
    fit(
        monitor,
        strategy,
        callbacks=[ahead],
        default_root_dir=folder,
        max_steps=14,
        validates=True,
        val_check_interval=12,
    )
    assert monitor.verdict is not None
    steps = [record.step for record in read_run(folder)[0].steps]
    return ahead.was_ahead, steps, monitor.summary["step_s"], monitor.verdict.headline


def test_a_rank_that_is_ahead_waits_in_no_window(tmp_path: Path) -> None:
    """If it fails, ranks wait between two steps, where no number shows it, and not in the next exchange."""
    (_, steps, one, headline), (was_ahead, _, other, _) = run_ranks(_go_ahead, tmp_path, limit_s=100)
    assert was_ahead
    assert steps == list(range(14))
    assert one == other
    assert headline.startswith("No exchange has ended in these steps, so its cost is unknown")
