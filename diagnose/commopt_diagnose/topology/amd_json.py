"""Reads the JSON of ``amd-smi topology --json`` and ``rocm-smi --showtopo --json`` as the tables of their text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

Cells = dict[tuple[str, str], str]
"""The cells of a table, by the labels of row and column."""

# rocm-smi names both devices in a key, as in "(Topology) Hops between DRM devices 0 and 1": "2".
_PAIR = re.compile(r'"\(Topology\) (Weight|Hops|Link type) between DRM devices (\d{1,3}) and (\d{1,3})": *"(\w+)"')
_NUMA_NODE = re.compile(r'"card(\d{1,3})": *\{[^{}]*"\(Topology\) Numa Node": *"(\d{1,4})"')
_TABLES = {"Weight": "weight", "Hops": "hops", "Link type": "type"}
_MAX_GPUS = 1000  # no host has more
_KEYS = {"weight": "weight", "num_hops": "hops", "link_type": "type"}


def read_amd_json(text: str) -> tuple[dict[str, Cells], dict[int, int]]:
    """Returns the tables ``weight``, ``hops`` and ``type``, and the NUMA nodes of GPUs; empty ones without JSON."""
    tables: dict[str, Cells] = {"weight": {}, "hops": {}, "type": {}}
    for name, row, column, value in _PAIR.findall(text):
        # rocm-smi prints each pair once.
        tables[_TABLES[name]] |= {(f"GPU{row}", f"GPU{column}"): value, (f"GPU{column}", f"GPU{row}"): value}
    for gpu, link in _links_of_amd_smi(text):
        for key in _KEYS.keys() & link.keys():
            tables[_KEYS[key]][f"GPU{gpu}", f"GPU{link['gpu']}"] = str(link[key])
    return tables, {int(number): int(node) for number, node in _NUMA_NODE.findall(text)}


def _links_of_amd_smi(text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the number of each GPU with the objects of its links, which have the number of the other GPU."""
    begin = re.search(r'\[\s*\{\s*"gpu":', text)
    try:
        entries = json.JSONDecoder().raw_decode(text, begin.start())[0] if begin else []
    except (ValueError, RecursionError):
        return
    for entry in entries:
        links = entry.get("links") if _has_number(entry) else None
        yield from ((entry["gpu"], link) for link in (links if isinstance(links, list) else ()) if _has_number(link))


def _has_number(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("gpu"), int) and 0 <= value["gpu"] < _MAX_GPUS
