"""Finds matrices of ``nvidia-smi topo`` in lines of text, and joins what a terminal has wrapped."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from commopt_diagnose.topology.machine import parse_link

GPU = re.compile(r"GPU\d{1,4}")

P2P = frozenset(("OK", "CNS", "GNS", "TNS", "DR", "NS", "U"))
"""The driver's status of direct copies, the cells of ``topo -p2p``."""

_LABEL = re.compile(r"(?!NV\d+$)[A-Za-z][\w.\-]{0,40}\d[\w.\-]{0,40}")
_HEADING = re.compile(r"CPU\s+Affinity|GPU\s+NUMA\s+ID|NUMA(?:\s+Affinity)?", re.IGNORECASE)
_HEADING_WORDS = ("cpu", "numa", "gpu", "affinity", "id")
_CELL = re.compile(r"[A-Z][A-Z0-9#?]{0,9}|-|\?+|\.{2,3}|N/A")
_ROW = re.compile(r"(GPU|NIC|mlx\w{0,3}_)\d{1,4}\s+(X|NV\d+|PIX|PXB|PHB|NODE|SYS|SOC|PSB)(\s|$)")
_GLUED_LABELS = re.compile(r"(?<=\d)(?=(?:GPU|NIC|mlx5_)\d|CPU\s+Affinity|N/A)")
_GLUED_CELLS = re.compile(r"(NV\d+|PIX|PXB|PHB|NODE|SYS|SOC)(?=(?:NV\d+|PIX|PXB|PHB|NODE|SYS|SOC)+\b)")
_MAX_LABELS = 512


class Row(NamedTuple):
    """A line of the matrix: its label, a cell for each column, and the words behind them."""

    label: str
    cells: list[str]
    tail: list[str]


@dataclass(kw_only=True)
class Table:
    """A matrix."""

    labels: list[str] = field(default_factory=list)  # labels of the columns; empty if the head is missing
    headings: list[str] = field(default_factory=list)  # the other words of the head, in lower case
    rows: dict[str, Row] = field(default_factory=dict)  # rows by their labels
    line: int = 0  # index of its first line

    @property
    def cells(self) -> list[str]:
        """All cells that are between two devices."""
        return [cell for row in self.rows.values() for cell in row.cells if cell not in ("X", "")]

    @property
    def is_topology(self) -> bool:
        """Whether its cells are links, unlike the cells of ``topo -p2p``."""
        if not self.cells:
            return len(self.rows) == 1 and len(self.labels) == 1
        return sum(parse_link(cell) is not None for cell in self.cells) > len(self.cells) / 2


def find_tables(lines: Sequence[str]) -> list[Table]:
    """Returns all matrices with at least one row, whatever their cells mean."""
    tables: list[Table] = []
    prefix = ""
    for index, line in _unwrap([_GLUED_CELLS.sub(r"\1 ", _GLUED_LABELS.sub(" ", line)) for line in lines]):
        rest = _behind_prefix(line)
        header = _parse_header(_without(prefix, line), index) or _parse_header(rest, index)
        if header is not None:
            prefix = line[: len(line) - len(rest)].strip()
            tables.append(header)
            continue
        row = _parse_row(_without(prefix, line), tables[-1] if tables else Table())
        if row is None and tables and _HEADING.match(prefix) and (at_end := _parse_row(rest, tables[-1])):
            row = at_end._replace(tail=line[: len(line) - len(rest)].split())  # columns in front of the matrix
        if row is None:
            continue
        if not tables or row.label in tables[-1].rows:
            tables.append(Table(line=index))
        tables[-1].rows[row.label] = row
    return [table for table in tables if table.rows]


def add_missing_columns(table: Table) -> list[str]:
    """Adds columns for rows that the head does not name, as where it is cut; returns their labels.

    The X of a row shows its column. A row without one gets an empty column at the end.
    """
    extra = [row for row in table.rows.values() if row.label not in table.labels] if table.labels else []
    if not extra:
        return []
    known = len(table.labels)
    places = {words.index("X"): row.label for row in extra if "X" in (words := [*row.cells, *row.tail])}
    num_columns = max([known - 1, *places]) + 1
    table.labels += [places.get(place, f"?{place}") for place in range(known, num_columns)]
    table.labels += [row.label for row in extra if row.label not in table.labels]
    for row in list(table.rows.values()):
        words = [*row.cells, *row.tail]
        cells = [*words[:num_columns], *[""] * (len(table.labels) - num_columns)]
        table.rows[row.label] = row._replace(cells=cells, tail=words[num_columns:])
    return [row.label for row in extra]


def split_rows(text: str) -> list[str]:
    """Returns the lines of a matrix that stands in one line, as mails and web pages have it."""
    return _ROW.sub(lambda row: f"\n{row[0]}", text).splitlines()


def _unwrap(lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yields lines with their index. If a head continues in the next line, so does each line of its length below."""
    width = index = 0
    while index < len(lines):
        begin, line = index, lines[index]
        index += 1
        if _parse_header(_behind_prefix(line), 0) is not None:
            following = lines[index] if index < len(lines) else ""
            width = len(line) if re.search(r"\w", following) and not _ROW.search(following) else 0
        while width and len(lines[index - 1]) == width and index < len(lines) and not _parse_row(lines[index], Table()):
            line += lines[index]
            index += 1
        yield begin, line


def _behind_prefix(line: str) -> str:
    """Returns a line without what a launcher has put before its first GPU."""
    match = re.search(r"(?<![\w/])GPU\d", line)
    return line[match.start() :] if match and len(line[: match.start()].split()) <= 4 else line


def _without(prefix: str, line: str) -> str:
    stripped = line.lstrip()
    return stripped[len(prefix) :] if prefix and stripped.startswith(prefix) else line


def _parse_header(text: str, index: int) -> Table | None:
    words = text.split()
    labels: list[str] = []
    for word in words[:_MAX_LABELS]:
        if not _LABEL.fullmatch(word):
            break
        labels.append(word)
    if not labels or not GPU.fullmatch(labels[0]) or len(set(labels)) < len(labels):
        return None
    rest = words[len(labels) :]
    is_cut = len(labels) > 1 and len(rest) == 1 and rest[0].isalpha() and len(rest[0]) < 5 and not _is_cell(rest[0])
    if rest and rest[0].lower() not in _HEADING_WORDS and rest[:2] != ["Node", "Affinity"] and not is_cut:
        return None
    headings = [" ".join(heading.lower().split()) for heading in _HEADING.findall(text)]
    return Table(labels=labels, headings=headings, line=index)


def _parse_row(text: str, table: Table) -> Row | None:
    words = text.split()
    if len(words) < 2 or not (words[0] in table.labels or _LABEL.fullmatch(words[0])):
        return None
    # Without a head, a word such as OK is only a cell of a row that has its X, too.
    is_p2p = words[1] in P2P and "X" in words and GPU.fullmatch(words[0])
    if not _CELL.fullmatch(words[1]) or not (words[0] in table.labels or _is_cell(words[1]) or is_p2p):
        return None
    num_columns = len(table.labels) or _MAX_LABELS
    cells: list[str] = []
    for word in words[1 : num_columns + 1]:
        if not _CELL.fullmatch(word) or (not table.labels and word == "N/A"):
            break
        cells.append(word)
    return Row(words[0], cells, words[1 + len(cells) :])


def _is_cell(word: str) -> bool:
    return word == "X" or parse_link(word) is not None
