"""Reads what ``nvidia-smi topo -m`` prints: of any version, coloured, indented, cut or wrapped, with text around it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from lightning_commopt.commands.topology.machine import Gpu, Link, Machine, Nic, TopologyError, parse_cpus, parse_link
from lightning_commopt.commands.topology.matrix_lines import GPU, Row, Table, find_tables

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\([A-Z0-9]|\[\d{0,3}(?:;\d{1,3})*m|[\x00-\x08\x0b\x0c\x0e-\x1f]")
_NIC_NAME = re.compile(r"(?:^|[\s>:])(NIC\d{1,4})\s*[:=]\s*([A-Za-z][\w.\-]{0,60})\s*$")
# Lines of nvidia-smi -L, and of its table of GPUs.
_GPU_NAME = re.compile(r"\bGPU\s+(\d{1,4}):\s*([^():|]{2,80}?)\s*(?:\(UUID.*)?$")
_GPU_ROW = re.compile(r"\|\s+(\d{1,4})\s+((?:NVIDIA|Tesla|Quadro|GeForce)\b[^|]{0,60}?)\s+(?:On|Off|N/A)?\s*\|")
_LEGEND = re.compile(r"\s*(SYS|PHB|PIX)\s*=")
_NVLINK_LEGEND = re.compile(r"\s*NV#\s*=")
_MAX_CHARACTERS = 4000  # of a line


def read_smi_text(text: str, source: str) -> Machine:
    """Reads the first topology in a text.

    Args:
        text: with the output of ``nvidia-smi topo -m`` or ``topo -mp`` somewhere.
        source: its name, for people.

    Raises:
        TopologyError: there is none in it.
    """
    lines = [_ESCAPES.sub("", line[:_MAX_CHARACTERS]) for line in re.split(r"\r\n|\r|\n", text)]
    tables = [table for table in find_tables([line.replace("|", " ") for line in lines]) if table.is_topology]
    if not tables:
        raise TopologyError(f"{source}: no matrix of nvidia-smi topo -m, and no XML of NCCL_TOPO_DUMP_FILE")
    table = tables[0]
    labels = table.labels or _labels_of_rows(list(table.rows.values()))
    links, conflicts = _links_of(table, labels)
    names = {found[1]: found[2] for line in lines if (found := _NIC_NAME.search(line))}
    gpus = tuple(_gpus_of(table, labels, lines))
    if not gpus:
        raise TopologyError(f"{source}: a matrix without a GPU")
    nics = [Nic(label=label, name=names.get(label, label)) for label in labels if not GPU.fullmatch(label)]
    is_nvlink = any(link.kind == "NV" for link in links.values()) or any(map(_NVLINK_LEGEND.match, lines))
    is_without = any(map(_LEGEND.match, lines)) or any("topo -mp" in line for line in lines)
    return Machine(
        source=source,
        gpus=gpus,
        nics=tuple(nics),
        links=links,
        has_nvlink_column=is_nvlink or not is_without,
        notices=tuple(_notices(table, labels, conflicts, len(tables))),
    )


def _notices(table: Table, labels: Sequence[str], conflicts: Sequence[str], num_tables: int) -> Iterator[str]:
    if not table.labels:
        yield "the head of the matrix is missing: the columns are named after the rows"
    if missing := [label for label in labels if GPU.fullmatch(label) and label not in table.rows]:
        yield f"no row for {', '.join(missing)}: their links are read from the other rows"
    if conflicts:
        yield f"the matrix says two things of {', '.join(conflicts)}: the slower counts"
    if num_tables > 1:
        yield f"there are {num_tables} matrices in it: this is the first"


def _labels_of_rows(rows: Sequence[Row]) -> list[str]:
    """Names columns after the rows, which have an X in their own."""
    own = {row.cells.index("X"): row.label for row in rows if "X" in row.cells}
    num_gpus = max((index + 1 for index, label in own.items() if GPU.fullmatch(label)), default=0)
    num_columns = max((len(row.cells) for row in rows), default=0)
    labels = [
        own.get(index, f"GPU{index}" if index < num_gpus else f"NIC{index - num_gpus}") for index in range(num_columns)
    ]
    return list(dict.fromkeys(labels))


def _links_of(table: Table, labels: Sequence[str]) -> tuple[dict[frozenset[str], Link], list[str]]:
    """Returns the links, and the pairs of which two rows say different things."""
    links: dict[frozenset[str], Link] = {}
    conflicts = []
    for row in table.rows.values():
        if row.label not in labels:
            continue
        for label, cell in zip(labels, _aligned(row, labels.index(row.label), len(labels)), strict=True):
            link = parse_link(cell)
            pair = frozenset((row.label, label))
            if link is None or len(pair) == 1:
                continue
            known = links.get(pair)
            if known is not None and known != link:
                conflicts.append(f"{label} and {row.label}")
            links[pair] = (
                link if known is None else max(link, known, key=lambda each: (each.distance, -each.num_nvlinks))
            )
    return links, conflicts


def _aligned(row: Row, own: int, num_columns: int) -> list[str]:
    """Returns a cell for each column, "" where cells are missing and nobody knows which: the X is in its own column."""
    if len(row.cells) == num_columns:
        return row.cells
    cells = [""] * num_columns
    place = row.cells.index("X") if "X" in row.cells else len(row.cells)
    before, after = row.cells[:place], row.cells[place + 1 :]
    num_after = num_columns - own - 1
    if len(before) == own or (place == len(row.cells) and len(before) < own and not row.tail):
        cells[: len(before)] = before
    if len(after) == num_after or (len(after) < num_after and not row.tail):
        cells[own + 1 : own + 1 + len(after)] = after
    return cells


def _gpus_of(table: Table, labels: Sequence[str], lines: Sequence[str]) -> Iterator[Gpu]:
    names = {int(found[1]): found[2].strip() for line in lines if (found := _GPU_ROW.search(line))}
    names |= {int(found[1]): found[2].strip() for line in lines if (found := _GPU_NAME.search(line))}
    for label in labels:
        if GPU.fullmatch(label):
            cpus, node = _affinity(table, table.rows.get(label), len(labels))
            yield Gpu(label=label, name=names.get(int(label[3:])), cpus=parse_cpus(cpus), numa_node=node)


def _affinity(table: Table, row: Row | None, num_columns: int) -> tuple[str, int | None]:
    """Returns the cores and the NUMA node behind the cells of a row, either of which may be missing."""
    if row is None or (len(row.cells) < num_columns and not row.tail):
        return "", None
    has_node = not table.headings or "numa affinity" in table.headings
    fields = row.text.strip().split("\t")
    if len(fields) > num_columns + 1 and fields[0].strip() == row.label:
        behind = [field.strip() for field in fields[num_columns + 1 :]]
    else:
        behind = list(row.tail)
        if "gpu numa id" in table.headings and len(behind) > 1:
            behind.pop()
        if has_node and len(behind) == 1 and behind[0].isdecimal():
            behind.insert(0, "")
    cpus, node = [*behind, "", ""][:2]
    return cpus, int(node) if has_node and node.isdecimal() and len(node) < 5 else None
