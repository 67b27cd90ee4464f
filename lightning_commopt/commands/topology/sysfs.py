"""What Linux knows of PCI devices, NUMA nodes and RDMA adapters: reads ``/sys`` and ``/proc``."""

from __future__ import annotations

import re
from pathlib import Path

from lightning_commopt.commands.topology.machine import Link, parse_cpus

_ROOT = re.compile(r"pci[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}$")


def pci_path(root: Path, bus_id: str) -> tuple[str, ...]:
    """Returns the bridges above a PCI device and itself, from the outside; empty if it is not there."""
    # NVML writes 00000000:07:00.0, Linux 0000:07:00.0.
    domain, _, rest = bus_id.strip().lower().partition(":")
    return _path_of(root / "sys/bus/pci/devices" / f"{domain[-4:]}:{rest}")


def _path_of(device: Path) -> tuple[str, ...]:
    parts = device.resolve().parts if device.exists() else ()
    begin = next((index for index, part in enumerate(parts) if _ROOT.match(part)), None)
    return () if begin is None else parts[begin:]


def pcie_link(one: tuple[str, ...], other: tuple[str, ...], *, has_one_node: bool) -> Link | None:
    """Returns what lies between two devices, given by `pci_path`, as ``nvidia-smi topo`` would call it.

    >>> above = ("pci0000:00", "0000:00:01.0", "0000:01:00.0")
    >>> first, second = (*above, "0000:02:01.0", "0000:03:00.0"), (*above, "0000:02:02.0", "0000:04:00.0")
    >>> str(pcie_link(first, second, has_one_node=True))
    'PIX'
    """
    if not one or not other:
        return None
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    if shared == 0:
        return Link("NODE" if has_one_node else "SYS")
    if shared == 1:
        return Link("PHB")
    # Behind the switch that they share: a port of it, and the device.
    return Link("PIX" if max(len(one), len(other)) - shared <= 2 else "PXB")


def numa_node(root: Path, path: tuple[str, ...]) -> int | None:
    """Returns the NUMA node of a PCI device; None where Linux does not know."""
    text = read_text(root / "sys/bus/pci/devices" / path[-1] / "numa_node") if path else ""
    return int(text) if text.isdecimal() else None


def cpus_of_node(root: Path, node: int | None) -> frozenset[int]:
    """Returns the cores of a NUMA node."""
    return parse_cpus(read_text(root / f"sys/devices/system/node/node{node}/cpulist"))


def rdma_adapters(root: Path) -> list[tuple[str, tuple[str, ...], float | None]]:
    """Returns name, PCI path and nominal bytes/s of each RDMA adapter."""
    found = []
    for folder in sorted((root / "sys/class/infiniband").glob("*")):
        rates = [read_text(path) for path in sorted(folder.glob("ports/*/rate"))]
        gbits = [float(rate[1]) for text in rates if (rate := re.match(r"(\d{1,5}(?:\.\d)?) Gb/sec", text))]
        found.append((folder.name, _path_of(folder / "device"), max(gbits) * 1e9 / 8 if gbits else None))
    return found


def cpus_of_process(root: Path, pid: int) -> frozenset[int]:
    """Returns the cores that a process on a GPU may use; empty if we cannot see it.

    In a container a number of the driver's may be of another process here: one that has not loaded CUDA.
    """
    if "libcuda" not in read_text(root / f"proc/{pid}/maps"):
        return frozenset()
    status = read_text(root / f"proc/{pid}/status")
    found = re.search(r"^Cpus_allowed_list:\s*(\S+)$", status, re.MULTILINE)
    return parse_cpus(found[1]) if found else frozenset()


def read_text(path: Path) -> str:
    """Returns what a small file says; nothing if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
