"""The tables of the page: of a group's settings, and of the speed-ups of several groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from lightning_commopt.report.columns import Cell, Column, columns_of, difference_in_words
from lightning_commopt.report.model import Group, Setting
from lightning_commopt.report.phrases import TIMES, kinds_of_intervals
from lightning_commopt.text.formatting import number


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
