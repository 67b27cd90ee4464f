"""Renders report.html: one self-contained file, which opens offline."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from lightning_commopt.measure.plain import write_whole
from lightning_commopt.report.config_lines import config_forms
from lightning_commopt.report.figures.decision import decision
from lightning_commopt.report.figures.loss import loss_curves
from lightning_commopt.report.figures.scaling import scaling_charts
from lightning_commopt.report.figures.style import SYMBOLS, Chart, Key, PlanStyle, Rows, plan_styles
from lightning_commopt.report.figures.throughput import bucket_sizes, overlap, peak_memory, step_parts, throughput
from lightning_commopt.report.figures.timeline import KEYS, timelines
from lightning_commopt.report.figures.tuning import tuning_charts
from lightning_commopt.report.intervals import TIMES, kinds_of_intervals
from lightning_commopt.report.model import Cell, Column, Group, Report, Run, Setting, columns_of, speedup_cell
from lightning_commopt.text.formatting import number

_PACKAGE = "lightning_commopt.report"
# A blank between a number and its unit, where no line may end.
_BLANK_BEFORE_UNIT = re.compile(
    r"(?<=\d) (?=%|(?:[KMG]?i?B|kB|[mµn]?s|(?:samples|steps|[kMG]?bit|[KMG]B)/s|times|M|h|min"
    r"|(?:rank|core|host|node|run|step|repetition|bucket)s?)(?!\w))"
)
_MINUTE_S, _HOUR_S = 60, 3600


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
    groups = [GroupPage(group, styles) for group in report.groups]
    page = render(
        "report.html",
        title=report.title,
        report=report,
        groups=groups,
        glance=glance(report.groups),
    )
    write_whole(path, page)


class GroupPage:
    """What the page shows of a group."""

    def __init__(self, group: Group, styles: Mapping[str, PlanStyle]) -> None:
        self.group = group
        self.decision = decision(group, styles)
        self.table = settings_table(group)
        self.sections = sections(group, styles)
        self.runs = runs_table(group)


def render(template: str, *, package: str = _PACKAGE, **values: Any) -> str:
    """Returns a self-contained page from a template, which gets style sheet and script besides these values.

    Args:
        template: name of a file in the folder ``templates`` of ``package``; it may extend ``base.html`` and import from
            ``macros.html``, which are this package's.
        package: import name of the package.
        values: what the template calls by these names.
    """
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(name, "templates") for name in dict.fromkeys((package, _PACKAGE))]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_keep_units,
    )
    environment.filters["config_forms"] = config_forms
    return environment.get_template(template).render(
        **values,
        css=Markup(template_text("report.css")),
        script=Markup(template_text("report.js")),
        symbols=SYMBOLS,
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


def _keep_units(value: object) -> object:
    """Returns a text with no-break spaces between numbers and units. Markup and text to copy are left unchanged."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return _BLANK_BEFORE_UNIT.sub("\N{NO-BREAK SPACE}", value)
    return value


def template_text(name: str) -> str:
    """Returns the text of a template, style sheet or script."""
    return (files(_PACKAGE) / "templates" / name).read_text(encoding="utf-8")


class Table(NamedTuple):
    """A table of settings, the sources of published figures, the kind of intervals, and whether there are losses."""

    columns: list[Column]
    rows: list[tuple[str, list[Cell]]]
    sources: list[str]
    intervals: str
    has_loss: bool


def settings_table(group: Group) -> Table:
    """Returns the table of a group, in the order of the sweep."""
    shown = [(column, cells) for column, cells in columns_of(group) if column.title]
    over = f"speed-up over {group.baseline.name}"
    return Table(
        columns=[replace(column, title=over) if column.key == "speedup" else column for column, _ in shown],
        rows=[(setting.name, [cells[row] for _, cells in shown]) for row, setting in enumerate(group.settings)],
        sources=list(dict.fromkeys(figure.source for setting in group.settings for figure in setting.published)),
        intervals=kinds_of_intervals(setting.samples_per_s for setting in group.settings),
        has_loss=any(setting.val_loss is not None or setting.num_diverged for setting in group.settings),
    )


def runs_table(group: Group) -> Rows:
    """Returns a row for each run of a group: when it ran, for how long, on how busy a machine, and by which command."""
    rows = [
        (
            Cell(setting.name, run.name),
            Cell((run.record.started_at or "")[:16].replace("T", " ") or "-"),
            Cell("-" if run.record.seconds is None else _duration(run.record.seconds)),
            Cell(_load(run)),
            Cell("-" if run.throughput is None else number(run.throughput)),
            Cell(shlex.join(run.settings.overrides) or "-"),
        )
        for setting in group.settings
        for run in setting.runs
    ]
    return Rows("Runs", ("run", "started", "duration", "load before and after", "samples/s", "overrides"), rows)


def _duration(seconds: float) -> str:
    if seconds < _MINUTE_S:
        return f"{number(seconds, 2)} s"
    hours, minutes = divmod(round(seconds / _MINUTE_S), _HOUR_S // _MINUTE_S)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _load(run: Run) -> str:
    loads = run.record.load_at_start, run.record.load_at_end
    return "-" if loads == (None, None) else " to ".join("?" if load is None else f"{load:.1f}" for load in loads)


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
