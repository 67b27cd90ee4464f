"""Prints a topology, or writes it as a page or JSON: links, what to expect of them, and what is slow."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from commopt_diagnose.findings import print_findings
from commopt_diagnose.topology.expectations import (
    Expectation,
    Ring,
    expect_all_reduce,
    expect_between_gpus,
    expect_to_nic,
    find_ring,
    is_switched,
    meaning,
)
from commopt_diagnose.topology.machine import KINDS, UNKNOWN, Gpu, Link, Machine, cpus_text
from lightning_commopt.text.findings import Finding
from lightning_commopt.text.formatting import count, grouped
from lightning_commopt.text.terminal import TextTable, print_text

_COLORS = dict(zip(KINDS, ("green", "green", "cyan", "cyan", "yellow", "yellow", "red"), strict=True))
_MAX_PAIRS = 6


class Pair(NamedTuple):
    """The labels of two devices, the link between them, and what others have published for such a link, if any."""

    one: str
    other: str
    link: Link
    meaning: str
    expectation: Expectation | None


def gpu_pairs(machine: Machine) -> list[Pair]:
    """Returns all pairs of GPUs whose link is known."""
    gpus = {gpu.label: gpu for gpu in machine.gpus}
    switched = is_switched(machine)
    pairs = []
    for label, other in machine.gpu_pairs():
        if link := machine.link(label, other):
            expected = expect_between_gpus(link, gpus[label], machine.p2p.get(frozenset((label, other))))
            text = meaning(link, is_switched=switched)
            pairs.append(Pair(label, other, link, text, None if machine.without_nvlink else expected))
    return pairs


def nic_pairs(machine: Machine) -> list[Pair]:
    """Returns each GPU with each adapter, as far as their link is known."""
    return [
        Pair(gpu.label, nic.label, link, meaning(link), None if gpu.is_coherent else expect_to_nic(link, nic))
        for gpu in machine.gpus
        for nic in machine.nics
        if (link := machine.link(gpu.label, nic.label)) is not None
    ]


def by_link(pairs: list[Pair]) -> list[list[Pair]]:
    """Returns pairs with the same link and the same expectation together, the fastest first."""
    in_order = sorted(pairs, key=lambda pair: (pair.link.distance, -pair.link.num_nvlinks))
    return list(grouped(((pair.link, pair.expectation), pair) for pair in in_order).values())


def by_place(machine: Machine) -> list[tuple[str, str, list[Gpu]]]:
    """Returns node and cores as text with their GPUs, by NUMA node, or by cores if the source has no nodes."""
    places = grouped((gpu.cpus if gpu.numa_node is None else gpu.numa_node, gpu) for gpu in machine.gpus)
    names = [UNKNOWN if gpus[0].numa_node is None else str(gpus[0].numa_node) for gpus in places.values()]
    cores = [cpus_text(cpu for gpu in gpus for cpu in gpu.cpus) for gpus in places.values()]
    return [(f"NUMA node {name}", text, gpus) for name, text, gpus in zip(names, cores, places.values(), strict=True)]


def to_plain(machine: Machine, findings: list[Finding]) -> dict[str, Any]:
    """Returns everything as JSON has it."""
    return {
        "source": machine.source,
        "notices": list(machine.notices),
        "gpus": [_plain_gpu(machine, gpu) for gpu in machine.gpus],
        "nics": [asdict(nic) for nic in machine.nics],
        "pairs": [
            {**pair._asdict(), "link": str(pair.link), "expectation": _plain(pair.expectation)}
            for pair in [*gpu_pairs(machine), *nic_pairs(machine)]
        ],
        "ring": _plain(find_ring(machine)),
        "all_reduce": _plain(expect_all_reduce(machine)),
        "findings": [finding.to_plain() for finding in findings],
    }


def _plain_gpu(machine: Machine, gpu: Gpu) -> dict[str, Any]:
    link, nics = machine.nearest_nics(gpu.label)
    nearest = {"nearest_nics": [nic.label for nic in nics], "nearest_nic_link": link and str(link)}
    return {**asdict(gpu), "cpus": cpus_text(gpu.cpus), **nearest}


def _plain(value: Ring | Expectation | None) -> dict[str, Any] | None:
    return value and value._asdict()


def print_topology(machine: Machine, findings: list[Finding], console: Console) -> None:
    """Prints devices, links, the ring and findings."""
    devices = [*machine.gpus, *machine.nics]
    names = dict.fromkeys(gpu.name for gpu in machine.gpus if gpu.name is not None)
    kind = f" ({', '.join(names)})" if names else ""
    num_devices = f"{count(len(machine.gpus), 'GPU')}{kind}, {count(len(machine.nics), 'NIC')}"
    print_text(f"{machine.source}: {num_devices}", console, "bold")
    for notice in machine.notices:
        print_text(f"note: {notice}", console, "yellow")
    console.print()
    _print_matrix(machine, {gpu.label: gpu.label for gpu in machine.gpus}, console)
    # NICs get a matrix of their own, with numbers as heads, because their names are long.
    if machine.nics:
        console.print()
        headings = {f"NIC{index}": nic for index, nic in enumerate(machine.nics)}
        _print_matrix(machine, {heading: nic.label for heading, nic in headings.items()}, console)
        rates = {nic: f" ({nic.bytes_per_s * 8 / 1e9:.0f} Gbit/s)" if nic.bytes_per_s else "" for nic in machine.nics}
        columns_text = [f"{heading} {nic.name}{rates[nic]}" for heading, nic in headings.items()]
        print_text(", ".join(columns_text), console, "dim")
    console.print()
    for place, cores, gpus in by_place(machine):
        of_gpus = ", ".join(_gpu_text(machine, gpu) for gpu in gpus)
        print_text(f"{place}: {of_gpus}{f'; cores {cores}' if cores else ''}", console)
    _print_links("between GPUs", gpu_pairs(machine), console)
    nearest = [pair for pair in nic_pairs(machine) if pair.link == machine.nearest_nics(pair.one)[0]]
    _print_links("between GPU and NIC", nearest, console)
    ring = find_ring(machine)
    if ring is not None and not machine.without_nvlink:
        worst = ring.worst.replace("NV", "NVLink").replace("XGMI", "xGMI")
        order = " ".join(label.removeprefix("GPU") for label in ring.labels)
        print_text(f"ring: {order}, slowest link {worst}", console)
    if (all_reduce := expect_all_reduce(machine)) is not None:
        print_text(f"expect: {all_reduce.text} [{all_reduce.source}]", console, "dim")
    console.print()
    if not findings:
        is_complete = all(len(machine.links_of(gpu.label)) == len(devices) - 1 for gpu in machine.gpus)
        limit = "" if is_complete else f"; unknown links ({UNKNOWN}) were not judged"
        print_text(f"nothing is slow or broken, as far as the topology shows{limit}", console, "green")
    print_findings(findings, console)


def _print_matrix(machine: Machine, columns: dict[str, str], console: Console) -> None:
    """Prints the link from each GPU to devices, which are given as their labels by heading."""
    rows = {gpu.label: [_word(machine, gpu.label, other) for other in columns.values()] for gpu in machine.gpus}
    width = max(5, *(len(text) + 1 for text in (*rows, *columns)))
    if console.is_terminal and width * (1 + len(columns)) > console.width:
        table = TextTable("", *columns, has_rules=False)
        for label, words in rows.items():
            table.add_row(label, *words)
        console.print(table)
        return
    head = [Text(heading, "bold") for heading in ("", *columns)]
    for words in (head, *([Text(label, "bold"), *words] for label, words in rows.items())):
        line = Text.assemble(*(Text(word.plain.ljust(width), word.style) for word in words))
        line.rstrip()
        print_text(line, console)


def _word(machine: Machine, first: str, other: str) -> Text:
    link = machine.link(first, other)
    return Text(str(link), _COLORS[link.kind]) if link else Text("x" if first == other else UNKNOWN, "dim")


def _gpu_text(machine: Machine, gpu: Gpu) -> str:
    link, nics = machine.nearest_nics(gpu.label)
    near = ", ".join(nic.name for nic in nics[:2]) + (" ..." if len(nics) > 2 else "")
    return gpu.label if link is None or link.distance > KINDS.index("PXB") else f"{gpu.label} near {near}"


def _print_links(title: str, pairs: list[Pair], console: Console) -> None:
    for equal_pairs in by_link(pairs):
        shown = ", ".join(f"{pair.one}-{pair.other}" for pair in equal_pairs)
        shown = shown if len(equal_pairs) <= _MAX_PAIRS else f"{len(equal_pairs)} pairs"
        _, _, link, meaning, expectation = equal_pairs[0]
        print_text(Text.assemble((f"{link}", _COLORS[link.kind]), f" {title}: {meaning} ({shown})"), console)
        if expectation is not None:
            print_text(f"  expect: {expectation.text} [{expectation.source}]", console, "dim")


def write_page(machine: Machine, findings: list[Finding], path: Path) -> None:
    """Writes one HTML file; an OSError if that fails."""
    from lightning_commopt.report.page import render

    groups = [("between GPUs", by_link(gpu_pairs(machine))), ("between GPU and NIC", by_link(nic_pairs(machine)))]
    page = render(
        "topology.html",
        package="commopt_diagnose",
        machine=machine,
        findings=findings,
        names=list(dict.fromkeys(gpu.name for gpu in machine.gpus if gpu.name is not None)),
        places=by_place(machine),
        columns=[*(gpu.label for gpu in machine.gpus), *(nic.label for nic in machine.nics)],
        nic_names={nic.label: nic.name for nic in machine.nics},
        rows=[(title, pairs[0], pairs) for title, group in groups for pairs in group],
        ring=find_ring(machine),
        all_reduce=expect_all_reduce(machine),
        unknown=UNKNOWN,
        cpus_text=cpus_text,
    )
    path.write_text(page, encoding="utf-8", errors="backslashreplace")
