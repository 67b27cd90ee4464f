"""Prints a report: tables that keep all digits in a narrow terminal, and the answer below each."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from lightning_commopt.measure.runs.files import LOG_FILE
from lightning_commopt.report.build import build_report
from lightning_commopt.report.intervals import spread_text
from lightning_commopt.report.model import Group, Report, columns_of
from lightning_commopt.report.names import link_of
from lightning_commopt.report.outputs import write_files
from lightning_commopt.report.regressions import Change, Outcome, Regressions
from lightning_commopt.text.formatting import number
from lightning_commopt.text.terminal import TextTable, print_heading, print_text

_HEADINGS: dict[Outcome, str] = {
    "slower": "slower",
    "failed": "failed, worked before",
    "unknown": "unknown: failed both times, or needs at least 3 repetitions on both sides",
    "missing": "missing here",
    "faster": "faster",
    "new": "new",
    "no difference": "no difference beyond noise, or slower by no more than the tolerance",
}


def print_report(report: Report, console: Console) -> None:
    """Prints all groups, then failed runs and warnings."""
    for group in report.groups:
        if group.name:
            print_heading(group.name, console)
        console.print(settings_table(group))
        _print_published(group, console)
        for sentence in group.answer:
            print_text(sentence, console)
        chosen = group.recommended or group.fastest
        is_discarded = any(setting.is_beyond_limit for setting in group.settings)
        is_highest = not group.recommended and chosen.samples_per_s is not None and not is_discarded
        heading = f"# {chosen.name}: the highest throughput so far" if is_highest else f"# {chosen.name}"
        console.print(Text("\n".join(["", heading, *chosen.config_lines]), style="cyan"), soft_wrap=True)
    for run in report.failed:
        print_text(f"{run.name} ({run.setting}) failed: {run.record.error}", console, style="red")
        log = run.folder / LOG_FILE
        if log.exists():
            print_text(f"  log: {log}", console, style="red")
    for problem in report.problems:
        print_text(f"warning: {problem}", console, style="yellow")


def report_sweep(folder: Path, console: Console) -> None:
    """Prints and writes the report of a sweep that has ended; errors become a printed warning."""
    try:
        report = build_report([folder])
        print_report(report, console)
        page, _ = write_files(report, folder)
    except Exception as error:  # the sweep's results are there, and so is `commopt report`
        reason = " ".join(str(error).split()) or type(error).__name__
        console.print(Text(f"warning: no report was written: {reason}", style="yellow"), soft_wrap=True)
    else:
        console.print(Text(f"report: {page}"), soft_wrap=True)


def print_regressions(regressions: Regressions, console: Console) -> None:
    """Prints the changes, the worst first."""
    print_text(f"compared with {regressions.other}, with a tolerance of {100 * regressions.tolerance:g} %:", console)
    for outcome, heading in _HEADINGS.items():
        changes = [change for change in regressions.changes if change.outcome == outcome]
        if changes:
            style = "red" if outcome in ("slower", "failed") else ""
            print_text(f"{heading} ({len(changes)})", console, style=style)
        for change in changes:
            print_text(f"  {_change_text(change)}", console)
    for condition in regressions.conditions:
        print_text(f"warning: different conditions: {condition}", console, style="yellow")


def settings_table(group: Group) -> TextTable:
    """Returns a row for each setting, with the columns that have numbers."""
    columns = {
        column.heading: [
            cell.text + (f"\n({cell.small})" if cell.small and column.key in ("samples_per_s", "speedup") else "")
            for cell in cells
        ]
        for column, cells in columns_of(group)
        if column.heading
    }
    headings = [name.replace(" ", "\n", 1) for name in columns]
    link = link_of(group.baseline.runs[0])
    table = TextTable("setting", *headings, numbers=headings, caption=f"hosts with {link} between them" if link else "")
    for index, setting in enumerate(group.settings):
        style = "bold" if setting is group.fastest else ""
        table.add_row(setting.name, *(cells[index] for cells in columns.values()), style=style)
    return table


def _print_published(group: Group, console: Console) -> None:
    figures = [(setting.name, figure) for setting in group.settings for figure in setting.published]
    if not figures:
        return
    sources = dict.fromkeys(figure.source for _, figure in figures)
    print_text(f"Published by others, on their hardware ({'; '.join(sources)}):", console)
    for name in dict.fromkeys(name for name, _ in figures):
        print_text(f"  {name}: {'; '.join(figure.label for other, figure in figures if other == name)}", console)
    console.print()


def _change_text(change: Change) -> str:
    name = f"{change.group}: {change.setting}" if change.group else change.setting
    if change.error is not None:
        return f"{name}: {change.error}"
    if change.ratio is None or change.before is None or change.now is None:
        return name
    rates = f"{number(change.now)} samples/s, before {number(change.before)}"
    ends = spread_text(change.ratio)
    return f"{name}: {rates}, ratio {number(change.ratio.median)}{f' ({ends})' if ends else ''}"
