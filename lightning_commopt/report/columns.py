"""The table of settings: one list of columns for the terminal, the page, CSV and JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from lightning_commopt.report.model import Group, Interval, Setting
from lightning_commopt.report.phrases import TIMES, spread_text
from lightning_commopt.text.formatting import megabytes, number, percent


class Cell(NamedTuple):
    """The content of a cell.

    Attributes:
        text: the number with its significant digits; empty without one.
        small: below the text: the interval, or a word.
        value: to sort by; None sorts last.
    """

    text: str = ""
    small: str = ""
    value: float | str | None = None


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column, without its cells.

    Attributes:
        key: the attribute of a `Setting`, and the name in CSV and JSON.
        title: on the page, with the unit; empty for columns of CSV and JSON only.
        heading: on the terminal; empty if not shown there.
        first: order of the page's first click: the best first.
        cell: makes the cell of a setting in its group.
        is_theirs: the column has figures of others.
    """

    key: str
    title: str = ""
    heading: str = ""
    first: Literal["ascending", "descending"] = "ascending"
    cell: Callable[[Setting, Group], Cell] = lambda setting, group: Cell()
    is_theirs: bool = False


def columns_of(group: Group) -> list[tuple[Column, list[Cell]]]:
    """Returns the columns for which a group has numbers, with a cell for each setting."""
    found = [(column, [column.cell(setting, group) for setting in group.settings]) for column in COLUMNS]
    return [(column, cells) for column, cells in found if any(cell.text for cell in cells)]


def difference_in_words(setting: Setting) -> str:
    """Returns how certain a setting's speed-up is: "faster", "uncertain", or that the machine may have been busy."""
    if setting.is_beyond_limit:
        return "machine busy?"
    if setting.difference == "unknown" and setting.speedup is not None:
        return "in one run" if setting.speedup.num_values == 1 else "uncertain"
    return setting.difference or ""


def _interval(interval: Interval | None, digits: int = 3) -> Cell:
    if interval is None:
        return Cell()
    return Cell(number(interval.median, digits), spread_text(interval, digits=digits), interval.median)


def _speedup(setting: Setting, group: Group) -> Cell:
    if setting is group.baseline and len(group.settings) > 1:
        return Cell("baseline", value=1.0)
    if setting.speedup is None:
        return Cell()
    text = f"{number(setting.speedup.median)}{TIMES} {difference_in_words(setting)}".rstrip()
    return Cell(text, spread_text(setting.speedup), setting.speedup.median)


def _share(share: float | None) -> Cell:
    return Cell() if share is None else Cell(percent(share), value=share)


def _megabytes(num_bytes: float | None) -> Cell:
    return Cell() if num_bytes is None else Cell(megabytes(num_bytes), value=num_bytes)


def _loss(setting: Setting, group: Group) -> Cell:
    diverged = f"diverged: {setting.num_diverged} of {len(setting.runs)} runs" if setting.num_diverged else ""
    cell = _interval(setting.val_loss, digits=4)
    return Cell(cell.text or ("-" if diverged else ""), "\n".join(filter(None, [cell.small, diverged])), cell.value)


def _published(setting: Setting, group: Group) -> Cell:
    if not setting.published:
        return Cell()
    speedups = [figure.speedup for figure in setting.published if figure.speedup is not None]
    return Cell("\n".join(figure.label for figure in setting.published), value=max(speedups, default=None))


COLUMNS = (
    Column(key="world_size", title="ranks", cell=lambda s, _: Cell(str(s.world_size), value=s.world_size)),
    Column(
        key="samples_per_s",
        title="samples/s",
        heading="samples/s",
        first="descending",
        cell=lambda s, _: _interval(s.samples_per_s),
    ),
    Column(key="speedup", title="speed-up", heading="speed-up", first="descending", cell=_speedup),
    Column(key="steps_per_s", title="steps/s", first="descending", cell=lambda s, _: _interval(s.steps_per_s)),
    Column(
        key="efficiency",
        title="efficiency",
        heading="efficiency",
        first="descending",
        cell=lambda s, _: _share(s.efficiency),
    ),
    Column(
        key="exposed_share",
        title="exposed share of a step",
        heading="exposed",
        cell=lambda s, _: _share(s.exposed_share.median if s.exposed_share else None),
    ),
    Column(
        key="wire_bytes",
        title="MB sent, a step and rank",
        heading="MB sent",
        cell=lambda s, _: _megabytes(s.wire_bytes),
    ),
    Column(key="val_loss", title="final validation loss", heading="final loss", cell=_loss),
    Column(
        key="val_accuracy",
        title="final validation accuracy",
        first="descending",
        cell=lambda s, _: _share(s.val_accuracy.median if s.val_accuracy else None),
    ),
    Column(
        key="peak_memory_bytes",
        title="peak memory (MB)",
        heading="peak MB",
        cell=lambda s, _: _megabytes(s.peak_memory_bytes),
    ),
    Column(
        key="published",
        title="published by others, on their hardware",
        first="descending",
        cell=_published,
        is_theirs=True,
    ),
    *(Column(key=key) for key in ("speedup_limit", "step_s", "comm_s", "exposed_s")),
)
