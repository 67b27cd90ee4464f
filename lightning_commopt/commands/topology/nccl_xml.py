"""Reads the topology that NCCL writes to ``NCCL_TOPO_DUMP_FILE``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple
from xml.etree import ElementTree

from lightning_commopt.commands.topology.machine import Gpu, Link, Machine, Nic, TopologyError

_NVSWITCH = "0x068000"  # PCI class of what a link ends at


class _Place(NamedTuple):
    """Where a device is: CPUs and PCI switches above it, from the outside."""

    label: str
    above: tuple[ElementTree.Element, ...]


@dataclass(kw_only=True)
class _Found:
    gpus: list[Gpu]
    nics: list[Nic]
    places: list[_Place]
    nvlinks: dict[str, dict[str, int]]


def read_nccl_xml(text: str, source: str) -> Machine:
    """Reads the first system in a text.

    Args:
        text: with ``<system ...>`` to ``</system>`` somewhere.
        source: its name, for people.

    Raises:
        TopologyError: it is cut off, or damaged, or has no GPU.
    """
    begin, end = text.find("<system"), text.find("</system>")
    if end < 0:
        raise TopologyError(f"{source}: the XML of NCCL's topology is cut off: it has no </system>")
    try:
        root = ElementTree.fromstring(text[begin : end + len("</system>")])
    except (ElementTree.ParseError, ValueError) as error:
        raise TopologyError(f"{source}: the XML of NCCL's topology is damaged: {error}") from None
    cpus = root.findall("cpu")
    hosts = list(dict.fromkeys(cpu.get("host_hash") for cpu in cpus))
    found = _Found(gpus=[], nics=[], places=[], nvlinks={})
    for cpu in cpus:
        if cpu.get("host_hash") == hosts[0]:
            _collect(cpu, (cpu,), found)
    if not found.gpus:
        raise TopologyError(f"{source}: the XML of NCCL's topology has no GPU")
    return Machine(
        source=source,
        gpus=tuple(sorted(found.gpus, key=lambda gpu: int(gpu.label[3:]))),
        nics=tuple(found.nics),
        links=_links_of(found),
        notices=(f"it has {len(hosts)} hosts: this is the first",) if len(hosts) > 1 else (),
    )


def _collect(element: ElementTree.Element, above: tuple[ElementTree.Element, ...], found: _Found) -> None:
    """Walks down; not by recursion, as damaged files may nest without end."""
    stack = [(child, above) for child in reversed(element)]
    while stack:
        child, above = stack.pop()
        if child.tag == "gpu":
            _add_gpu(child, above, found)
        elif child.tag == "net":
            _add_nic(child, above, found)
        within = (*above, child) if child.tag == "pci" else above
        stack += [(each, within) for each in reversed(child)]


def _add_gpu(element: ElementTree.Element, above: tuple[ElementTree.Element, ...], found: _Found) -> None:
    used = {gpu.label for gpu in found.gpus}
    number = _integer(element.get("dev"))
    if number is None or f"GPU{number}" in used:
        number = next(each for each in range(len(used) + 1) if f"GPU{each}" not in used)
    cpu, device = above[0], above[-1]
    gpu = Gpu(
        label=f"GPU{number}",
        bus_id=device.get("busid"),
        numa_node=_integer(cpu.get("numaid")),
        cpus=_cpus_of_mask(cpu.get("affinity", "")),
        pcie_width=_integer(device.get("link_width")),
    )
    found.gpus.append(gpu)
    found.places.append(_Place(gpu.label, above[:-1]))
    targets = found.nvlinks.setdefault(gpu.label, {})
    for link in element.iter("nvlink"):
        target = _NVSWITCH if link.get("tclass") == _NVSWITCH else link.get("target", "")
        targets[target] = targets.get(target, 0) + min(_integer(link.get("count")) or 0, 999)


def _add_nic(element: ElementTree.Element, above: tuple[ElementTree.Element, ...], found: _Found) -> None:
    used = {nic.label for nic in found.nics}
    name = element.get("name") or f"NIC{len(used)}"
    label = name
    for number in range(2, len(used) + 3):
        if label in used:
            label = f"{name}:{number}"
    mbits_per_s = _integer(element.get("speed"))
    nic = Nic(
        label=label,
        name=name,
        numa_node=_integer(above[0].get("numaid")),
        bytes_per_s=mbits_per_s * 1e6 / 8 if mbits_per_s else None,
    )
    found.nics.append(nic)
    found.places.append(_Place(label, above[:-1] if len(above) > 1 else above))


def _links_of(found: _Found) -> dict[frozenset[str], Link]:
    bus_ids = {gpu.label: gpu.bus_id for gpu in found.gpus}
    links = {}
    for one, other in combinations(found.places, 2):
        num_nvlinks = 0
        if one.label in bus_ids and other.label in bus_ids:
            num_nvlinks = _num_nvlinks(
                found.nvlinks, (one.label, bus_ids[one.label]), (other.label, bus_ids[other.label])
            )
        pair = frozenset((one.label, other.label))
        links[pair] = Link("NV", num_nvlinks) if num_nvlinks else _pcie_link(one.above, other.above)
    return links


def _num_nvlinks(nvlinks: dict[str, dict[str, int]], one: tuple[str, str | None], other: tuple[str, str | None]) -> int:
    """Counts the links of two GPUs, given by label and bus id: direct ones, else as many as both have to switches."""
    there, back = nvlinks[one[0]], nvlinks[other[0]]
    direct = max(there.get(other[1] or "-", 0), back.get(one[1] or "-", 0))
    return direct or min(there.get(_NVSWITCH, 0), back.get(_NVSWITCH, 0))


def _pcie_link(one: tuple[ElementTree.Element, ...], other: tuple[ElementTree.Element, ...]) -> Link:
    """Returns what lies between two devices, by the CPU and the switches above them."""
    num_shared = sum(1 for first, second in zip(one, other, strict=False) if first is second)
    if num_shared == 0:
        return Link("SYS")
    if num_shared == 1:
        return Link("PHB")
    return Link("PIX" if num_shared == len(one) == len(other) else "PXB")


def _cpus_of_mask(text: str) -> frozenset[int]:
    """Reads a mask of cores, in groups of 32 bits, the highest first."""
    groups = text.split(",")[::-1]
    return frozenset(_bits(groups)) if len(groups) < 100 else frozenset()


def _bits(groups: list[str]) -> Iterator[int]:
    for index, group in enumerate(groups):
        try:
            mask = int(group, 16) if len(group) <= 8 else 0
        except ValueError:
            continue
        yield from (32 * index + bit for bit in range(32) if mask >> bit & 1)


def _integer(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdecimal() and len(text) < 10 else None
