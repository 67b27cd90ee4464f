"""Renders the page of a bench: charts, conclusions and all numbers in one file that opens offline."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from commopt_diagnose.bench.model import Curve, LinkModel
from commopt_diagnose.bench.result import BenchResult, Row
from commopt_diagnose.bench.settings import COMPOUND, SINGLE, size_text
from commopt_diagnose.bench.terminal import against_link, payoffs, peer_lines, where_lines
from lightning_commopt.report.figures.plot import Axis, Plot, Point, Trace, extent, linear_axis, log_axis
from lightning_commopt.report.figures.style import (
    Chart,
    Line,
    PlanStyle,
    ideal_line,
    line_trace,
    plan_styles,
)
from lightning_commopt.report.intervals import Interval
from lightning_commopt.report.model import Cell, Column
from lightning_commopt.report.page import render
from lightning_commopt.text.formatting import number

_COLUMNS = ("size (B)", "count", "type", "redop", "time (µs)", "interval", "algbw (GB/s)", "busbw (GB/s)", "#wrong")
_MAX_TICKS = 7  # labels of an axis that do not overlap
_MODEL_POINTS = 60  # enough for a smooth curve on a logarithmic axis


def write_bench_page(result: BenchResult, path: Path) -> None:
    """Writes the page of a result into an existing folder."""
    model = LinkModel.fit(result) if result.measured else None
    charts = bench_charts(result, model)
    where = result.where
    ranks = f" on {where['world_size']} ranks" if where.get("world_size") else ""
    between = f", {where['link']} between them" if where.get("link") else ""
    page = render(
        "bench.html",
        package="commopt_diagnose",
        title=f"Collectives{ranks}{between}",
        answers=[*payoffs(result), *against_link(result)],
        charts=charts,
        rows=[(row.case.label, _cells(row)) for row in sorted(result.rows, key=lambda row: row.case.label)],
        columns=[Column(key=title, title=title) for title in _COLUMNS],
        curves=[] if model is None else [curve.text for curve in model.curves],
        peers=peer_lines(result),
        conditions=where_lines(result),
    )
    path.write_text(page, encoding="utf-8", errors="backslashreplace")


def _cells(row: Row) -> list[Cell]:
    case = row.case
    sizes = [
        Cell(f"{case.size_bytes:,}".replace(",", "\N{NO-BREAK SPACE}"), value=case.size_bytes),
        *(Cell(str(value), value=value) for value in (case.count, case.dtype, case.redop)),
    ]
    if row.error is not None:
        return [*sizes, Cell(row.error), *[Cell("-")] * 4]
    low, high = (number(1e6 * time_s) for time_s in (row.time_s.low, row.time_s.high))
    return [
        *sizes,
        Cell(number(1e6 * row.time_s.median, 4), value=row.time_s.median),
        Cell(f"{low} to {high}", value=row.time_s.high - row.time_s.low),
        *(Cell(number(rate / 1e9), value=rate) for rate in (row.algbw, row.busbw)),
        Cell("-" if row.num_wrong is None else str(row.num_wrong), value=row.num_wrong),
    ]


Series = Sequence[Row]


def bench_charts(result: BenchResult, model: LinkModel | None) -> list[Chart]:
    """Returns the charts that a result has numbers for, with its link model, if there is one."""
    idle = [rows for rows in result.by_series().values() if _is_plain(rows)]
    single = [rows for rows in idle if rows[0].case.operation in SINGLE]
    equal_series = [rows for rows in idle if rows[0].case.operation in ("all_reduce", *COMPOUND)]
    hooks = [rows for rows in idle if rows[0].case.operation == "comm_hook"]
    exact = [rows for rows in idle if rows[0].case.operation == "all_reduce"]
    scopes = [rows for rows in result.by_series().values() if _is_plain(rows, scope=None)]
    by_load = {
        (dataclasses.replace(rows[0].case, load="idle").series, rows[0].case.load): rows
        for rows in result.by_series().values()
    }
    charts = [_bandwidth("Bus bandwidth", single, result)] if single else []
    if single and model is not None:
        charts.append(_times("Time, and the link model", single, model))
    if len(equal_series) > 1:
        charts.append(_bandwidth("Three equal ways to reduce", equal_series, result))
    if hooks:
        charts.append(_bandwidth("Comm hooks: effective bandwidth", [*exact, *hooks], result))
    for (key, load), rows in by_load.items():
        if load == "idle" and (key, "compute") in by_load:
            title = f"{rows[0].case.label}: alone, and while the device computes"
            charts.append(_bandwidth(title, [rows, by_load[key, "compute"]], result))
    if len(scopes) > len(idle):
        charts.append(_bandwidth("Within and across nodes", scopes, result))
    return charts


def _is_plain(rows: Series, scope: str | None = "all") -> bool:
    """Returns whether a series was measured on an idle device and, if it supports that, in place."""
    case = rows[0].case
    is_usual_place = case.place == "in" or case.operation in ("all_to_all", "send_recv")
    return case.load == "idle" and is_usual_place and scope in (None, case.scope)


def _bandwidth(title: str, series: Sequence[Series], result: BenchResult) -> Chart:
    traces, lines = _traces(series, lambda row, time_s: row.busbw * row.time_s.median / time_s / 1e9)
    rate = result.link_bytes_per_s
    note = "Medians over repetitions with their intervals."
    if rate is not None:
        sizes = [row.case.size_bytes for rows in series for row in rows]
        traces.append(ideal_line([min(sizes), max(sizes)], [rate / 1e9] * 2))
        lines.append(Line(f"the link's rate, {rate / 1e9:g} GB/s each way", None))
        note += " The link's rate counts headers: of 1514 bytes in a frame, TCP has 1448 for the message, 95.6 %."
    plot = Plot(x=_sizes(series), y=linear_axis(extent(traces)[1], from_zero=True), traces=tuple(traces))
    return _chart(title, note, "bus bandwidth (GB/s)", plot, lines)


def _times(title: str, series: Sequence[Series], model: LinkModel) -> Chart:
    measured, lines = _traces(series, lambda row, time_s: time_s * 1e3)
    traces = [dataclasses.replace(trace, dash=None) for trace in measured]
    curves = {curve.case.series: curve for curve in model.curves}
    for rows, line in zip(series, lines, strict=True):
        assert line.style is not None
        traces.append(_model(curves[rows[0].case.series], line.style))
    note = "Markers are medians; lines are latency + size / bandwidth, fitted piecewise."
    plot = Plot(x=_sizes(series), y=log_axis(extent(traces)[1]), traces=tuple(traces))
    return _chart(title, note, "time of a call (ms)", plot, lines)


def _chart(title: str, note: str, y_title: str, plot: Plot, lines: Sequence[Line]) -> Chart:
    x_title = "size of the message (bytes; K, M, G are powers of 1024)"
    return Chart(title=title, note=note, x_title=x_title, y_title=y_title, plot=plot, lines=tuple(lines))


def _model(curve: Curve, style: PlanStyle) -> Trace:
    first, last = curve.segments[0].first_bytes, curve.segments[-1].last_bytes
    sizes = [first * (last / first) ** (step / _MODEL_POINTS) for step in range(_MODEL_POINTS + 1)]
    times_ms = [curve.predict(min(last, max(first, size))).time_s * 1e3 for size in sizes]
    return Trace(points=tuple(map(Point, sizes, times_ms)), color=style.color, dash="none", width=1.4)


def _sizes(series: Sequence[Series]) -> Axis:
    """Returns the axis of the messages' sizes, with as many of them at ticks as fit."""
    sizes = sorted({row.case.size_bytes for rows in series for row in rows})
    shown = sizes[:: max(1, -(-len(sizes) // _MAX_TICKS))]
    return log_axis(sizes, [(size, size_text(size)) for size in shown])


def _traces(series: Sequence[Series], shown: Callable[[Row, float], float]) -> tuple[list[Trace], list[Line]]:
    """Draws a number of each row, which is a function of the row's median time, and of the ends of its interval."""
    styles = plan_styles(rows[0].case.label for rows in series)
    traces = []
    for rows in series:
        intervals = []
        for row in rows:
            low, high = sorted(shown(row, time_s) for time_s in (row.time_s.low, row.time_s.high))
            intervals.append(Interval(median=shown(row, row.time_s.median), low=low, high=high, num_values=1))
        sizes, hover = [row.case.size_bytes for row in rows], list(map(_hover, rows))
        traces.append(line_trace(styles[rows[0].case.label], sizes, intervals, hover))
    return traces, [Line(label, styles[label]) for label in (rows[0].case.label for rows in series)]


def _hover(row: Row) -> str:
    gb = f"{number(row.busbw / 1e9)} GB/s"
    return f"{row.case.label}, {size_text(row.case.size_bytes)}: {number(1e3 * row.time_s.median)} ms, {gb}"
