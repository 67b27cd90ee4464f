"""Prints tables that keep numbers whole in a narrow terminal, and text in any encoding, without control characters."""

from __future__ import annotations

import codecs
import io
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence

from rich import box
from rich.console import Console, ConsoleOptions, ConsoleRenderable, Group, RenderableType, RenderHook
from rich.measure import Measurement
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from lightning_commopt.text.formatting import control_places, escape_controls

_ANY_WIDTH = 10_000  # wider than any cell, to measure cells that do not wrap
_ROOMY, _TIGHT = (0, 1, 0, 1), (0, 1, 0, 0)  # padding of cells: a space on both sides, or only on the right
_BELOW = (0, 0, 0, 2)  # padding of the cells in a list: two spaces on the left
_ASCII = str.maketrans(
    {
        "\N{NO-BREAK SPACE}": " ",
        "\N{PLUS-MINUS SIGN}": "+-",
        "\N{MULTIPLICATION SIGN}": "x",
        "\N{MICRO SIGN}": "u",
        "\N{HORIZONTAL ELLIPSIS}": "...",
        "\N{EN DASH}": "-",
        "\N{EM DASH}": "-",
        "\N{LEFT SINGLE QUOTATION MARK}": "'",
        "\N{RIGHT SINGLE QUOTATION MARK}": "'",
        "\N{LEFT DOUBLE QUOTATION MARK}": '"',
        "\N{RIGHT DOUBLE QUOTATION MARK}": '"',
    }
)


class TextConsole(Console):
    """Prints text literally, without markup and with control characters as escapes. All output for people uses it.

    A run's files may come from an untrusted source, and a terminal obeys control characters.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False)
        self.push_render_hook(_TrimmingHook())

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Renders a text, or the cells of a table, with escapes."""
        if isinstance(renderable, str):
            renderable = escape_controls(renderable)
        elif isinstance(renderable, Text):
            renderable = escaped(renderable)
        return super().render(renderable, options)


class _TrimmingHook(RenderHook):
    """Leaves out the spaces with which tables and paddings fill their lines, as whoever copies a line gets them too."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Trimmed(renderable) for renderable in renderables]


class _Trimmed:
    """What is printed of another renderable, without spaces at the ends of lines."""

    def __init__(self, renderable: ConsoleRenderable) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        spaces: list[Segment] = []  # held back, as the line may end after them
        for segment in console.render(self._renderable, options):
            for text in (segment.text,) if segment.control else re.split(r"(\n)", segment.text):
                trimmed = text if segment.control else text.rstrip(" ")
                if trimmed == "\n":
                    spaces.clear()
                if trimmed:
                    yield from spaces
                    spaces.clear()
                    yield Segment(trimmed, segment.style, segment.control)
                if len(trimmed) < len(text):
                    spaces.append(Segment(text[len(trimmed) :], segment.style))
        yield from spaces


def escaped(text: Text) -> Text:
    """Returns a text in the same styles, with control characters as escapes."""
    places = control_places(text.plain)
    if not places:
        return text
    return text.blank_copy().join(
        part if escape_controls(part.plain) == part.plain else Text(escape_controls(part.plain))
        for part in text.divide(places)
    )


class TextTable:
    """A table for `Console.print` that never breaks a word or a number, however narrow the console is.

    In a narrow console columns move closer, and then text wraps between words. If the longest words do not fit side by
    side, it becomes a list: a line for each row's first cell, and below it the other cells after their headings. Spaces
    before a first cell, which make it a part of the row above, are kept in both, also where the cell wraps.

    Args:
        headings: headings of the columns, which may have several lines.
        numbers: headings of the columns whose cells are aligned right and never wrap.
        title: text above the table.
        caption: text below the table.
        has_rules: whether to draw a line below the headings and between sections.
    """

    def __init__(
        self, *headings: str, numbers: Collection[str] = (), title: str = "", caption: str = "", has_rules: bool = True
    ) -> None:
        self._headings = tuple(map(escape_controls, headings))
        self._numbers = {*map(escape_controls, numbers)}
        self._title, self._caption = escape_controls(title), escape_controls(caption)
        self._box = box.SIMPLE_HEAD if has_rules else None
        self._rows: list[tuple[list[Text], str]] = []
        self._ends_of_sections: set[int] = set()

    def add_row(self, *cells: str | Text, style: str = "") -> None:
        """Adds a row; strings are not parsed as markup."""
        assert len(cells) == len(self._headings), (cells, self._headings)
        texts = [Text(escape_controls(cell)) if isinstance(cell, str) else escaped(cell) for cell in cells]
        self._rows.append((texts, style))

    def add_section(self) -> None:
        self._ends_of_sections.add(len(self._rows) - 1)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Yields the table, or a list if the table would have to break words."""
        for wraps in (False, True):
            for padding in (_ROOMY, _TIGHT):
                widths = self._widths(console, options, padding, wraps)
                if widths is not None:
                    yield self._table(widths, padding)
                    return
        yield from self._list(options.max_width)

    def _table(self, widths: Sequence[int], padding: tuple[int, int, int, int]) -> Table:
        table = Table(
            title=self._title or None,
            title_justify="left",
            caption=self._caption or None,
            caption_justify="left",
            box=self._box,
            padding=padding,
            pad_edge=False,
        )
        for heading, width in zip(self._headings, widths, strict=True):
            table.add_column(Text(heading), justify="right" if heading in self._numbers else "left", width=width)
        for index, (cells, style) in enumerate(self._rows):
            table.add_row(*map(_indented, cells), style=style, end_section=index in self._ends_of_sections)
        return table

    def _widths(
        self, console: Console, options: ConsoleOptions, padding: tuple[int, int, int, int], wraps: bool
    ) -> list[int] | None:
        """Returns the widths of columns, if text wraps at least those of the longest words; None if they do not fit."""
        unlimited = options.update(max_width=_ANY_WIDTH)
        columns = [
            [Text(heading), *(_indented(cells[index]) for cells, _ in self._rows)]
            for index, heading in enumerate(self._headings)
        ]
        measured = [[Measurement.get(console, unlimited, cell) for cell in column] for column in columns]
        full = [max(cell.maximum for cell in column) for column in measured]
        least = [
            max([heading.minimum, *(cell.maximum if name in self._numbers else cell.minimum for cell in cells)])
            for name, (heading, *cells) in zip(self._headings, measured, strict=True)
        ]
        between = Measurement.get(console, unlimited, self._table(full, padding)).maximum - sum(full)
        free, wanted = options.max_width - between - sum(least), sum(full) - sum(least)
        if free < (0 if wraps else wanted):
            return None
        share = min(1.0, free / wanted) if wanted else 0.0
        return [low + int(share * (high - low)) for low, high in zip(least, full, strict=True)]

    def _list(self, width: int) -> Iterator[RenderableType]:
        names = [" ".join(heading.split()) for heading in self._headings]
        is_number = self._headings[0] in self._numbers
        above = [self._title.strip(), "" if is_number else names[0]]
        if any(above):
            yield Text(", ".join(filter(None, above)), style="italic")
        for cells, style in self._rows:
            first, *others = (Text(" ").join(cell.split("\n")) for cell in cells)
            indent = 0 if is_number else _indent(first)
            name = f"{names[0]} {first.plain}" if is_number else first.plain.strip()
            rest = Text(", ").join(
                Text.assemble(other, " " if other else "", cell)
                for other, cell in zip(names[1:], others, strict=True)
                if cell.plain.strip()
            )
            if indent + len(name) + 2 + len(rest) <= width:
                lines: list[RenderableType] = [Text.assemble((name, style or "bold"), ": " if rest else "", rest)]
            else:
                lines = [Text(name, style=style or "bold"), Padding(rest, _BELOW)]
            yield Padding(Group(*lines), (0, 0, 0, indent)) if indent else Group(*lines)
        yield Text(self._caption, style="italic")


def _indent(cell: Text) -> int:
    return len(cell.plain) - len(cell.plain.lstrip(" "))


def _indented(cell: Text) -> Padding | Text:
    """Returns a cell that keeps the spaces before its first word when it wraps."""
    indent = _indent(cell)
    return Padding(cell[indent:], (0, 0, 0, indent)) if indent else cell


def print_text(text: str | Text, console: Console, style: str = "") -> None:
    """Prints a text literally, wrapped between words on a terminal and otherwise in one line."""
    shown = Text(text, style=style) if isinstance(text, str) else text
    console.print(escaped(shown), soft_wrap=not console.is_terminal)


def print_heading(text: str, console: Console) -> None:
    """Prints a text within a line across the console, or the text alone if it is too long."""
    text = escape_controls(text)
    if len(text) + 4 <= console.width:
        console.rule(Text(text), align="left")
    else:
        console.print(Text(text, style="bold"))


def print_in_any_encoding() -> None:
    """Makes this process print characters that the encoding lacks as similar ASCII or escapes; only for commands."""
    codecs.register_error("commopt", _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        # In the C locale errors are "surrogateescape", which fails as "strict" does.
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="commopt")


def _in_ascii(error: UnicodeError) -> tuple[str | bytes, int]:
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end]
    return text.translate(_ASCII).encode("ascii", "backslashreplace").decode("ascii"), error.end
