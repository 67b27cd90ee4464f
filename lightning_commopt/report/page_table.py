"""The table of settings as the page shows it: columns that have values, and how each of them sorts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from lightning_commopt.report.figures.units import TIMES, number, percent, spread_text
from lightning_commopt.report.model import Group, Interval, Setting
from lightning_commopt.report.phrases import kinds_of_intervals

Order = Literal["ascending", "descending"]


class Cell(NamedTuple):
    """What is written in a cell.

    Attributes:
        text: the number, with as many digits as mean something; empty where there is none.
        small: below it: the interval, or a word.
        value: to sort by; None goes last. A text sorts as such.
    """

    text: str = ""
    small: str = ""
    value: float | str | None = None


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column, without its cells.

    Attributes:
        title: with the unit.
        first: order of the first click: the best first.
        cell: makes a setting's.
        is_theirs: figures of others.
    """

    title: str
    first: Order
    cell: Callable[[Setting], Cell]
    is_theirs: bool = False


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


def settings_table(group: Group) -> Table:
    """Returns the table of a group, in the order of the sweep; columns without any value are left out."""
    cells = [[column.cell(setting) for setting in group.settings] for column in _columns(group)]
    kept = [index for index, of_column in enumerate(cells) if any(cell.text for cell in of_column)]
    return Table(
        columns=[_columns(group)[index] for index in kept],
        rows=[(setting, [cells[index][row] for index in kept]) for row, setting in enumerate(group.settings)],
        sources=list(dict.fromkeys(figure.source for setting in group.settings for figure in setting.published)),
        intervals=kinds_of_intervals(setting.samples_per_s for setting in group.settings),
    )


class Glance(NamedTuple):
    """The speed-ups of several groups with the same settings, on one screen.

    Attributes:
        names: of the settings, a column each.
        rows: a group, and its cells.
    """

    names: list[str]
    rows: list[tuple[Group, list[Cell]]]


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
    if setting is group.reference:
        return Cell(f"1{TIMES} reference")
    theirs = [figure.speedup for figure in setting.published if figure.speedup is not None]
    published = f"published: {theirs[0]:g}{TIMES}" if theirs else ""
    if setting.speedup is None:
        return Cell("-", published)
    return Cell(f"{number(setting.speedup.median)}{TIMES} {_difference(setting)}".rstrip(), published)


def _difference(setting: Setting) -> str:
    return "machine busy?" if setting.is_beyond_limit else setting.difference or ""


def _columns(group: Group) -> list[Column]:
    return [
        Column(title="ranks", first="ascending", cell=lambda s: Cell(str(s.world_size), value=s.world_size)),
        Column(title="samples/s", first="descending", cell=lambda s: _interval(s.samples_per_s)),
        Column(
            title=f"speed-up over {group.reference.name}",
            first="descending",
            cell=lambda s: _speedup(s, group),
        ),
        Column(title="steps/s", first="descending", cell=lambda s: _interval(s.steps_per_s)),
        Column(title="efficiency", first="descending", cell=lambda s: _share(s.efficiency)),
        Column(title="exposed share of a step", first="ascending", cell=_exposed),
        Column(title="MB sent, a step and rank", first="ascending", cell=lambda s: _megabytes(s.wire_bytes)),
        Column(title="final validation loss", first="ascending", cell=_loss),
        Column(
            title="final validation accuracy",
            first="descending",
            cell=lambda s: _share(s.val_accuracy.median if s.val_accuracy else None),
        ),
        Column(title="peak memory (MB)", first="ascending", cell=lambda s: _megabytes(s.peak_memory_bytes)),
        Column(
            title="published by others, on their hardware",
            first="descending",
            cell=_published,
            is_theirs=True,
        ),
    ]


def _interval(interval: Interval | None, digits_of_ends: int = 3) -> Cell:
    if interval is None:
        return Cell()
    return Cell(number(interval.median, 4), spread_text(interval, digits=digits_of_ends), interval.median)


def _speedup(setting: Setting, group: Group) -> Cell:
    if setting is group.reference and len(group.settings) > 1:
        return Cell(f"1{TIMES} reference", value=1.0)
    if setting.speedup is None:
        return Cell()
    text = f"{number(setting.speedup.median)}{TIMES} {_difference(setting)}".rstrip()
    return Cell(text, spread_text(setting.speedup), setting.speedup.median)


def _share(share: float | None) -> Cell:
    return Cell() if share is None else Cell(percent(share), value=share)


def _exposed(setting: Setting) -> Cell:
    share = setting.exposed_share
    return Cell() if share is None else Cell(percent(share.median), value=share.median)


def _megabytes(num_bytes: float | None) -> Cell:
    return Cell() if num_bytes is None else Cell(number(num_bytes / 1e6), value=num_bytes)


def _loss(setting: Setting) -> Cell:
    diverged = f"diverged: {setting.num_diverged} of {len(setting.runs)} runs" if setting.num_diverged else ""
    cell = _interval(setting.val_loss, digits_of_ends=4)
    return Cell(cell.text or ("-" if diverged else ""), "\n".join(filter(None, [cell.small, diverged])), cell.value)


def _published(setting: Setting) -> Cell:
    if not setting.published:
        return Cell()
    speedups = [figure.speedup for figure in setting.published if figure.speedup is not None]
    return Cell("\n".join(figure.label for figure in setting.published), value=max(speedups, default=None))
