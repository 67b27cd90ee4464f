"""A topology in a few words, and as JSON has it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, NamedTuple

from lightning_commopt.commands.topology.expectations import (
    Expectation,
    Ring,
    expect_all_reduce,
    expect_between_gpus,
    expect_to_nic,
    find_ring,
    is_switched,
    meaning,
)
from lightning_commopt.commands.topology.machine import UNKNOWN, Gpu, Link, Machine, cpus_text
from lightning_commopt.text.findings import Finding


class Pair(NamedTuple):
    """Two devices by their labels, what lies between them, and what others have measured over such a link, if any."""

    one: str
    other: str
    link: Link
    meaning: str
    expectation: Expectation | None


def gpu_pairs(machine: Machine) -> list[Pair]:
    """Returns each two GPUs whose link is known."""
    gpus = {gpu.label: gpu for gpu in machine.gpus}
    switched = is_switched(machine)
    found = []
    for one, other in machine.gpu_pairs():
        if (link := machine.link(one, other)) is not None:
            expected = expect_between_gpus(link, gpus[one], machine.p2p.get(frozenset((one, other))))
            text = meaning(link, is_switched=switched)
            found.append(Pair(one, other, link, text, None if machine.without_nvlink else expected))
    return found


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
    found: dict[tuple[Link, Expectation | None], list[Pair]] = {}
    for pair in sorted(pairs, key=lambda pair: (pair.link.distance, -pair.link.num_nvlinks)):
        found.setdefault((pair.link, pair.expectation), []).append(pair)
    return list(found.values())


def by_place(machine: Machine) -> list[tuple[str, str, list[Gpu]]]:
    """Returns GPUs by their NUMA node, or by their cores where the source has no nodes: both as text, and the GPUs."""
    found: dict[int | frozenset[int], list[Gpu]] = {}
    for gpu in machine.gpus:
        found.setdefault(gpu.cpus if gpu.numa_node is None else gpu.numa_node, []).append(gpu)
    places = []
    for gpus in found.values():
        node = UNKNOWN if gpus[0].numa_node is None else gpus[0].numa_node
        places.append((f"NUMA node {node}", cpus_text(set[int]().union(*(gpu.cpus for gpu in gpus))), gpus))
    return places


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
    nearest = {"nearest_nics": [nic.label for nic in nics], "nearest_nic_link": None if link is None else str(link)}
    return {**asdict(gpu), "cpus": cpus_text(gpu.cpus), **nearest}


def _plain(value: Ring | Expectation | None) -> dict[str, Any] | None:
    return None if value is None else value._asdict()
