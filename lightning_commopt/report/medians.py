"""A setting's numbers: medians over what its runs recorded."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from lightning_commopt.measure.exposed_share import exposed_share
from lightning_commopt.measure.runs.record import RunRecord
from lightning_commopt.report.config_lines import config_lines
from lightning_commopt.report.intervals import median_interval
from lightning_commopt.report.model import Interval, Run, Setting
from lightning_commopt.report.settings import RunsOfSetting


def throughput(run: Run) -> float | None:
    """Returns the samples per second of a run over all ranks; None where there is no sensible number."""
    rate = run.record.samples_per_s
    return rate if rate is not None and math.isfinite(rate) and rate > 0 else None


def measure_setting(found: RunsOfSetting) -> Setting:
    """Returns a setting with the numbers of its own runs, before any comparison with others."""
    records = [run.record for run in found.runs]
    first = records[0]
    seen = [record for record in records if _is_sync_seen(record)]
    rates = [rate for run in found.runs if (rate := throughput(run)) is not None]
    return Setting(
        name=found.name,
        values=found.values,
        sync_method=first.sync_method,
        world_size=first.world_size or 1,
        bucket_cap_mb=_bucket_cap_mb(found.runs[0]),
        config_lines=config_lines(found.runs[0], found.values),
        runs=found.runs,
        samples_per_s=median_interval(rates),
        steps_per_s=_interval(records, lambda record: record.steps_per_s),
        step_s=_interval(records, lambda record: record.comm_time.get("step_s")),
        comm_s=_interval(seen, lambda record: record.comm_time.get("comm_s")),
        exposed_s=_interval(seen, lambda record: record.comm_time.get("exposed_s")),
        exposed_share=_interval(seen, exposed_share_of),
        wire_bytes=_median(seen, lambda record: record.wire_bytes_per_step),
        peak_memory_bytes=_median(records, lambda record: record.peak_memory_bytes),
        val_loss=_interval(records, lambda record: record.val_loss),
        val_accuracy=_interval(records, lambda record: record.val_accuracy),
        is_lossy=bool(first.is_lossy),
        num_diverged=sum(record.val_loss is not None and not math.isfinite(record.val_loss) for record in records),
    )


def _is_sync_seen(record: RunRecord) -> bool:
    """Returns whether `CommTimeMonitor` saw the gradient sync: of FSDP, DeepSpeed and others it sees nothing."""
    is_alone = (record.world_size or 1) == 1
    return is_alone or record.comm_time.get("comm_s") != 0 or bool(record.wire_bytes_per_step)


def exposed_share_of(record: RunRecord) -> float | None:
    """Returns what part of a run's steps waits for communication, 0 to 1; None where that was not measured."""
    return exposed_share([record.comm_time]) if {"step_s", "exposed_s"} <= record.comm_time.keys() else None


def _values(records: Sequence[RunRecord], read: Callable[[RunRecord], float | None]) -> list[float]:
    return [value for record in records if (value := read(record)) is not None and math.isfinite(value)]


def _interval(records: Sequence[RunRecord], read: Callable[[RunRecord], float | None]) -> Interval | None:
    return median_interval(_values(records, read))


def _median(records: Sequence[RunRecord], read: Callable[[RunRecord], float | None]) -> float | None:
    values = _values(records, read)
    return statistics.median(values) if values else None


def bucket_cap(run: Run) -> Any:
    """Returns the size of buckets as the run's strategy has it: a number, several, or None for the default."""
    places = ("plan",) if run.record.plan is not None else ("strategy", "trainer.strategy")
    caps = (run.settings.get(f"{place}.bucket_cap_mb") for place in places)
    return next((cap for cap in caps if cap is not None), None)


def _bucket_cap_mb(run: Run) -> float | None:
    cap = bucket_cap(run)
    return float(cap) if isinstance(cap, (int, float)) and not isinstance(cap, bool) else None
