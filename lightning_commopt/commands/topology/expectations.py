"""What each kind of link is, and which rates others have measured over it."""

from __future__ import annotations

import re
from typing import NamedTuple

from lightning_commopt.commands.topology.machine import KINDS, Gpu, Link, Machine, Nic

_ON_NCCL = "write-up on NCCL"
_ON_GPT = "write-up on a GPT on A100"
_PUZZLES = "puzzles on peer-to-peer copies"
_LADDER = "write-up on ViT-L/32 on 8x L40S"

MEANINGS = {
    "NV": "NVLink",
    "PIX": "one PCIe switch between them",
    "PXB": "several PCIe switches between them, not the CPU",
    "PHB": "through the CPU's PCIe host bridge",
    "NODE": "through several host bridges of one NUMA node",
    "SYS": "through the link between CPU sockets or NUMA nodes",
}


class NVLinkModel(NamedTuple):
    """What a GPU has when all its NVLinks are up.

    Attributes:
        num_links: of a GPU.
        bytes_per_s: of a link, one way.
    """

    num_links: int
    bytes_per_s: float


# By the driver's names. H100 and A100 on PCIe are left out: what they have depends on their bridges.
_NVLINK_MODELS = (
    (re.compile(r"\bP100-SXM"), NVLinkModel(4, 20e9)),
    (re.compile(r"\bV100-SXM"), NVLinkModel(6, 25e9)),
    (re.compile(r"\bA100-SXM"), NVLinkModel(12, 25e9)),
    (re.compile(r"\bA800-SXM"), NVLinkModel(8, 25e9)),
    (re.compile(r"\b(H100 \d+GB HBM|H100 SXM|H200\b(?! NVL)|H20\b(?! NVL))"), NVLinkModel(18, 25e9)),
    (re.compile(r"\bH800\b(?! (PCIe|NVL))"), NVLinkModel(8, 25e9)),
    (re.compile(r"\b(RTX 3090|RTX A[456]000|A40)\b"), NVLinkModel(4, 14e9)),
    (re.compile(r"\bB(100|200|300)\b"), NVLinkModel(18, 50e9)),
)


class Expectation(NamedTuple):
    """What others have measured over such a link; never measured here.

    Attributes:
        text: the figures.
        source: who published them.
        bytes_per_s: one of them as a number, one way; None where there is none for this link.
    """

    text: str
    source: str
    bytes_per_s: float | None = None


def nvlink_model(name: str | None) -> NVLinkModel | None:
    """Returns what a model of GPU has; None for those that have no fixed number."""
    return next((model for pattern, model in _NVLINK_MODELS if name is not None and pattern.search(name)), None)


def meaning(link: Link, *, is_switched: bool = False) -> str:
    """Says what a link is.

    Args:
        link: between two devices.
        is_switched: NVLinks of this machine end at switches.
    """
    if link.kind != "NV":
        return MEANINGS[link.kind]
    number = f"{link.num_nvlinks} NVLink{'s' if link.num_nvlinks > 1 else ''}"
    return f"{number} through NVSwitch" if is_switched else number


def expect_between_gpus(link: Link, gpu: Gpu | None = None) -> Expectation:
    """Returns what to expect of a copy or an all-reduce between two GPUs.

    Args:
        link: between them.
        gpu: one of them, whose model may be known.
    """
    if link.kind == "NV":
        model = nvlink_model(gpu.name if gpu else None) or NVLinkModel(0, 25e9)
        rate = link.num_nvlinks * model.bytes_per_s
        text = f"{rate / 1e9:.0f} GB/s one way by the data sheet"
        if model.bytes_per_s == 25e9:
            text += " (25 a link on V100, A100, H100); copies reached 93 of 100 over 4 links, 47 of 50 over 2"
        return Expectation(text, f"{_ON_NCCL}; {_PUZZLES}", rate)
    if link.kind in ("PIX", "PXB"):
        return Expectation("18.5 GB/s bus bandwidth of all_reduce_perf, 2 GPUs, A100 on PCIe", _ON_GPT, 18.5e9)
    if link.kind in ("PHB", "NODE"):
        return Expectation("13.5 GB/s bus bandwidth of all_reduce_perf, 2 GPUs, A100 on PCIe", _ON_GPT, 13.5e9)
    return Expectation(
        "less than the 13.5 GB/s across a host bridge; 8 L40S over NODE and SYS took 587 ms for 1.22 GB, through host"
        " memory, which is 3.6 GB/s bus bandwidth",
        f"{_ON_GPT}; {_LADDER}",
    )


def expect_to_nic(link: Link, nic: Nic | None = None) -> Expectation:
    """Returns what to expect between a GPU and an adapter."""
    if link.distance > KINDS.index("PXB"):
        return Expectation("no GPUDirect RDMA by default: data goes through host memory", _ON_NCCL)
    effective = {25e9: 23e9, 50e9: 47e9}
    rate = effective.get(nic.bytes_per_s) if nic and nic.bytes_per_s else None
    figures = f"{rate / 1e9:.0f} GB/s" if rate else "23 GB/s with HDR, 47 with NDR"
    return Expectation(f"{figures}, with GPUDirect RDMA; RoCE 80 to 90 % of that", _ON_NCCL, rate)


def expect_all_reduce(machine: Machine) -> Expectation | None:
    """Returns what to expect of an all-reduce over all GPUs; None where nobody has published it for such a machine."""
    links = [machine.link(*pair) for pair in machine.gpu_pairs()]
    if len(machine.gpus) == 8 and links and all(link == Link("NV", 18) for link in links):
        return Expectation(
            "all-reduce over 8 H100, bus GB/s: 5.8 at 64 KB, 78.5 at 1 MB, 198 at 16 MB, 238 at 256 MB, 241 at 1 GB",
            _ON_NCCL,
            241e9,
        )
    return None


def is_switched(machine: Machine) -> bool:
    """Returns whether NVLinks end at switches: a GPU has more of them to its peers than any model has."""
    most = 0
    for gpu in machine.gpus:
        links = [machine.link(gpu.label, other.label) for other in machine.gpus if other is not gpu]
        most = max(most, sum(link.num_nvlinks for link in links if link is not None))
    return most > 18


_MAX_STEPS = 20_000


class Ring(NamedTuple):
    """An order of all GPUs.

    Attributes:
        labels: the last is a neighbour of the first.
        worst: the slowest kind of link between neighbours.
        num_worst: how many neighbours it lies between.
    """

    labels: tuple[str, ...]
    worst: str
    num_worst: int


def find_ring(machine: Machine) -> Ring | None:
    """Finds a ring whose slowest link is as fast as can be, with as few of the slowest as a simple search finds.

    Returns:
        None with less than two GPUs, or where links are not known.
    """
    labels = [gpu.label for gpu in machine.gpus]
    if len(labels) < 2:
        return None
    for distance, kind in enumerate(KINDS):
        peers = _peers(machine, labels, distance)
        if any(not others for others in peers.values()):
            continue
        better = _peers(machine, labels, distance - 1)
        # With peers over faster links first, the search stays among them as long as it can.
        found = _search(labels, {each: list(dict.fromkeys((*better[each], *peers[each]))) for each in labels})
        if found is not None:
            pairs = set(map(frozenset, zip(found, (*found[1:], found[0]), strict=True)))
            links = [machine.links[pair] for pair in pairs]
            return Ring(found, kind, sum(link.kind == kind for link in links))
    return None


def _peers(machine: Machine, labels: list[str], distance: int) -> dict[str, list[str]]:
    return {
        one: [
            other
            for other in labels
            if other != one and (link := machine.link(one, other)) is not None and link.distance <= distance
        ]
        for one in labels
    }


def _search(labels: list[str], peers: dict[str, list[str]]) -> tuple[str, ...] | None:
    """Searches for a closed way over all labels, depth first; gives up after so many steps."""
    way = [labels[0]]
    choices = [iter(peers[labels[0]])]
    for _ in range(_MAX_STEPS):
        if not choices:
            return None
        if len(way) == len(labels) and (len(way) == 2 or labels[0] in peers[way[-1]]):
            return tuple(way)
        step = next((each for each in choices[-1] if each not in way), None)
        if step is None:
            way.pop()
            choices.pop()
        else:
            way.append(step)
            choices.append(iter(peers[step]))
    return None
