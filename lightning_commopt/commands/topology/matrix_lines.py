"""Finds matrices of ``nvidia-smi topo`` in lines of text, and joins what a terminal has wrapped."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_commopt.commands.topology.machine import parse_link

GPU = re.compile(r"GPU\d{1,4}")

_LABEL = re.compile(r"(?!NV\d+$)[A-Za-z][\w.\-]{0,40}\d[\w.\-]{0,40}")
_HEADING = re.compile(r"CPU\s+Affinity|NUMA\s+Affinity|GPU\s+NUMA\s+ID", re.IGNORECASE)
_HEADING_WORDS = ("cpu", "numa", "gpu", "affinity", "id")
_CELL = re.compile(r"[A-Z][A-Z0-9#?]{0,9}|-|\?+|\.{2,3}|N/A")
_FRAGMENTS = re.compile(r"[A-Z0-9/,#\-]+")
_CORES = re.compile(r"\d[\d,\-]*|N/A")
_MAX_LABELS = 512
_MAX_WRAPS = 40


class Row(NamedTuple):
    """A line of the matrix.

    Attributes:
        label: in front.
        cells: as far as there are columns.
        tail: what stands behind the cells.
        text: all of it.
    """

    label: str
    cells: list[str]
    tail: list[str]
    text: str


@dataclass(kw_only=True)
class Table:
    """A matrix.

    Attributes:
        labels: of the columns; empty where the head is missing.
        headings: what else the head names, in lower case.
        rows: by label.
    """

    labels: list[str] = field(default_factory=list)
    headings: list[str] = field(default_factory=list)
    rows: dict[str, Row] = field(default_factory=dict)

    @property
    def is_topology(self) -> bool:
        """Whether its cells are links; those of ``topo -p2p`` are not."""
        cells = [cell for row in self.rows.values() for cell in row.cells if cell != "X"]
        if not cells:
            return len(self.rows) == 1 and len(self.labels) == 1
        return sum(parse_link(cell) is not None for cell in cells) > len(cells) / 2


class _Header(NamedTuple):
    labels: list[str]
    headings: list[str]


def find_tables(lines: Sequence[str]) -> list[Table]:
    """Returns all matrices with at least one row, also those that are none of links."""
    tables: list[Table] = []
    prefix = ""
    index = 0
    while index < len(lines):
        line = _without(prefix, lines[index])
        header = _parse_header(line) or _parse_header(line := _behind_prefix(lines[index]))
        index += 1
        if header is not None:
            prefix = lines[index - 1][: len(lines[index - 1]) - len(line)].strip()
            header, index = _join_header(line, header, lines, index, prefix)
            tables.append(Table(labels=header.labels, headings=header.headings))
            continue
        line = _without(prefix, lines[index - 1])
        row = _parse_row(line, tables[-1] if tables else Table())
        if row is None:
            continue
        if not tables or row.label in tables[-1].rows:
            tables.append(Table())
        row, index = _join_row(row, tables[-1], lines, index, prefix)
        tables[-1].rows[row.label] = row
    return [table for table in tables if table.rows]


def _behind_prefix(line: str) -> str:
    """Returns a line without what a launcher has put before its first GPU."""
    found = re.search(r"(?<![\w/])GPU\d", line)
    return line[found.start() :] if found and len(line[: found.start()].split()) <= 3 else line


def _without(prefix: str, line: str) -> str:
    stripped = line.lstrip()
    return stripped[len(prefix) :] if prefix and stripped.startswith(prefix) else line


def _parse_header(text: str) -> _Header | None:
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
    if rest and rest[0].lower() not in _HEADING_WORDS and not is_cut:
        return None
    return _Header(labels, [" ".join(found.lower().split()) for found in _HEADING.findall(text)])


def _parse_row(text: str, table: Table) -> Row | None:
    words = text.split()
    if len(words) < 2 or not (words[0] in table.labels or _LABEL.fullmatch(words[0])):
        return None
    if not _CELL.fullmatch(words[1]) or (words[0] not in table.labels and not _is_cell(words[1])):
        return None
    num_columns = len(table.labels) or _MAX_LABELS
    cells: list[str] = []
    for word in words[1 : num_columns + 1]:
        if not _CELL.fullmatch(word) or (not table.labels and word == "N/A"):
            break
        cells.append(word)
    return Row(words[0], cells, words[1 + len(cells) :], text)


def _is_cell(word: str) -> bool:
    return word == "X" or parse_link(word) is not None


def _join_header(text: str, header: _Header, lines: Sequence[str], index: int, prefix: str) -> tuple[_Header, int]:
    """Joins a header with the lines that it was wrapped to; returns it, and the index of the first other line."""
    for _ in range(_MAX_WRAPS):
        if index >= len(lines) or _parse_row(more := _without(prefix, lines[index]), Table(labels=header.labels)):
            break
        best = (_in_order(header.labels), len(header.labels), len(header.headings))
        joined = None
        for glue in ("", " "):
            found = _parse_header(text + glue + more) if more.strip() else None
            if found is None:
                continue
            score = (_in_order(found.labels), len(found.labels), len(found.headings))
            if score > best:
                best, joined = score, (found, text + glue + more)
        if joined is None:
            break
        header, text = joined
        index += 1
    return header, index


def _in_order(labels: Sequence[str]) -> bool:
    """Returns whether GPUs and NICs are numbered without a gap."""
    numbers: dict[str, list[int]] = {}
    for label in labels:
        if found := re.fullmatch(r"(GPU|NIC)(\d{1,4})", label):
            numbers.setdefault(found[1], []).append(int(found[2]))
    return all(each == list(range(each[0], each[0] + len(each))) for each in numbers.values())


def _join_row(row: Row, table: Table, lines: Sequence[str], index: int, prefix: str) -> tuple[Row, int]:
    """Joins a row with the lines that it was wrapped to; returns it, and the index of the first other line."""
    for _ in range(_MAX_WRAPS if table.labels else 0):
        if index >= len(lines):
            break
        more = _without(prefix, lines[index])
        words = more.split()
        if not words or not all(map(_FRAGMENTS.fullmatch, words)) or _parse_row(more, table) or _parse_header(more):
            break
        best, joined = _score(row, table), None
        for glue in ("", " "):
            found = _parse_row(row.text + glue + more, table)
            if found is not None and (score := _score(found, table)) > best:
                best, joined = score, found
        if joined is None:
            break
        row = joined
        index += 1
    return row, index


def _score(row: Row, table: Table) -> tuple[int, int, int]:
    """Returns how much of a row can be read: links, words that are none, and how well its end fits the head."""
    num_tail = len(table.headings) if GPU.fullmatch(row.label) else 0
    num_cells = sum(map(_is_cell, row.cells))
    is_odd = sum(not _CORES.fullmatch(word) for word in row.tail)
    return num_cells, num_cells - len(row.cells) - is_odd, -abs(len(row.tail) - num_tail)
