"""The table of settings: one list of columns for the terminal, the page, CSV and JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from lightning_commopt.report.intervals import TIMES, spread_text
from lightning_commopt.report.model import Group, Interval, Published, Setting
from lightning_commopt.text.formatting import megabytes, number, percent


class Cell(NamedTuple):
    """The content of a cell."""

    text: str = ""  # the number with its significant digits; empty without one
    small: str = ""  # below the text: the interval, or a word
    value: float | str | None = None  # to sort by; None sorts last


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column, without its cells."""

    key: str  # the attribute of a `Setting`, and the name in CSV and JSON
    title: str = ""  # on the page, with the unit; empty for columns of CSV and JSON only
    heading: str = ""  # on the terminal; empty if not shown there
    first: Literal["ascending", "descending"] = "ascending"  # order of the page's first click: the best first
    # makes the cell from the attribute, the setting and its group
    show: Callable[[Any, Setting, Group], Cell] = lambda value, setting, group: Cell()
    is_theirs: bool = False  # the column has figures of others


def columns_of(group: Group) -> list[tuple[Column, list[Cell]]]:
    """Returns the columns for which a group has numbers, with a cell for each setting."""
    found = [
        (column, [column.show(getattr(setting, column.key), setting, group) for setting in group.settings])
        for column in COLUMNS
    ]
    return [(column, cells) for column, cells in found if any(cell.text for cell in cells)]


def difference_in_words(setting: Setting) -> str:
    """Returns how certain a setting's speed-up is: "faster", "uncertain", or that the machine may have been busy."""
    if setting.is_beyond_limit:
        return "machine busy?"
    if setting.difference == "unknown" and setting.speedup is not None:
        return "in one run" if setting.speedup.num_values == 1 else "uncertain"
    return setting.difference or ""


def _interval(value: Interval | None, *_: object, digits: int = 3) -> Cell:
    return (
        Cell() if value is None else Cell(number(value.median, digits), spread_text(value, digits=digits), value.median)
    )


def speedup_cell(speedup: Interval | None, setting: Setting, group: Group) -> Cell:
    """Returns the speed-up, and how certain it is."""
    if setting is group.baseline and len(group.settings) > 1:
        return Cell("baseline", value=1.0)
    if speedup is None:
        return Cell()
    text = f"{number(speedup.median)}{TIMES} {difference_in_words(setting)}".rstrip()
    return Cell(text, spread_text(speedup), speedup.median)


def _share(value: Interval | float | None, *_: object) -> Cell:
    share = value.median if isinstance(value, Interval) else value
    return Cell() if share is None else Cell(percent(share), value=share)


def _megabytes(num_bytes: float | None, *_: object) -> Cell:
    return Cell() if num_bytes is None else Cell(megabytes(num_bytes), value=num_bytes)


def _loss(val_loss: Interval | None, setting: Setting, group: Group) -> Cell:
    diverged = f"diverged: {setting.num_diverged} of {len(setting.runs)} runs" if setting.num_diverged else ""
    cell = _interval(val_loss, digits=4)
    return Cell(cell.text or ("-" if diverged else ""), "\n".join(filter(None, [cell.small, diverged])), cell.value)


def _published(figures: Sequence[Published], *_: object) -> Cell:
    speedups = [figure.speedup for figure in figures if figure.speedup is not None]
    return Cell("\n".join(figure.label for figure in figures), value=max(speedups, default=None))


COLUMNS = (
    Column(key="world_size", title="ranks", show=lambda value, *_: Cell(str(value), value=value)),
    Column(key="samples_per_s", title="samples/s", heading="samples/s", first="descending", show=_interval),
    Column(key="speedup", title="speed-up", heading="speed-up", first="descending", show=speedup_cell),
    Column(key="steps_per_s", title="steps/s", first="descending", show=_interval),
    Column(key="efficiency", title="efficiency", heading="efficiency", first="descending", show=_share),
    Column(key="exposed_share", title="exposed share of a step", heading="exposed", show=_share),
    Column(key="wire_bytes", title="MB sent, a step and rank", heading="MB sent", show=_megabytes),
    Column(key="val_loss", title="final validation loss", heading="final loss", show=_loss),
    Column(key="val_accuracy", title="final validation accuracy", first="descending", show=_share),
    Column(key="peak_memory_bytes", title="peak memory (MB)", heading="peak MB", show=_megabytes),
    Column(
        key="published",
        title="published by others, on their hardware",
        first="descending",
        show=_published,
        is_theirs=True,
    ),
    *(Column(key=key) for key in ("speedup_limit", "step_s", "comm_s", "exposed_s")),
)
