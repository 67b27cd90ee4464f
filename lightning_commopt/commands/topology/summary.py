"""A topology in a few words, and as JSON has it."""

from __future__ import annotations

from typing import Any, NamedTuple

from lightning_commopt.commands.topology.expectations import (
    Expectation,
    expect_all_reduce,
    expect_between_gpus,
    expect_to_nic,
    find_ring,
    is_switched,
    meaning,
)
from lightning_commopt.commands.topology.machine import Gpu, Link, Machine, Nic, cpus_text
from lightning_commopt.text.findings import Finding


class Pair(NamedTuple):
    """Two devices and what lies between them.

    Attributes:
        one: label.
        other: label.
        link: between them.
        meaning: what that is.
        expectation: what others have measured over such a link.
    """

    one: str
    other: str
    link: Link
    meaning: str
    expectation: Expectation


def gpu_pairs(machine: Machine) -> list[Pair]:
    """Returns each two GPUs whose link is known."""
    gpus = {gpu.label: gpu for gpu in machine.gpus}
    switched = is_switched(machine)
    return [
        Pair(one, other, link, meaning(link, is_switched=switched), expect_between_gpus(link, gpus[one]))
        for one, other in machine.gpu_pairs()
        if (link := machine.link(one, other)) is not None
    ]


def nic_pairs(machine: Machine) -> list[Pair]:
    """Returns each GPU with each adapter, as far as their link is known."""
    return [
        Pair(gpu.label, nic.label, link, meaning(link), expect_to_nic(link, nic))
        for gpu in machine.gpus
        for nic in machine.nics
        if (link := machine.link(gpu.label, nic.label)) is not None
    ]


def by_link(pairs: list[Pair]) -> dict[Link, list[Pair]]:
    """Returns pairs by their link, the fastest first."""
    found: dict[Link, list[Pair]] = {}
    for pair in sorted(pairs, key=lambda pair: (pair.link.distance, -pair.link.num_nvlinks)):
        found.setdefault(pair.link, []).append(pair)
    return found


def by_node(machine: Machine) -> dict[int | None, list[Gpu]]:
    """Returns GPUs by their NUMA node; None stands for an unknown one."""
    found: dict[int | None, list[Gpu]] = {}
    for gpu in machine.gpus:
        found.setdefault(gpu.numa_node, []).append(gpu)
    return found


def to_plain(machine: Machine, findings: list[Finding]) -> dict[str, Any]:
    """Returns everything as JSON has it."""
    ring = find_ring(machine)
    all_reduce = expect_all_reduce(machine)
    return {
        "source": machine.source,
        "notices": list(machine.notices),
        "gpus": [_plain_gpu(machine, gpu) for gpu in machine.gpus],
        "nics": [_plain_nic(nic) for nic in machine.nics],
        "pairs": [_plain_pair(pair) for pair in [*gpu_pairs(machine), *nic_pairs(machine)]],
        "ring": None if ring is None else ring._asdict(),
        "all_reduce": None if all_reduce is None else all_reduce._asdict(),
        "findings": [finding.to_plain() for finding in findings],
    }


def _plain_gpu(machine: Machine, gpu: Gpu) -> dict[str, Any]:
    link, nics = machine.nearest_nics(gpu.label)
    return {
        "label": gpu.label,
        "name": gpu.name,
        "bus_id": gpu.bus_id,
        "numa_node": gpu.numa_node,
        "cpus": cpus_text(gpu.cpus),
        "pcie_width": gpu.pcie_width,
        "nearest_nics": [nic.label for nic in nics],
        "nearest_nic_link": None if link is None else str(link),
    }


def _plain_nic(nic: Nic) -> dict[str, Any]:
    return {"label": nic.label, "name": nic.name, "numa_node": nic.numa_node, "bytes_per_s": nic.bytes_per_s}


def _plain_pair(pair: Pair) -> dict[str, Any]:
    return {
        "one": pair.one,
        "other": pair.other,
        "link": str(pair.link),
        "meaning": pair.meaning,
        "expectation": pair.expectation._asdict(),
    }
