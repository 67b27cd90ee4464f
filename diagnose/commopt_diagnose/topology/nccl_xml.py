"""Reads topologies in NCCL's XML: what ``NCCL_TOPO_DUMP_FILE`` writes, and what clouds give for ``NCCL_TOPO_FILE``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations
from operator import itemgetter
from typing import NamedTuple
from xml.etree.ElementTree import Element, ParseError, fromstring

from commopt_diagnose.topology.machine import Gpu, Link, Machine, Nic, TopologyError
from lightning_commopt.text.formatting import grouped, list_some

_DOCUMENT = re.compile(r"<system\b(?:[^<>]*/>|.*?</system>)", re.DOTALL)
_SWITCH_CLASS = "0x0680"
_HYGON = "0x1d94"  # PCI's number of this vendor, whose DCUs RCCL describes as it does AMD's GPUs
_CLASSES = {"GPU": ("0x0300", "0x0302", "0x0380", "0x1200"), "NIC": ("0x02",)}
_VIRTUAL = re.compile(r"veth|br-|docker|virbr|cni|cali|flannel|lxc|cilium|tap|tun|vnet|kube|podman|weave|vxlan|ovs|lo$")
_MAX_LINKS = 999


class _Device(NamedTuple):
    """An element, and the CPU and PCI devices that contain it, the outermost first."""

    element: Element
    above: tuple[Element, ...]

    @property
    def pci(self) -> Element:
        """The PCI device that it is."""
        return self.above[-1]

    @property
    def can_gdr(self) -> bool | None:
        return {"0": False, "1": True}.get(self.element.get("gdr", ""))


def read_nccl_xml(text: str, source: str) -> Machine:
    """Reads a host in a text with ``<system ...>`` to ``</system>`` somewhere; ``source`` names it.

    With NVLink between hosts, NCCL writes all hosts of a domain. Then it is the first with the GPU of fewest NVLinks.

    Raises:
        TopologyError: it is cut off, or damaged, or has no GPU.
    """
    devices, notices = _read_devices(text, source)
    links = [device.element for device in devices if device.element.tag in ("nvlink", "xgmi")]
    if any(_integer(link.get("count")) is None for link in links):
        raise TopologyError(f"{source}: a link of a GPU has no count: this is not as NCCL writes it")
    gpus = _find_gpus(devices)
    nics = _find_nets(devices, notices)
    targets = {label: Counter(_targets(device)) for label, device in gpus.items()}
    to_itself = any(target == gpus[label].pci.get("busid") for label in gpus for _, target in targets[label])
    without_nvlink = "a file whose NVLinks lead to the GPU itself" if to_itself else ""
    if not gpus:
        pci = sorted((d for d in devices if d.element.tag == "pci"), key=lambda device: device.pci.get("busid", ""))
        of_class = [(k, [d for d in pci if d.pci.get("class", "").startswith(codes)]) for k, codes in _CLASSES.items()]
        gpus, nics = ({f"{kind}{index}": device for index, device in enumerate(own)} for kind, own in of_class)
        without_nvlink = "a file for NCCL_TOPO_FILE"
        notices.append("GPUs are numbered by their bus ids")
    if not gpus:
        raise TopologyError(f"{source}: the XML has no GPU (no <gpu>, no PCI class 0x0302): NCCL_TOPO_FILE needs none")
    return Machine(
        source=source,
        gpus=tuple(_gpu(label, device) for label, device in gpus.items()),
        nics=tuple(_nic(label, device) for label, device in nics.items()),
        links=_links_of({**gpus, **nics}, targets, notices),
        without_nvlink=without_nvlink,
        notices=tuple(notices),
    )


def _read_devices(text: str, source: str) -> tuple[list[_Device], list[str]]:
    documents = _DOCUMENT.findall(text) if "</system>" in text else []
    if not documents:
        lacking = "</system>" if "<system" in text else "<system>"
        raise TopologyError(f"{source}: the XML of NCCL's topology is cut off: it has no {lacking}")
    try:
        cpus = fromstring(documents[0]).findall("cpu")
    except (ParseError, ValueError) as error:
        raise TopologyError(f"{source}: the XML of NCCL's topology is damaged: {error}") from None
    hosts = list(grouped((cpu.get("host_hash"), cpu) for cpu in cpus).values())
    place = min(range(len(hosts)), key=lambda index: _fewest_nvlinks(hosts[index]), default=0)
    which = f"number {place + 1} is shown, where a GPU has the fewest NVLinks" if place else "the first is shown"
    counts = {"systems": (len(documents), "the first is shown"), "hosts": (len(hosts), which)}
    notices = [f"the file has {num} {kind}: only {text}" for kind, (num, text) in counts.items() if num > 1]
    return [device for cpu in (hosts[place] if hosts else ()) for device in _walk(cpu)], notices


def _fewest_nvlinks(cpus: Sequence[Element]) -> int:
    """Returns the number of NVLinks of the GPU of a host that has the fewest, as a fault on one host slows all."""
    gpus = [gpu for cpu in cpus for gpu in cpu.iter("gpu")]
    return min(
        (sum(_integer(link.get("count")) or 0 for link in gpu.iter("nvlink")) for gpu in gpus), default=_MAX_LINKS
    )


def _walk(cpu: Element) -> Iterator[_Device]:
    """Yields everything below a CPU, without recursion, as damaged files may be nested without end."""
    stack = [_Device(child, (cpu,)) for child in reversed(cpu)]
    while stack:
        element, above = stack.pop()
        within = (*above, element) if element.tag == "pci" else above
        yield _Device(element, within)
        stack += [_Device(child, within) for child in reversed(element)]


def _find_gpus(devices: list[_Device]) -> dict[str, _Device]:
    """Returns each ``<gpu>``, numbered as CUDA does, if that is unambiguous."""
    gpus = [device for device in devices if device.element.tag == "gpu"]
    numbers = [number for device in gpus if (number := _integer(device.element.get("dev"))) is not None]
    if len(set(numbers)) < len(gpus):
        numbers = list(range(len(gpus)))
    return {f"GPU{number}": device for number, device in sorted(zip(numbers, gpus, strict=True), key=itemgetter(0))}


def _find_nets(devices: list[_Device], notices: list[str]) -> dict[str, _Device]:
    """Returns each ``<net>`` once, without interfaces of containers, and without adapters that merge others."""
    nets: dict[tuple[str, ...], _Device] = {}
    for device in devices:
        if device.element.tag == "net":
            nets.setdefault(tuple(device.element.get(key, "") for key in ("name", "port", "guid")), device)
    names = {name for name, *_ in nets}
    by_name: dict[str, _Device] = {}
    for (name, *_), device in nets.items():
        is_merged = "+" in name and set(name.split("+")) <= names
        if not _VIRTUAL.match(name) and not is_merged:
            by_name[f"{name or 'NIC'}:{len(by_name)}" if name in ("", *by_name) else name] = device
    if num_virtual := sum(_VIRTUAL.match(name) is not None for name, *_ in nets):
        notices.append(f"virtual network interfaces are left out: {num_virtual}")
    return by_name


def _gpu(label: str, device: _Device) -> Gpu:
    cpu, architecture = device.above[0], device.element.get("gcn")
    of_amd = "Hygon DCU" if device.pci.get("vendor") == _HYGON else f"AMD gfx{(architecture or '').removeprefix('gfx')}"
    return Gpu(
        label=label,
        name=of_amd if architecture else None,
        bus_id=device.pci.get("busid"),
        numa_node=_integer(cpu.get("numaid")),
        cpus=_cpus_of_mask(cpu.get("affinity", "")),
        pcie_width=_integer(device.pci.get("link_width")),
        compute_capability=_integer(device.element.get("sm")),
        can_gdr=device.can_gdr,
        is_coherent=device.element.find("c2c") is not None,
    )


def _nic(label: str, device: _Device) -> Nic:
    mbits_per_s = _integer(device.element.get("speed"))
    return Nic(
        label=label,
        name=device.element.get("name") or device.pci.get("busid") or label,
        numa_node=_integer(device.above[0].get("numaid")),
        bytes_per_s=mbits_per_s * 1e6 / 8 if mbits_per_s else None,
        can_gdr=device.can_gdr,
    )


def _links_of(
    devices: dict[str, _Device], targets: dict[str, Counter[tuple[str, str]]], notices: list[str]
) -> dict[frozenset[str], Link]:
    buses = {label: device.pci.get("busid") or label for label, device in devices.items()}
    links: dict[frozenset[str], Link] = {}
    one_way = []
    for (label, first), (other, second) in combinations(devices.items(), 2):
        link = _pcie_link(first.above, second.above)
        if label in targets and other in targets:
            switched = min(targets[label]["NV", ""], targets[other]["NV", ""])
            for kind in ("NV", "XGMI"):
                forward, backward = targets[label][kind, buses[other]], targets[other][kind, buses[label]]
                if forward or backward:
                    link = Link(kind, min(forward, backward) or max(forward, backward))
                if (forward > 0) != (backward > 0):
                    one_way.append(f"{label} to {other}" if forward else f"{other} to {label}")
            link = Link("NV", switched) if switched and not link.num_nvlinks else link
        links[frozenset((label, other))] = link
    coherent = [label for label in targets if devices[label].element.find("c2c") is not None]
    for description, shown in (
        ("links are listed in one direction only", one_way),
        ("NVLink-C2C joins CPU and GPU", coherent),
    ):
        notices += [f"{description}: {list_some(shown, 8)}"] if shown else []
    return links


def _targets(device: _Device) -> Iterator[tuple[str, str]]:
    """Yields the kind and the target's bus id of each link of a GPU; the bus id of a switch is empty."""
    for tag, kind in (("nvlink", "NV"), ("xgmi", "XGMI")):
        for link in device.element.iter(tag):
            target = "" if link.get("tclass", "").startswith(_SWITCH_CLASS) else link.get("target", "-")
            yield from [(kind, target)] * min(_integer(link.get("count")) or 0, _MAX_LINKS)


def _pcie_link(first_above: tuple[Element, ...], second_above: tuple[Element, ...]) -> Link:
    """Returns what lies between two devices, by the CPU, the switches above them, and themselves."""
    first_above, second_above = (above[:-1] if len(above) > 1 else above for above in (first_above, second_above))
    num_shared = sum(1 for first, second in zip(first_above, second_above, strict=False) if first is second)
    if num_shared < 2:
        return Link("PHB" if num_shared else "SYS")
    return Link("PIX" if num_shared == len(first_above) == len(second_above) else "PXB")


def _cpus_of_mask(text: str) -> frozenset[int]:
    """Reads a mask of cores, in groups of 32 bits, the highest first."""
    if not re.fullmatch(r"[0-9a-fA-F]{1,8}(,[0-9a-fA-F]{1,8}){0,99}", text):
        return frozenset()
    masks = [int(group, 16) for group in reversed(text.split(","))]
    return frozenset(32 * index + bit for index, mask in enumerate(masks) for bit in range(32) if mask >> bit & 1)


def _integer(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdecimal() and len(text) < 10 else None
