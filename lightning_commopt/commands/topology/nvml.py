"""Reads the topology from NVIDIA's management library and from ``/sys``."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

from lightning_commopt.commands.topology import sysfs
from lightning_commopt.commands.topology.machine import Gpu, Link, Machine, Nic, TopologyError

_LEVELS = {"INTERNAL": "PIX", "SINGLE": "PIX", "MULTIPLE": "PXB", "HOSTBRIDGE": "PHB", "NODE": "NODE", "SYSTEM": "SYS"}
_MAX_CPUS = 4096


def read_nvml(root: Path = Path("/")) -> Machine:
    """Asks the driver for GPUs, NVLinks and the processes on GPUs, and Linux for RDMA adapters and cores.

    Args:
        root: of the file system, whose ``sys`` and ``proc`` are read.

    Raises:
        ImportError: nvidia-ml-py is not installed.
        TopologyError: there is no driver, or no GPU.
    """
    try:
        import pynvml
    except ImportError as error:
        raise ImportError("NVML needs nvidia-ml-py: pip install 'lightning-commopt[topo]'") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise TopologyError(f"NVML: {error}") from None
    try:
        return _Reader(pynvml, root).machine()
    except pynvml.NVMLError as error:
        raise TopologyError(f"NVML: {error}") from None
    finally:
        pynvml.nvmlShutdown()


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
        adapters = sysfs.rdma_adapters(self._root)
        nics = [
            Nic(label=name, name=name, numa_node=sysfs.numa_node(self._root, path), bytes_per_s=rate)
            for name, path, rate in adapters
        ]
        links = dict(self._gpu_links(gpus, handles))
        paths = {gpu.label: sysfs.pci_path(self._root, gpu.bus_id or "") for gpu in gpus}
        paths |= {name: path for name, path, _ in adapters}
        for one, other in [(each, nic) for each in gpus for nic in nics] + list(combinations(nics, 2)):
            has_one_node = one.numa_node is not None and one.numa_node == other.numa_node
            link = sysfs.pcie_link(paths[one.label], paths[other.label], has_one_node=has_one_node)
            if link is not None:
                links[frozenset((one.label, other.label))] = link
        return Machine(
            source="NVML",
            gpus=tuple(gpus),
            nics=tuple(nics),
            links=links,
            processes=tuple(self._processes(gpus, handles)),
        )

    def _gpu(self, index: int, handle: Any) -> Gpu:
        nvml = self._nvml
        bus_id = _text(nvml.nvmlDeviceGetPciInfo(handle).busId)
        node = sysfs.numa_node(self._root, sysfs.pci_path(self._root, bus_id))
        words = self._ask("nvmlDeviceGetCpuAffinity", handle, _MAX_CPUS // 64) or []
        cpus = frozenset(64 * place + bit for place, word in enumerate(words) for bit in range(64) if word >> bit & 1)
        return Gpu(
            label=f"GPU{index}",
            name=_text(nvml.nvmlDeviceGetName(handle)),
            bus_id=bus_id,
            numa_node=node,
            cpus=cpus or sysfs.cpus_of_node(self._root, node),
            pcie_width=self._ask("nvmlDeviceGetCurrPcieLinkWidth", handle),
        )

    def _gpu_links(self, gpus: list[Gpu], handles: list[Any]) -> Iterator[tuple[frozenset[str], Link]]:
        targets = [self._nvlink_targets(handle) for handle in handles]
        for one, other in combinations(range(len(gpus)), 2):
            pair = frozenset((gpus[one].label, gpus[other].label))
            direct = max(targets[one].get(gpus[other].bus_id, 0), targets[other].get(gpus[one].bus_id, 0))
            num_nvlinks = direct or min(targets[one].get(None, 0), targets[other].get(None, 0))
            level = self._ask("nvmlDeviceGetTopologyCommonAncestor", handles[one], handles[other])
            if num_nvlinks:
                yield pair, Link("NV", num_nvlinks)
            elif level in self._kinds:
                yield pair, Link(self._kinds[level])

    def _nvlink_targets(self, handle: Any) -> dict[str | None, int]:
        """Counts the active NVLinks of a GPU by the bus id that they end at; None stands for switches."""
        nvml = self._nvml
        found: dict[str | None, int] = {}
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            if self._ask("nvmlDeviceGetNvLinkState", handle, link) != nvml.NVML_FEATURE_ENABLED:
                continue
            kind = self._ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
            target = None
            if kind != nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
                remote = self._ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
                target = "" if remote is None else _text(remote.busId)
            found[target] = found.get(target, 0) + 1
        return found

    def _processes(self, gpus: list[Gpu], handles: list[Any]) -> Iterator[tuple[str, int, frozenset[int]]]:
        for gpu, handle in zip(gpus, handles, strict=True):
            for process in self._ask("nvmlDeviceGetComputeRunningProcesses", handle) or []:
                cpus = sysfs.cpus_of_process(self._root, process.pid)
                if cpus:
                    yield gpu.label, process.pid, cpus

    def _ask(self, function: str, *arguments: Any) -> Any:
        """Calls a function; returns None where this version, driver or device has none."""
        try:
            return getattr(self._nvml, function)(*arguments)
        except (AttributeError, self._nvml.NVMLError):
            return None


def _text(value: str | bytes) -> str:
    """Returns a string, which older versions of nvidia-ml-py give as bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value
