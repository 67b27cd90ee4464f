"""The GPUs and NICs of a machine, and the links between them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

from lightning_commopt.text.formatting import runs_of

KINDS = ("NV", "XGMI", "PIX", "PXB", "PHB", "NODE", "SYS")
"""What lies between two devices, the fastest first, as ``nvidia-smi topo`` calls it; XGMI joins AMD's GPUs."""

UNKNOWN = "?"
"""How unknown links and NUMA nodes are printed."""

_FORMER = {"PSB": "PIX", "SOC": "SYS"}
_COHERENT = re.compile(r"\bG[HB](10|[123]00)\b")
_WORD = re.compile(r"NV(?P<num_nvlinks>[1-9]\d{0,2})|PIX|PXB|PHB|NODE|SYS|PSB|SOC")


class TopologyError(ValueError):
    """The input is not a topology, or this machine has none to read; the message is one line."""


class Link(NamedTuple):
    """What lies between two devices: one of `KINDS`, and the number of parallel NVLinks or xGMI links, 0 on PCIe."""

    kind: str
    num_nvlinks: int = 0

    @property
    def distance(self) -> int:
        """Its place in `KINDS`."""
        return KINDS.index(self.kind)

    def __str__(self) -> str:
        return f"NV{self.num_nvlinks}" if self.kind == "NV" else self.kind


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU. What is None or empty is unknown."""

    label: str  # its label in the matrix, such as ``GPU0``
    name: str | None = None  # the vendor's name of the model
    bus_id: str | None = None  # such as ``0000:07:00.0``
    numa_node: int | None = None  # the NUMA node that it is on
    cpus: frozenset[int] = frozenset()  # the cores near it
    pcie_width: int | None = None  # lanes in use
    compute_capability: int | None = None  # such as 90 for Hopper
    can_gdr: bool | None = None  # whether it supports GPUDirect RDMA
    is_coherent: bool = False  # whether NVLink-C2C joins it with its CPU, as on Grace


@dataclass(frozen=True, kw_only=True)
class Nic:
    """A network adapter. What is None is unknown."""

    label: str  # its label in the matrix, such as ``NIC0`` or ``mlx5_0``
    name: str  # such as ``mlx5_0``
    numa_node: int | None = None  # the NUMA node that it is on
    bytes_per_s: float | None = None  # nominal rate in one direction
    can_gdr: bool | None = None  # whether NCCL found GPUDirect RDMA for it


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine's topology."""

    source: str  # the tool or file that it was read from, in words
    gpus: tuple[Gpu, ...]
    nics: tuple[Nic, ...] = ()
    # The link between two devices, by their labels in either order. Unknown links are missing.
    links: Mapping[frozenset[str], Link] = field(default_factory=dict)
    # The driver's status of direct copies between two GPUs: ``OK``, a reason such as ``GNS``, or ``U`` for unknown.
    p2p: Mapping[frozenset[str], str] = field(default_factory=dict)
    without_nvlink: str = ""  # the kind of the source if it leaves NVLinks out; empty if it has them
    # The label of a GPU, the id of a process that uses it, and the cores that the process may use.
    processes: tuple[tuple[str, int, frozenset[int]], ...] = ()
    notices: tuple[str, ...] = ()  # notes on what was unclear in the source

    def link(self, one: str, other: str) -> Link | None:
        """Returns what lies between two labels; None if unknown."""
        return self.links.get(frozenset((one, other)))

    def links_of(self, label: str) -> dict[str, Link]:
        """Returns what lies between a device and each other one, as far as it is known."""
        others = [*(gpu.label for gpu in self.gpus), *(nic.label for nic in self.nics)]
        return {other: link for other in others if (link := self.link(label, other)) is not None}

    def gpu_pairs(self) -> list[tuple[str, str]]:
        return list(combinations([gpu.label for gpu in self.gpus], 2))

    def nearest_nics(self, gpu: str) -> tuple[Link | None, list[Nic]]:
        """Returns the link from a GPU to its nearest adapters, and these; nothing if an unknown one may be nearer."""
        links = {nic: self.link(gpu, nic.label) for nic in self.nics}
        nearest = min((link for link in links.values() if link), key=lambda link: link.distance, default=None)
        if nearest is None or (nearest.kind != "PIX" and None in links.values()):
            return None, []
        return nearest, [nic for nic, link in links.items() if link == nearest]


def parse_link(word: str) -> Link | None:
    """Reads a cell of the matrix; None if it is not a link.

    >>> parse_link("NV12"), parse_link("SOC"), parse_link("N/A")
    (Link(kind='NV', num_nvlinks=12), Link(kind='SYS', num_nvlinks=0), None)
    """
    if (match := _WORD.fullmatch(word)) is None:
        return None
    return Link("NV", int(match["num_nvlinks"])) if match["num_nvlinks"] else Link(_FORMER.get(word, word))


def has_coherent_memory(name: str | None) -> bool:
    """Returns whether NVLink-C2C joins a model of GPU with its CPU, as on Grace and DGX Spark (GB10)."""
    return _COHERENT.search(name or "") is not None


def parse_cpus(text: str) -> frozenset[int]:
    """Reads a list of cores as Linux writes it; empty for anything else.

    >>> sorted(parse_cpus("0-2,8"))
    [0, 1, 2, 8]
    """
    is_list = re.fullmatch(r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*", text)
    ranges = [part.partition("-") for part in text.split(",")] if is_list else []
    return frozenset(cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1))


def cpus_text(cpus: Iterable[int]) -> str:
    """Writes cores as Linux does.

    >>> cpus_text([0, 1, 2, 8])
    '0-2,8'
    """
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs_of(cpus))
