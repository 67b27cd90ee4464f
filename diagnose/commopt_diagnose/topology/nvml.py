"""Reads the topology from NVIDIA's management library and from ``/sys``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations, product, takewhile
from pathlib import Path
from typing import Any

from commopt_diagnose.topology.machine import Gpu, Link, Machine, Nic, TopologyError, has_coherent_memory, parse_cpus

_LEVELS = {"INTERNAL": "PIX", "SINGLE": "PIX", "MULTIPLE": "PXB", "HOSTBRIDGE": "PHB", "NODE": "NODE", "SYSTEM": "SYS"}
_MAX_CPUS = 4096  # cores in the mask that the driver is asked for
_ROOT = re.compile(r"pci[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}$")


def read_nvml(root: Path = Path("/")) -> Machine:
    """Asks the driver for GPUs, NVLinks and the processes on GPUs, and Linux for RDMA adapters and cores.

    Raises:
        ImportError: nvidia-ml-py is not installed.
        TopologyError: there is no driver, or no GPU.
    """
    try:
        import pynvml
    except ImportError as error:
        raise ImportError("NVML needs nvidia-ml-py: pip install 'commopt-diagnose[topo]'") from error
    try:
        pynvml.nvmlInit()
        try:
            return _Reader(pynvml, root).machine()
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise TopologyError(f"NVML: {error}") from None


class _Reader:
    def __init__(self, pynvml: Any, root: Path) -> None:
        self._nvml = pynvml
        self._root = root
        self._kinds = {getattr(pynvml, f"NVML_TOPOLOGY_{level}"): kind for level, kind in _LEVELS.items()}

    def machine(self) -> Machine:
        nvml = self._nvml
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        if not handles:
            raise TopologyError("NVML finds no GPU")
        gpus = [self._gpu(index, handle) for index, handle in enumerate(handles)]
        nics = rdma_adapters(self._root)
        links = dict(self._gpu_links(gpus, handles))
        paths = {gpu: pci_path(self._root, gpu.bus_id or "") for gpu in gpus} | nics
        pairs: list[tuple[Gpu | Nic, Nic]] = [*product(gpus, nics), *combinations(nics, 2)]
        for device, other in pairs:
            has_one_node = device.numa_node is not None and device.numa_node == other.numa_node
            link = pcie_link(paths[device], paths[other], has_one_node=has_one_node)
            if link is not None:
                links[frozenset((device.label, other.label))] = link
        processes = tuple(self._processes(gpus, handles))
        return Machine(source="NVML", gpus=tuple(gpus), nics=tuple(nics), links=links, processes=processes)

    def _gpu(self, index: int, handle: Any) -> Gpu:
        nvml = self._nvml
        bus_id = _text(nvml.nvmlDeviceGetPciInfo(handle).busId)
        name, node = _text(nvml.nvmlDeviceGetName(handle)), numa_node(self._root, pci_path(self._root, bus_id))
        words = self._ask("nvmlDeviceGetCpuAffinity", handle, _MAX_CPUS // 64) or []
        cpus = frozenset(64 * place + bit for place, word in enumerate(words) for bit in range(64) if word >> bit & 1)
        return Gpu(
            label=f"GPU{index}",
            name=name,
            bus_id=bus_id,
            numa_node=node,
            cpus=cpus or parse_cpus(read_text(self._root / f"sys/devices/system/node/node{node}/cpulist")),
            pcie_width=self._ask("nvmlDeviceGetCurrPcieLinkWidth", handle),
            is_coherent=has_coherent_memory(name),
        )

    def _gpu_links(self, gpus: list[Gpu], handles: list[Any]) -> Iterator[tuple[frozenset[str], Link]]:
        targets = [self._nvlink_targets(handle) for handle in handles]
        for first, second in combinations(range(len(gpus)), 2):
            pair = frozenset((gpus[first].label, gpus[second].label))
            direct = max(targets[first].get(gpus[second].bus_id, 0), targets[second].get(gpus[first].bus_id, 0))
            num_nvlinks = direct or min(targets[first].get(None, 0), targets[second].get(None, 0))
            level = self._ask("nvmlDeviceGetTopologyCommonAncestor", handles[first], handles[second])
            if num_nvlinks:
                yield pair, Link("NV", num_nvlinks)
            elif level in self._kinds:
                yield pair, Link(self._kinds[level])

    def _nvlink_targets(self, handle: Any) -> dict[str | None, int]:
        """Counts the active NVLinks of a GPU by the bus id that they end at; None stands for switches."""
        nvml = self._nvml
        num_links: dict[str | None, int] = {}
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            if self._ask("nvmlDeviceGetNvLinkState", handle, link) != nvml.NVML_FEATURE_ENABLED:
                continue
            target = None
            if self._ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link) != nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
                remote = self._ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
                target = "" if remote is None else _text(remote.busId)
            num_links[target] = num_links.get(target, 0) + 1
        return num_links

    def _processes(self, gpus: list[Gpu], handles: list[Any]) -> Iterator[tuple[str, int, frozenset[int]]]:
        for gpu, handle in zip(gpus, handles, strict=True):
            for process in self._ask("nvmlDeviceGetComputeRunningProcesses", handle) or []:
                cpus = cpus_of_process(self._root, process.pid)
                if cpus:
                    yield gpu.label, process.pid, cpus

    def _ask(self, function: str, *arguments: Any) -> Any:
        """Calls a function; returns None if this version, driver or device does not have it."""
        try:
            return getattr(self._nvml, function)(*arguments)
        except (AttributeError, self._nvml.NVMLError):
            return None


def _text(value: str | bytes) -> str:
    """Returns a string, which older versions of nvidia-ml-py give as bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def pci_path(root: Path, bus_id: str) -> tuple[str, ...]:
    """Returns the bridges above a PCI device and the device itself, the outermost first; empty if it is missing."""
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
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    if shared == 0:
        return Link("NODE" if has_one_node else "SYS")
    if shared == 1:
        return Link("PHB")
    # Two parts may follow the switch that they share: its port, and the device.
    return Link("PIX" if max(len(one), len(other)) - shared <= 2 else "PXB")


def numa_node(root: Path, path: tuple[str, ...]) -> int | None:
    """Returns the NUMA node of a PCI device; None where Linux does not know."""
    text = read_text(root / "sys/bus/pci/devices" / path[-1] / "numa_node") if path else ""
    return int(text) if text.isdecimal() else None


def rdma_adapters(root: Path) -> dict[Nic, tuple[str, ...]]:
    """Returns the RDMA adapters with their PCI paths."""
    adapters = {}
    for folder in sorted((root / "sys/class/infiniband").glob("*")):
        rates = [read_text(path) for path in sorted(folder.glob("ports/*/rate"))]
        gbits = [float(rate[1]) for text in rates if (rate := re.match(r"(\d{1,5}(?:\.\d)?) Gb/sec", text))]
        path, bytes_per_s = _path_of(folder / "device"), max(gbits) * 1e9 / 8 if gbits else None
        name, node = folder.name, numa_node(root, path)
        adapters[Nic(label=name, name=name, numa_node=node, bytes_per_s=bytes_per_s)] = path
    return adapters


def cpus_of_process(root: Path, pid: int) -> frozenset[int]:
    """Returns the cores that a process on a GPU may use; empty if it is not visible here.

    In a container the driver's process id may belong to another process, so one that has not loaded CUDA is ignored.
    """
    if "libcuda" not in read_text(root / f"proc/{pid}/maps"):
        return frozenset()
    status = read_text(root / f"proc/{pid}/status")
    match = re.search(r"^Cpus_allowed_list:\s*(\S+)$", status, re.MULTILINE)
    return parse_cpus(match[1]) if match else frozenset()


def read_text(path: Path) -> str:
    """Returns the text of a small file; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
