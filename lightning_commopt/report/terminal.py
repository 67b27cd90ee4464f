"""A report on the terminal: tables that lose no digit where it is narrow, and the answer below each."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lightning_commopt.formatting import number
from lightning_commopt.report.columns import Cell, columns_of
from lightning_commopt.report.conditions import link_of
from lightning_commopt.report.model import Group, Report
from lightning_commopt.report.phrases import spread_text
from lightning_commopt.report.regressions import Change, Outcome, Regressions
from lightning_commopt.runs.files import LOG_FILE

_NAME_WIDTH = 16
_WITH_ENDS = ("samples_per_s", "speedup")
_ANY_WIDTH = 10_000
_HEADINGS: dict[Outcome, str] = {
    "slower": "slower",
    "failed": "failed, worked before",
    "unknown": "unknown: it takes at least 3 repetitions on both sides",
    "missing": "missing here",
    "faster": "faster",
    "new": "not there before",
    "no difference": "no difference beyond noise, or slower by no more than the tolerance",
}


def print_report(report: Report, console: Console) -> None:
    """Prints all groups, then failed runs and warnings."""
    for group in report.groups:
        if group.name:
            console.rule(Text(group.name), align="left")
        _print_settings(group, console)
        _print_published(group, console)
        for sentence in group.answer:
            _print(sentence, console)
        chosen = group.recommended or group.fastest
        is_highest = not group.recommended and chosen.samples_per_s is not None
        heading = f"# {chosen.name}: the highest throughput so far" if is_highest else f"# {chosen.name}"
        console.print(Text("\n".join(["", heading, *chosen.config_lines]), style="cyan"), soft_wrap=True)
    for run in report.failed:
        _print(f"{run.name} ({run.setting}) failed: {run.record.error}", console, style="red")
        log = run.folder / LOG_FILE
        if log.exists():
            _print(f"  log: {log}", console, style="red")
    for problem in report.problems:
        _print(f"warning: {problem}", console, style="yellow")


def print_regressions(found: Regressions, console: Console) -> None:
    """Prints what has changed, the worst first."""
    _print(f"compared with {found.other}, with a tolerance of {100 * found.tolerance:g} %:", console)
    for outcome, heading in _HEADINGS.items():
        changes = [change for change in found.changes if change.outcome == outcome]
        if changes:
            style = "red" if outcome in ("slower", "failed") else ""
            _print(f"{heading} ({len(changes)})", console, style=style)
        for change in changes:
            _print(f"  {_change_text(change)}", console)
    for condition in found.conditions:
        _print(f"warning: different conditions: {condition}", console, style="yellow")


def settings_table(group: Group) -> Table:
    """Returns a row for each setting, with the columns for which there are numbers."""
    columns = _columns(group)
    table = Table("setting", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.columns[0].min_width = min(_NAME_WIDTH, max(len(setting.name) for setting in group.settings))
    for name, cells in columns.items():
        width = max(len(text) for text in [*name.split(), *(line for cell in cells for line in cell)])
        table.add_column(name.replace(" ", "\n", 1), justify="right", no_wrap=True, min_width=width)
    if link := link_of(group.baseline.runs[0]):
        table.caption, table.caption_justify = f"hosts with {link} between them", "left"
    for index, setting in enumerate(group.settings):
        style = "bold" if setting is group.fastest else None
        table.add_row(Text(setting.name), *("\n".join(cells[index]) for cells in columns.values()), style=style)
    return table


def _print_settings(group: Group, console: Console) -> None:
    """Prints the table, or where it would lose digits the same as a list."""
    table = settings_table(group)
    needed = Measurement.get(console, console.options.update(max_width=_ANY_WIDTH), table).minimum
    if needed <= console.width:
        console.print(table)
        return
    for index, setting in enumerate(group.settings):
        cells = {name: " ".join(cells[index]) for name, cells in _columns(group).items()}
        console.print(Text(setting.name, style="bold" if setting is group.fastest else ""))
        console.print(Padding(Text(", ".join(f"{name} {cell}" for name, cell in cells.items() if cell)), (0, 0, 0, 2)))
    console.print()


def _columns(group: Group) -> dict[str, list[list[str]]]:
    """Returns the cells of each column that has any, each as its lines."""
    return {
        column.heading: [_lines(cell, column.key in _WITH_ENDS) for cell in cells]
        for column, cells in columns_of(group)
        if column.heading
    }


def _lines(cell: Cell, has_ends: bool) -> list[str]:
    return [line for line in (cell.text, f"({cell.small})" if cell.small and has_ends else "") if line]


def _print_published(group: Group, console: Console) -> None:
    figures = [(setting.name, figure) for setting in group.settings for figure in setting.published]
    if not figures:
        return
    sources = dict.fromkeys(figure.source for _, figure in figures)
    _print(f"Published by others, on their hardware ({'; '.join(sources)}):", console)
    for name in dict.fromkeys(name for name, _ in figures):
        _print(f"  {name}: {'; '.join(figure.label for other, figure in figures if other == name)}", console)
    console.print()


def _print(text: str, console: Console, style: str = "") -> None:
    console.print(Text(text, style=style), soft_wrap=not console.is_terminal)


def _change_text(change: Change) -> str:
    name = f"{change.group}: {change.setting}" if change.group else change.setting
    if change.error is not None:
        return f"{name}: {change.error}"
    if change.ratio is None or change.before is None or change.now is None:
        return name
    rates = f"{number(change.now)} samples/s, before {number(change.before)}"
    ends = spread_text(change.ratio)
    return f"{name}: {rates}, ratio {number(change.ratio.median)}{f' ({ends})' if ends else ''}"
