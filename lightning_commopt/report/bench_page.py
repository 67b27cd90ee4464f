"""Renders the page of a bench: charts, conclusions and all numbers in one file that opens offline."""

from __future__ import annotations

from pathlib import Path

from lightning_commopt.measure.link.bench_result import BenchResult, Row
from lightning_commopt.measure.link.model import LinkModel
from lightning_commopt.measure.link.payoff import payoffs
from lightning_commopt.report.bench_terminal import against_link, peer_lines, where_lines
from lightning_commopt.report.figures.bench import bench_charts
from lightning_commopt.report.page import render
from lightning_commopt.text.formatting import number


def write_bench_page(result: BenchResult, path: Path) -> None:
    """Writes the page of a result into an existing folder."""
    model = LinkModel.fit(result) if result.measured else None
    charts = bench_charts(result, model)
    where = result.where
    between = f", {where['link']} between them" if where.get("link") else ""
    page = render(
        "bench.html",
        has_charts=bool(charts),
        title=f"Collectives on {where['world_size']} ranks{between}",
        answers=[*(payoff.text for payoff in payoffs(result)), *against_link(result)],
        charts=charts,
        rows=[(row, _cells(row)) for row in sorted(result.rows, key=lambda row: row.case.label)],
        columns=[
            *("size (B)", "count", "type", "redop", "time (µs)", "interval", "algbw (GB/s)", "busbw (GB/s)", "#wrong"),
        ],
        curves=[] if model is None else [curve.text for curve in model.curves],
        peers=peer_lines(result),
        conditions=where_lines(result),
    )
    path.write_text(page, encoding="utf-8")


def _cells(row: Row) -> list[tuple[str, object]]:
    """Returns the text of each cell, and the value to sort by."""
    case = row.case
    sizes: list[tuple[str, object]] = [
        (f"{case.size_bytes:,}".replace(",", "\N{NO-BREAK SPACE}"), case.size_bytes),
        (str(case.count), case.count),
        (case.dtype, case.dtype),
        (case.redop, case.redop),
    ]
    if row.error is not None:
        return [*sizes, (row.error, ""), *[("-", "")] * 4]
    low, high = (number(1e6 * time_s) for time_s in (row.time_s.low, row.time_s.high))
    return [
        *sizes,
        (number(1e6 * row.time_s.median, 4), row.time_s.median),
        (f"{low} to {high}", row.time_s.high - row.time_s.low),
        (number(row.algbw / 1e9), row.algbw),
        (number(row.busbw / 1e9), row.busbw),
        ("-" if row.num_wrong is None else str(row.num_wrong), "" if row.num_wrong is None else row.num_wrong),
    ]
