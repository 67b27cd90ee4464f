"""report.html: one file with everything in it, which opens offline and asks no server for anything."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from lightning_commopt.report.columns import Cell, Column, columns_of, difference_in_words
from lightning_commopt.report.figures.chart import Chart, Key
from lightning_commopt.report.figures.loss import loss_curves
from lightning_commopt.report.figures.scaling import efficiency, speedup
from lightning_commopt.report.figures.step_time import overlap, step_parts
from lightning_commopt.report.figures.style import PlanStyle, plan_styles
from lightning_commopt.report.figures.throughput import bucket_sizes, peak_memory, throughput
from lightning_commopt.report.figures.timeline import KEYS, timelines
from lightning_commopt.report.model import Group, Report, Setting
from lightning_commopt.report.phrases import TIMES, kinds_of_intervals
from lightning_commopt.text.formatting import number

_PACKAGE = "lightning_commopt.report"


class Section(NamedTuple):
    """Charts that answer one question.

    Attributes:
        title: of the section.
        charts: at least one.
        note: what holds for all of them.
        keys: the same.
        is_wide: whether each chart gets the whole width.
    """

    title: str
    charts: list[Chart]
    note: str = ""
    keys: tuple[Key, ...] = ()
    is_wide: bool = False


def write_page(report: Report, path: Path) -> None:
    """Writes the page.

    Args:
        report: what it says.
        path: of the file; its folder is there.
    """
    groups = [(group, settings_table(group), sections(group, _styles(report))) for group in report.groups]
    has_charts = any(of_group[2] for of_group in groups)
    values = {"report": report, "groups": groups, "glance": glance(report.groups)}
    path.write_text(render("report.html", has_charts=has_charts, **values), encoding="utf-8")


def render(template: str, *, has_charts: bool, **values: Any) -> str:
    """Returns a page that holds everything it needs.

    Args:
        template: name of the file.
        has_charts: whether it needs the library that draws them.
        **values: what the template names, other than style sheet and scripts.
    """
    environment = Environment(
        loader=PackageLoader(_PACKAGE, "templates"),
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
    steps = timelines(group)
    found = [
        Section("Speed", _without_none(throughput(group, styles), bucket_sizes(group, styles))),
        Section("More ranks", _without_none(speedup(group, styles), efficiency(group, styles))),
        Section("Communication", _without_none(step_parts(group), overlap(group, styles))),
        Section("Loss", loss_curves(group, styles)),
        Section("Memory", _without_none(peak_memory(group, styles))),
        Section("One step of each plan" if len(steps) > 1 else "One step", steps, _TIMELINE_NOTE, KEYS, is_wide=True),
    ]
    return [section for section in found if section.charts]


_TIMELINE_NOTE = "One time axis for all. Below the phases of each rank is a row for each of its buckets."


def chart_json(chart: Chart) -> Markup:
    """Returns a figure to stand in a script element, whatever the texts in it."""
    assert chart.figure is not None
    figure: dict[str, Any] = json.loads(chart.figure.to_json(engine="json"))
    text = json.dumps(figure, separators=(",", ":"), ensure_ascii=False)
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def _styles(report: Report) -> dict[str, PlanStyle]:
    return plan_styles(setting.sync_method for group in report.groups for setting in group.settings)


def _without_none(*charts: Chart | None) -> list[Chart]:
    return [chart for chart in charts if chart is not None]


def template_text(name: str) -> str:
    """Returns a template, style sheet or script as it is."""
    return (files(_PACKAGE) / "templates" / name).read_text(encoding="utf-8")


class Table(NamedTuple):
    """A table of settings.

    Attributes:
        columns: those that have a value in some row.
        rows: a setting, and its cells.
        sources: where figures of others are from.
        intervals: what the ends of those of the throughputs are; empty where they have none.
    """

    columns: list[Column]
    rows: list[tuple[Setting, list[Cell]]]
    sources: list[str]
    intervals: str


class Glance(NamedTuple):
    """The speed-ups of several groups with the same settings, on one screen.

    Attributes:
        names: of the settings, a column each.
        rows: a group, and its cells.
    """

    names: list[str]
    rows: list[tuple[Group, list[Cell]]]


def settings_table(group: Group) -> Table:
    """Returns the table of a group, in the order of the sweep."""
    shown = [(column, cells) for column, cells in columns_of(group) if column.title]
    over = f"speed-up over {group.baseline.name}"
    return Table(
        columns=[replace(column, title=over) if column.key == "speedup" else column for column, _ in shown],
        rows=[(setting, [cells[row] for _, cells in shown]) for row, setting in enumerate(group.settings)],
        sources=list(dict.fromkeys(figure.source for setting in group.settings for figure in setting.published)),
        intervals=kinds_of_intervals(setting.samples_per_s for setting in group.settings),
    )


def glance(groups: Sequence[Group]) -> Glance | None:
    """Returns the settings that all groups have; None with a single group, or with less than two such settings."""
    by_name = [{setting.name: setting for setting in group.settings} for group in groups]
    names = [name for name in by_name[0] if all(name in of_group for of_group in by_name)] if by_name else []
    if len(groups) < 2 or len(names) < 2:
        return None
    rows = [
        (group, [_at_a_glance(of_group[name], group) for name in names])
        for group, of_group in zip(groups, by_name, strict=True)
    ]
    return Glance(names=names, rows=rows)


def _at_a_glance(setting: Setting, group: Group) -> Cell:
    if setting is group.baseline:
        return Cell("baseline")
    theirs = [figure.speedup for figure in setting.published if figure.speedup is not None]
    published = f"published: {theirs[0]:g}{TIMES}" if theirs else ""
    if setting.speedup is None:
        return Cell("-", published)
    return Cell(f"{number(setting.speedup.median)}{TIMES} {difference_in_words(setting)}".rstrip(), published)
