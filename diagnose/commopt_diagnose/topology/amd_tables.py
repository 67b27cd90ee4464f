"""Reads ``rocm-smi --showtopo`` and ``amd-smi topology``, as tables or JSON, with text around them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from commopt_diagnose.topology.amd_json import Cells, read_amd_json
from commopt_diagnose.topology.machine import Gpu, Link, Machine, TopologyError

_TITLES = {
    "weight": re.compile(r"\bWeight between two GPUs|^\W*WEIGHT TABLE", re.IGNORECASE),
    "hops": re.compile(r"\bHops between two GPUs|^\W*HOPS TABLE", re.IGNORECASE),
    "type": re.compile(r"\bLink Type between two GPUs|^\W*LINK TYPE TABLE", re.IGNORECASE),
}
_OTHER_TITLE = re.compile(r"={4,}|\bTABLE\b|between two GPUs")
_LABEL = re.compile(r"GPU\d{1,3}|(?:[0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.\d", re.IGNORECASE)
_NUMA_NODE = re.compile(r"GPU *\[?(\d{1,3})\]?\s*:\s*\(Topology\) Numa Node:\s*(\d{1,4})\s*$")
# What AMD's guide for MI200 and the source of amd-smi say of hops: they count steps of the topology, not links.
_KINDS_BY_HOPS = {"1": "XGMI", "2": "PHB", "3": "SYS"}
_DIRECT_WEIGHT = 15  # weight of a single xGMI link, by the same source; each further link on the way adds as much
_MAX_SHOWN = 8


def read_amd_tables(text: str, lines: Sequence[str], source: str) -> Machine:
    """Reads the kinds of links between GPUs, from the first table of hops and that of link types, or from JSON.

    ``lines`` are those of ``text`` without what only decorates them.

    Raises:
        TopologyError: there is no such table, or only link types of PCIe, which do not tell how far GPUs are.
    """
    tables, nodes = read_amd_json(text)
    tables = {name: tables[name] or _find_table(lines, title) for name, title in _TITLES.items()}
    labels = list(dict.fromkeys(row for table in (tables["hops"], tables["type"]) for row, _ in table))
    links = {
        frozenset(pair): Link(kind)
        for pair in combinations(labels, 2)
        if (kind := _kind(tables["type"].get(pair, ""), tables["hops"].get(pair, "")))
    }
    if not links:
        raise TopologyError(
            f"{source}: no table of rocm-smi --showtopo or amd-smi topology that has hops and link types: give"
            " the whole output of either, as text or with --json (amd-smi of ROCm 6.1.1 and newer), not with --csv"
        )
    nodes |= {int(match[1]): int(match[2]) for line in lines if (match := _NUMA_NODE.search(line))}
    names = {label: f"GPU{number}" for number, label in enumerate(labels)} if ":" in labels[0] else {}
    return Machine(
        source=source,
        gpus=tuple(
            Gpu(label=names.get(label, label), name="AMD", bus_id=label if names else None, numa_node=nodes.get(number))
            for number, label in enumerate(labels)
        ),
        links={frozenset(names.get(label, label) for label in pair): link for pair, link in links.items()},
        notices=tuple(_notices(labels, links, tables["weight"], names)),
    )


def _find_table(lines: Sequence[str], title: re.Pattern[str]) -> Cells:
    """Returns the cells of the first table behind a title; none if there is no such title."""
    begin = next((index for index, line in enumerate(lines) if title.search(line)), len(lines))
    columns: list[str] = []
    cells: Cells = {}
    for line in lines[begin + 1 :]:
        words = line.split()
        if _OTHER_TITLE.search(line):
            break
        if words and all(map(_LABEL.fullmatch, words)) and not columns:
            columns = words
        elif columns and words and words[0] in columns and len(words) == len(columns) + 1:
            cells |= {(words[0], column): word for column, word in zip(columns, words[1:], strict=True)}
    return cells


def _kind(link_type: str, hops: str) -> str | None:
    """Returns one of `KINDS`; None if unknown, as for PCIe without a number of hops."""
    if link_type == "XGMI":
        return "XGMI"
    return _KINDS_BY_HOPS.get(hops) if link_type == "PCIE" and hops != "1" else None


def _notices(
    labels: Sequence[str], links: Mapping[frozenset[str], Link], weights: Cells, names: Mapping[str, str]
) -> Iterator[str]:
    kinds = {link.kind for link in links.values()}
    if "PHB" in kinds:
        yield "AMD's tables do not name PCIe switches: PHB may be PIX or PXB"
    pairs = [pair for pair in combinations(labels, 2) if links.get(frozenset(pair)) == Link("XGMI")]
    over = ["-".join(names.get(label, label) for label in pair) for pair in pairs if _is_indirect(weights.get(pair))]
    if over:
        more = f" and {len(over) - _MAX_SHOWN} more" if len(over) > _MAX_SHOWN else ""
        yield f"xGMI goes through other GPUs between {', '.join(over[:_MAX_SHOWN])}{more}, by their weight"


def _is_indirect(weight: str | None) -> bool:
    return weight is not None and weight.isdecimal() and int(weight) > _DIRECT_WEIGHT
