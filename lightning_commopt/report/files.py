"""Writes a report's page and table into the sweep's directory."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from lightning_commopt.measure.runs.files import PAGE_FILE, TABLE_FILE
from lightning_commopt.report.build import build_report
from lightning_commopt.report.model import Report
from lightning_commopt.report.outputs import write_csv
from lightning_commopt.report.terminal import print_report


def write_files(report: Report, output: Path, table: Path | None = None) -> tuple[Path, Path]:
    """Writes the page, and a CSV table for other programs.

    Args:
        report: to show.
        output: a folder, which is made; or, with the suffix ``.html``, the page.
        table: path of the table; None for ``report.csv`` beside the page, or the page's name with ``.csv``.

    Returns:
        The paths of the page and the table.
    """
    from lightning_commopt.report.page import write_page  # with plotly and jinja2

    if output.suffix == ".html":
        page, beside = output, output.with_suffix(".csv")
    else:
        page, beside = output / PAGE_FILE, output / TABLE_FILE
    table = beside if table is None else table
    for path in (page, table):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_page(report, page)
    write_csv(report, table)
    return page, table


def report_sweep(folder: Path, console: Console) -> None:
    """Prints and writes the report of a sweep that has ended; errors become a printed warning."""
    try:
        report = build_report([folder])
        print_report(report, console)
        page, _ = write_files(report, folder)
    except Exception as error:  # the sweep's results are there, and so is `commopt report`
        reason = " ".join(str(error).split()) or type(error).__name__
        console.print(Text(f"warning: no report was written: {reason}", style="yellow"), soft_wrap=True)
        return
    console.print(Text(f"report: {page}"), soft_wrap=True)
