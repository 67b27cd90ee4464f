"""Renders report.html: one self-contained file, which opens offline."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from lightning_commopt.report.figures.loss import loss_curves
from lightning_commopt.report.figures.scaling import scaling_charts
from lightning_commopt.report.figures.style import Chart, Key, PlanStyle, Rows, plan_styles
from lightning_commopt.report.figures.throughput import bucket_sizes, overlap, peak_memory, step_parts, throughput
from lightning_commopt.report.figures.timeline import KEYS, timelines
from lightning_commopt.report.figures.tuning import tuning_charts
from lightning_commopt.report.intervals import TIMES, kinds_of_intervals
from lightning_commopt.report.model import Cell, Column, Group, Report, Setting, columns_of, speedup_cell

_PACKAGE = "lightning_commopt.report"


class Section(NamedTuple):
    """Charts with a common title, note and legend; wide ones take the whole width each."""

    title: str
    charts: list[Chart]
    note: str = ""
    keys: tuple[Key, ...] = ()
    is_wide: bool = False


def write_page(report: Report, path: Path) -> None:
    """Writes the page of a report into an existing folder."""
    styles = plan_styles(setting.sync_method for group in report.groups for setting in group.settings)
    groups = [(group, settings_table(group), sections(group, styles)) for group in report.groups]
    page = render(
        "report.html",
        has_charts=any(charts for _, _, charts in groups),
        title=report.title,
        report=report,
        groups=groups,
        glance=glance(report.groups),
    )
    # Names in records may have lone surrogates, which UTF-8 cannot encode.
    path.write_text(page, encoding="utf-8", errors="backslashreplace")


def render(template: str, *, has_charts: bool, package: str = _PACKAGE, **values: Any) -> str:
    """Returns a self-contained page from a template, which gets style sheet and scripts besides these values.

    Args:
        template: name of a file in the folder ``templates`` of ``package``; it may extend ``base.html`` and import from
            ``macros.html``, which are this package's.
        has_charts: whether the page needs plotly.js.
        package: import name of the package.
        values: what the template calls by these names.
    """
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(name, "templates") for name in dict.fromkeys((package, _PACKAGE))]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["chart_json"] = chart_json
    return environment.get_template(template).render(
        **values,
        css=Markup(template_text("report.css")),
        script=Markup(template_text("report.js")),
        plotly_js=Markup(get_plotlyjs() if has_charts else ""),
    )


def sections(group: Group, styles: Mapping[str, PlanStyle]) -> list[Section]:
    """Returns the charts that a group has numbers for."""
    charts: dict[str, list[Chart | None]] = {
        "Speed": [throughput(group, styles), bucket_sizes(group, styles)],
        "More ranks": [*scaling_charts(group, styles)],
        "Communication": [step_parts(group), overlap(group, styles)],
        "Loss": [*loss_curves(group, styles)],
        "Memory": [peak_memory(group, styles)],
    }
    narrow = [Section(title, [chart for chart in own if chart is not None]) for title, own in charts.items()]
    steps = timelines(group)
    title = "One step of each plan" if len(steps) > 1 else "One step"
    note = "One time axis for all. Below the phases of each rank is a row for each of its buckets."
    wide = [
        Section('The search of plan="auto"', tuning_charts(group, styles), is_wide=True),
        Section(title, steps, note, KEYS, is_wide=True),
    ]
    return [section for section in (*narrow, *wide) if section.charts]


def chart_json(chart: Chart) -> Markup:
    """Returns a figure as JSON for a script element, with markup escaped."""
    assert chart.figure is not None
    figure = json.loads(chart.figure.to_json(engine="json"))
    return htmlsafe_json_dumps(figure, separators=(",", ":"), ensure_ascii=False)


def template_text(name: str) -> str:
    """Returns the text of a template, style sheet or script."""
    return (files(_PACKAGE) / "templates" / name).read_text(encoding="utf-8")


class Table(NamedTuple):
    """A table of settings, the sources of published figures, and the kind of the throughputs' intervals, if any."""

    columns: list[Column]
    rows: list[tuple[str, list[Cell]]]
    sources: list[str]
    intervals: str


def settings_table(group: Group) -> Table:
    """Returns the table of a group, in the order of the sweep."""
    shown = [(column, cells) for column, cells in columns_of(group) if column.title]
    over = f"speed-up over {group.baseline.name}"
    return Table(
        columns=[replace(column, title=over) if column.key == "speedup" else column for column, _ in shown],
        rows=[(setting.name, [cells[row] for _, cells in shown]) for row, setting in enumerate(group.settings)],
        sources=list(dict.fromkeys(figure.source for setting in group.settings for figure in setting.published)),
        intervals=kinds_of_intervals(setting.samples_per_s for setting in group.settings),
    )


def glance(groups: Sequence[Group]) -> Rows | None:
    """Returns the speed-ups of the settings that all groups share; None with one group, or less than two of them."""
    by_name = [{setting.name: setting for setting in group.settings} for group in groups]
    names = [name for name in by_name[0] if all(name in of_group for of_group in by_name)] if by_name else []
    if len(groups) < 2 or len(names) < 2:
        return None
    rows = [
        (Cell(group.name), *(_at_a_glance(of_group[name], group) for name in names))
        for group, of_group in zip(groups, by_name, strict=True)
    ]
    return Rows("Speed-up at a glance", ["", *names], rows)


def _at_a_glance(setting: Setting, group: Group) -> Cell:
    theirs = [figure.speedup for figure in setting.published if figure.speedup is not None]
    published = f"published: {theirs[0]:g}{TIMES}" if theirs and setting is not group.baseline else ""
    return Cell(speedup_cell(setting.speedup, setting, group).text or "-", published)
