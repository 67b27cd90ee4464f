"""report.html: one file with everything in it, which opens offline and asks no server for anything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from lightning_commopt.report.figures.chart import Chart, Key
from lightning_commopt.report.figures.loss import loss_curves
from lightning_commopt.report.figures.memory import peak_memory
from lightning_commopt.report.figures.scaling import efficiency, speedup
from lightning_commopt.report.figures.step_time import overlap, step_parts
from lightning_commopt.report.figures.style import PlanStyle, plan_styles
from lightning_commopt.report.figures.throughput import bucket_sizes, throughput
from lightning_commopt.report.figures.timeline import KEYS, timelines
from lightning_commopt.report.model import Group, Report
from lightning_commopt.report.page_table import glance, settings_table

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
