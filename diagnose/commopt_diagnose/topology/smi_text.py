"""Reads output of ``nvidia-smi topo`` from any version, colored, indented, cut or wrapped, with text around it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from textwrap import shorten

from commopt_diagnose.topology.amd_tables import read_amd_tables
from commopt_diagnose.topology.machine import (
    Gpu,
    Link,
    Machine,
    Nic,
    TopologyError,
    has_coherent_memory,
    parse_cpus,
    parse_link,
)
from commopt_diagnose.topology.matrix_lines import GPU, P2P, Row, Table, add_missing_columns, find_tables, split_rows

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\([A-Z0-9]|\[\d{0,3}(?:;\d{1,3})*m|[\x00-\x08\x0b\x0c\x0e-\x1f]")
_NIC_NAME = re.compile(r"(?:^|[\s>:#])(NIC\d{1,4})\s*[:=]\s*([A-Za-z][\w.\-]{0,60})(?=\s*$|\s+NIC\d{1,4}\s*[:=])")
# Lines of nvidia-smi -L and of reports ("GPU 0,1: MODEL"), and of nvidia-smi's table of GPUs.
_GPU_NAME = re.compile(r"\bGPU\s+(\d{1,4}(?:\s*[,-]\s*\d{1,4}){0,63}):\s*([^():|]{2,80}?)\s*(?:\(UUID.*)?$")
_GPU_ROW = re.compile(r"\|\s+(\d{1,4})\s+((?:NVIDIA|Tesla|Quadro|GeForce)\b[^|]{0,60}?)\s+(?:On|Off|N/A)?\s*\|")
_LEGEND_PIX = re.compile(r"\W*PIX\s*=")
_LEGEND_NVLINK = re.compile(r"\W*NV#?\s*=")
_NIC_LEGEND = re.compile(r"\W*NIC Legend")
_COMMAND = re.compile(r"topo\s+(-mp\b|-m\b|--matrix|-p2p\s+\w+)")
# One of the two adapters of DGX Spark and other machines with a GB10, which is named after PCI address 0002:01:00.
_GB10_NIC = re.compile(r"\broceP2p1s0f\d")
_NO_NIC = re.compile(r"GPU\d+$|\?")
_AMD = re.compile(r"ROCm|rocm-smi|amd-smi|\bXGMI\b|LINK TYPE TABLE|Link Type between|DRM devices|link_type")
_MARKDOWN = str.maketrans("|*`", "   ")
_MAX_CHARACTERS = 4000  # the rest of a longer line is ignored
_MAX_SHOWN = 100  # characters of a text without a topology, which often has an error of nvidia-smi instead


def read_smi_text(text: str, source: str) -> Machine:
    """Reads the first matrix of ``nvidia-smi topo -m`` or ``-mp`` in a text, and the first of ``topo -p2p``.

    If there is none, it reads AMD's tables, where the text has any.

    Raises:
        TopologyError: there is no topology in the text.
    """
    lines = [_ESCAPES.sub("", line[:_MAX_CHARACTERS]) for line in re.split(r"\r\n|\r|\n", text)]
    plain = [line.translate(_MARKDOWN) for line in lines]
    tables = find_tables(plain)
    if not any(table.is_topology for table in tables):
        tables = find_tables([row for line in plain for row in split_rows(line)])
    topologies = [table for table in tables if table.is_topology]
    about_p2p = [table for table in tables if P2P & set(table.cells)]
    if not topologies and not about_p2p:
        if _AMD.search(text):
            return read_amd_tables(text, plain, source)
        first = next((line.strip() for line in lines if line.strip()), "")
        raise TopologyError(
            f"{source}: no matrix of nvidia-smi topo -m, and no XML of NCCL_TOPO_DUMP_FILE; it begins with"
            f" {shorten(first, _MAX_SHOWN)!r}"
        )
    table = (topologies or about_p2p)[0]
    without_column = add_missing_columns(table)
    _drop_cut_word(table, text.rsplit(None, 1)[-1])
    labels = table.labels or _labels_of_rows(list(table.rows.values()))
    links, conflicts = _links_of(table, labels)
    names = {match[1]: match[2] for line in lines for match in _NIC_NAME.finditer(line)}
    gpus = tuple(_gpus_of(table, labels, lines))
    if not gpus:
        raise TopologyError(f"{source}: the matrix has no GPU")
    is_without = _is_without_nvlink(lines, table.line) and all(link.kind != "NV" for link in links.values())
    return Machine(
        source=source,
        gpus=gpus,
        nics=tuple(Nic(label=label, name=names.get(label, label)) for label in labels if not _NO_NIC.match(label)),
        links=links,
        p2p=_read_p2p(tables, lines),
        without_nvlink="the output of nvidia-smi topo -mp" if is_without else "",
        notices=(*_notices(table, labels, conflicts, len(topologies)), *_about_columns(without_column)),
    )


def _about_columns(labels: Sequence[str]) -> Iterator[str]:
    if labels:
        yield f"no column for {', '.join(labels)} in the head: their links are read from their rows"


def _drop_cut_word(table: Table, last_word: str) -> None:
    """Drops the last word if the text ends within the matrix: it may be cut, as NV1 is of NV18."""
    *above, last = table.rows.values()
    words = [*last.cells, *last.tail]
    num_words = len(above[-1].cells + above[-1].tail) if above else len(table.labels + table.headings)
    if words[-1:] == [last_word] and len(words) < num_words and GPU.fullmatch(last.label):
        num_cells = min(len(last.cells), len(words) - 1)
        table.rows[last.label] = last._replace(cells=words[:num_cells], tail=words[num_cells:-1])


def _is_without_nvlink(lines: Sequence[str], begin: int) -> bool:
    """Returns whether a matrix is from ``topo -mp``, by its command or by a complete legend without NVLink."""
    if any(_LEGEND_NVLINK.match(line) for line in lines):
        return False
    if (command := _command_above(lines, begin)) is not None:
        return command == "-mp"
    end = next((index for index, line in enumerate(lines) if _LEGEND_PIX.match(line)), len(lines))
    return any(map(_NIC_LEGEND.match, lines[end:]))


def _command_above(lines: Sequence[str], begin: int) -> str | None:
    """Returns the last option of ``nvidia-smi topo`` above a matrix; None if there is none."""
    options = [command[1] for line in lines[:begin] for command in _COMMAND.finditer(line)]
    return options[-1] if options else None


def _read_p2p(tables: Sequence[Table], lines: Sequence[str]) -> dict[frozenset[str], str]:
    """Returns the driver's status of direct copies, from the first matrix about reads or writes of memory."""
    for table in tables:
        option = (_command_above(lines, table.line) or "").rpartition(" ")[2]
        if table.is_topology or not P2P & set(table.cells) or option in ("n", "a", "p"):
            continue  # it has links, or is about NVLink, atomics, or PCIe alone
        return {
            # Without the command the matrix may be about NVLink, so NS says nothing about copies.
            frozenset((row.label, label)): "U" if cell == "NS" and not option else cell
            for row in table.rows.values()
            for label, cell in zip(table.labels or _labels_of_rows(list(table.rows.values())), row.cells, strict=False)
            if cell in P2P and label != row.label
        }
    return {}


def _notices(table: Table, labels: Sequence[str], conflicts: Sequence[str], num_tables: int) -> Iterator[str]:
    if not table.labels:
        yield "the head of the matrix is missing: the columns are named after the rows"
    if missing := [label for label in labels if GPU.fullmatch(label) and label not in table.rows]:
        yield f"no row for {', '.join(missing)}: their links are read from the other rows"
    if conflicts:
        yield f"two rows disagree on {', '.join(conflicts)}: the slower link is taken"
    if not table.is_topology:
        yield "only a matrix of topo -p2p: what lies between GPUs is unknown"
    if num_tables > 1:
        yield f"the text has {num_tables} matrices: only the first is shown"


def _labels_of_rows(rows: Sequence[Row]) -> list[str]:
    """Names columns after the rows that have their X there; a column without a row is "?" and its number."""
    own = {row.cells.index("X"): row.label for row in rows if "X" in row.cells}
    labels = [own.get(index, f"?{index}") for index in range(max((len(row.cells) for row in rows), default=0))]
    return list(dict.fromkeys(labels))


def _links_of(table: Table, labels: Sequence[str]) -> tuple[dict[frozenset[str], Link], list[str]]:
    """Returns the links, and the pairs on which two rows disagree."""
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
            known = links.setdefault(pair, link)
            if known != link:
                conflicts.append(f"{label} and {row.label}")
                links[pair] = max(link, known, key=lambda choice: (choice.distance, -choice.num_nvlinks))
    return links, conflicts


def _aligned(row: Row, own: int, num_columns: int) -> list[str]:
    """Returns a cell for each column, "" for unknown ones. If cells are missing, the X shows where others belong."""
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
    names = {int(match[1]): match[2].strip() for line in lines if (match := _GPU_ROW.search(line))}
    for line in lines:
        if match := _GPU_NAME.search(line):
            names |= dict.fromkeys(parse_cpus(re.sub(r"\s", "", match[1])), match[2].strip())
    gpu_labels = list(filter(GPU.fullmatch, labels))
    if len(gpu_labels) == 1 and not names and any(map(_GB10_NIC.search, lines)):
        names = {int(gpu_labels[0][3:]): "NVIDIA GB10"}
    for label in gpu_labels:
        cpus, node, own_node = _affinity(table, table.rows.get(label), len(labels))
        name = names.get(int(label[3:]))
        # With Grace, a GPU's memory has NUMA nodes too. They follow the first one, which is its CPU's, also where the
        # column of the GPU's own node is N/A.
        is_coherent = own_node.isdecimal() or "," in node or has_coherent_memory(name)
        node = node.partition(",")[0] if is_coherent else node
        numa_node = int(node) if node.isdecimal() and len(node) < 5 else None
        yield Gpu(label=label, name=name, cpus=parse_cpus(cpus), numa_node=numa_node, is_coherent=is_coherent)


def _affinity(table: Table, row: Row | None, num_columns: int) -> tuple[str, str, str]:
    """Returns cores, NUMA node and the GPU's own node, which follow the cells of a row; "" if they are missing."""
    if row is None or (len(row.cells) < num_columns and not row.tail):
        return "", "", ""
    has_node = not table.headings or any(heading.startswith("numa") for heading in table.headings)
    words = list(row.tail)
    own_node = words.pop() if "gpu numa id" in table.headings and len(words) > 1 else ""
    if has_node and len(words) == 1 and words[0].isdecimal():
        words.insert(0, "")
    cpus, node = [*words, "", ""][:2]
    return cpus, node if has_node else "", own_node
