"""A trace of a run's steps in Chrome's Trace Event Format, for https://ui.perfetto.dev and chrome://tracing.

Every rank is a process with these rows: its steps, their phases, the buckets of gradients from being ready to holding
the average, their collectives, and all collectives whoever has issued them. Slices of a row do not overlap: overlapping
buckets get several rows.

Source: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning_commopt.measure.files import FOLDER, RankRecords, notices, read_run
from lightning_commopt.measure.record import EXCHANGE, BucketSpan, StepRecord, clock_shift_s
from lightning_commopt.text.formatting import count

DEFAULT_NUM_STEPS = 100  # files with many more steps load slowly in viewers
_NAMES_SHOWN = 8  # Perfetto lists them below each other in the details of a slice

# Viewers compute in binary fractions and draw a slice that ends after the next begins as its parent: eighths of a
# microsecond are exact, so adjoining slices stay adjoining.
_TICKS_PER_US = 8

# Perfetto takes equal thread numbers in two processes for one thread, so each rank has numbers of its own.
_ROWS_PER_RANK = 10_000


def write_trace(
    run_dir: str | Path,
    output: str | Path | None = None,
    first_step: int | None = None,
    num_steps: int = DEFAULT_NUM_STEPS,
) -> tuple[str, list[str]]:
    """Writes the trace of ``num_steps`` steps of a run's last fit, from the first one recorded or from ``first_step``.

    Without ``output`` the file is ``trace.json`` in the run's ``comm_time``.

    Returns:
        A sentence with the file, its steps and ranks; and a sentence for each part of the run that the files lack.

    Raises:
        FileNotFoundError: the run has no records.
        ValueError: it has none of these steps, or its files cannot be read.
    """
    ranks = read_run(run_dir)
    recorded = {record.step for records in ranks for record in records.steps}
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, got {num_steps}")
    if not recorded:
        raise ValueError(f"{run_dir} has records of ranks, but no complete step")
    first = min(recorded) if first_step is None else first_step
    inside = recorded.intersection(window := range(first, first + num_steps))
    if not inside:
        raise ValueError(
            f"first_step={first} and num_steps={num_steps} select no step: {run_dir} has steps {min(recorded)} to"
            f" {max(recorded)}"
        )
    trace = to_trace(ranks, window)
    path = Path(run_dir) / FOLDER / "trace.json" if output is None else Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(trace, separators=(",", ":")), encoding="utf-8")
    steps = f"steps {min(inside)} to {max(inside)} of {count(len(ranks), 'rank')}"
    return f"{path}: {steps}; {count(len(recorded), 'step')} saved", notices(ranks)


def to_trace(ranks: Sequence[RankRecords], steps: range) -> dict[str, Any]:
    """Returns the JSON object of a trace of some steps of at least one rank.

    It has complete events ("X") in rows that nest, counters ("C"), and metadata ("M"); times in microseconds from the
    first event, on the clock of the first rank: by `clock_shift_s` where a rank synchronized the same buckets,
    elsewhere by the hosts' clocks. "clock_corrections_us" is the difference between the two.
    """
    shown = [[record for record in records.steps if record.step in steps] for records in ranks]
    origins_s = [records.origin_shift_s(ranks[0]) for records in ranks]
    by_buckets_s = [clock_shift_s(own, shown[0]) for own in shown]
    shifts_s = [origin if shift is None else shift for shift, origin in zip(by_buckets_s, origins_s, strict=True)]
    rows = [_rows(own, shift_s) for own, shift_s in zip(shown, shifts_s, strict=True)]
    origin = min((piece.start for rank in rows for row in rank.values() for piece in row), default=0)
    events = [event for records, own in zip(ranks, rows, strict=True) for event in _events(records, own, origin)]
    corrections_us = {
        str(records.rank): round((shift_s - origin_s) * 1e6, 3)
        for records, shift_s, origin_s in zip(ranks, shifts_s, origins_s, strict=True)
    }
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "source": "lightning_commopt",
            "clock_corrections_us": corrections_us,
            "runs": {str(records.rank): dict(records.header) for records in ranks},
        },
    }


class _Slice(NamedTuple):
    """A slice of a row; times in ticks."""

    name: str
    start: int
    end: int
    args: Mapping[str, Any]


_Rows = dict[str, list[_Slice]]  # names of rows to their slices, the topmost row first


def _rows(steps: Sequence[StepRecord], shift_s: float) -> _Rows:
    """Returns the rows of a rank's steps."""

    def piece(name: str, start_s: float, end_s: float, **args: Any) -> _Slice:
        start, end = (round((at_s + shift_s) * 1e6 * _TICKS_PER_US) for at_s in (start_s, end_s))
        return _Slice(name, start, max(start, end), args)

    whole = [piece(f"step {r.step}", r.start_s, r.end_s, **_step_args(r)) for r in steps]
    phases = [piece(phase.name, phase.start_s, phase.end_s, step=r.step) for r in steps for phase in r.phases]
    waits = [piece(_wait_name(r), *span, step=r.step) for r in steps for span in r.waits]
    buckets, wire, collectives = [], [], []
    for record in steps:
        for bucket in record.buckets:
            kind = "exchange" if bucket.backward == EXCHANGE else "bucket"
            name, args = f"{kind} {bucket.index}", _bucket_args(record, bucket)
            queued = piece(f"{name} waits", min(bucket.ready_s, bucket.start_s), bucket.start_s, **args)
            travels = piece(name, bucket.start_s, bucket.end_s, **args)
            buckets.append([queued, travels] if queued.end > queued.start else [travels])
            for number, span in enumerate(bucket.wire):
                args = {"step": record.step, "bucket": bucket.index, "collective": number}
                wire.append([piece(f"{name} on the wire", *span, **args)])
        for collective in record.collectives:
            if collective.start_s is not None and collective.end_s is not None:
                args = {
                    "step": record.step,
                    "phase": collective.phase,
                    "source": collective.source,
                    "bytes": collective.num_bytes,
                }
                collectives.append([piece(collective.operation, collective.start_s, collective.end_s, **args)])
    lanes = _lanes("buckets", buckets) | _lanes("wire", wire) | _lanes("collectives", collectives)
    return {"steps": whole, "phases": phases, **({"computation": waits} if waits else {}), **lanes}


def _step_args(record: StepRecord) -> dict[str, Any]:
    totals = record.totals
    return {
        "step": record.step,
        "num_samples": record.num_samples,
        **{f"{name}_ms": round(getattr(totals, f"{name}_s") * 1e3, 4) for name in ("step", "comm", "wire", "exposed")},
        **{name: getattr(totals, name) for name in ("overlapped_share", "gradient_bytes", "wire_bytes")},
    }


def _wait_name(record: StepRecord) -> str:
    has_exchange = any(bucket.backward == EXCHANGE for bucket in record.buckets)
    return f"waits for {'an exchange' if has_exchange else 'another stream'}"


def _bucket_args(record: StepRecord, bucket: BucketSpan) -> dict[str, Any]:
    info = None if bucket.backward == EXCHANGE else record.layout.get(bucket.index)
    # DDP rebuilds its buckets after the first step, and records with both layouts may have been written together.
    names = info.names if info is not None and info.gradient_bytes == bucket.gradient_bytes else ()
    more = len(names) - _NAMES_SHOWN
    return {
        "step": record.step,
        **{name: getattr(bucket, name) for name in ("index", "backward", "gradient_bytes", "wire_bytes")},
        "names": [*names[:_NAMES_SHOWN], *([f"and {more} more"] if more > 0 else [])],
    }


def _lanes(name: str, groups: Iterable[list[_Slice]]) -> _Rows:
    """Spreads groups of adjoining slices over the smallest number of rows in which they do not overlap."""
    rows: _Rows = {}
    for group in sorted(groups, key=lambda slices: slices[0].start):
        free = [row for row, slices in rows.items() if slices[-1].end <= group[0].start]
        rows.setdefault(free[0] if free else f"{name} {len(rows) + 1}" if rows else name, []).extend(group)
    return rows


def _events(records: RankRecords, rows: _Rows, origin: int) -> list[dict[str, Any]]:
    """Returns the events of a rank, with times since the origin."""
    pid = records.rank
    label = ",".join(str(records.header[key]) for key in ("device", "backend") if records.header.get(key))
    about = {"process_name": {"name": f"rank {pid}"}, "process_sort_index": {"sort_index": pid}}
    if label:
        about["process_labels"] = {"labels": label}
    first_tid = (pid + 1) * _ROWS_PER_RANK
    events: list[dict[str, Any]] = [
        {"name": name, "ph": "M", "pid": pid, "tid": first_tid, "args": args} for name, args in about.items()
    ]
    for tid, (row, slices) in enumerate(rows.items(), first_tid):
        for name, key, value in (("thread_name", "name", row), ("thread_sort_index", "sort_index", tid)):
            events.append({"name": name, "ph": "M", "pid": pid, "tid": tid, "args": {key: value}})
        for piece in slices:
            times = {"ts": (piece.start - origin) / _TICKS_PER_US, "dur": (piece.end - piece.start) / _TICKS_PER_US}
            event = {"name": piece.name, "cat": row.split()[0], "ph": "X", "pid": pid, "tid": tid}
            events.append({**event, **times, "args": dict(piece.args)})
    steps = [piece for piece in rows["steps"] if piece.args["gradient_bytes"]]
    exposed = [(piece.start, piece.args["exposed_ms"]) for piece in steps]
    for at, exposed_ms in [*exposed, *[(piece.end, 0) for piece in steps[-1:]]]:
        counter = {"name": "exposed communication", "cat": "steps", "ph": "C", "pid": pid, "tid": first_tid}
        events.append({**counter, "ts": (at - origin) / _TICKS_PER_US, "args": {"ms": exposed_ms}})
    return events
