"""Describes each kind of link, with rates that others have measured over it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from commopt_diagnose.topology.machine import KINDS, Gpu, Link, Machine, Nic
from lightning_commopt.text.findings import read_texts
from lightning_commopt.text.formatting import count

_TEXTS = read_texts(Path(__file__).with_name("expectations.txt"))
# GeForce boards, and vGPUs such as A100-40C: NVIDIA's drivers have no P2P over PCIe for them.
_WITHOUT_P2P = re.compile(r"\bRTX [2-5]0[5-9]0|\bTITAN RTX|\w-\d{1,3}[ABCQ]\b")
_NVLINK_BY_CAPABILITY: dict[int | None, float] = {60: 20e9, 86: 14e9, 100: 50e9, 103: 50e9, 107: 50e9}
_MAX_NVLINKS_BEFORE_HOPPER = 12  # of an A100; the links of H100 and newer GPUs have two rates
_MAX_STEPS = 10_000  # bounds the search for a ring
_MAX_GPUS = 512  # with more GPUs no ring is searched for


class NVLinkModel(NamedTuple):
    """The NVLinks of a GPU when all of them are up: their number, and the rate of one in each direction."""

    num_links: int
    bytes_per_s: float


_HOPPER = NVLinkModel(18, 25e9)
_NVLINK_MODELS = [
    (re.compile(pattern), NVLinkModel(int(num_links), float(rate)))
    for num_links, rate, pattern in (text.split(" ", 2) for text in _TEXTS["nvlink_models"].values())
]


class Expectation(NamedTuple):
    """What others have published for a kind of link; nothing is measured here. A rate is for one direction."""

    text: str
    source: str
    bytes_per_s: float | None = None


def nvlink_model(name: str | None) -> NVLinkModel | None:
    """Returns the NVLinks of a model of GPU; None if it has no fixed number."""
    return next((model for pattern, model in _NVLINK_MODELS if name and pattern.search(name)), None)


def meaning(link: Link, *, is_switched: bool = False) -> str:
    """Returns a link in words; ``is_switched`` if the machine's NVLinks end at switches."""
    if link.num_nvlinks == 0:
        return _TEXTS["meanings"][link.kind]
    through = " through NVSwitch" if is_switched and link.kind == "NV" else ""
    return count(link.num_nvlinks, "NVLink" if link.kind == "NV" else "xGMI link") + through


def _expect(code: str) -> Expectation:
    texts = _TEXTS[code]
    return Expectation(texts["text"], texts["source"], float(texts["rate"]) if "rate" in texts else None)


def expect_between_gpus(link: Link, gpu: Gpu | None = None, p2p: str | None = None) -> Expectation | None:
    """Returns what to expect of a copy or an all-reduce between two GPUs; None if nobody has published it.

    ``p2p`` is the driver's status of direct copies between them; None if unknown.
    """
    name = (gpu.name if gpu else None) or ""
    if link.kind == "NV":
        return _expect_of_nvlink(link.num_nvlinks, name, gpu.compute_capability if gpu else None)
    if p2p not in (None, "OK", "U") or (p2p is None and _WITHOUT_P2P.search(name)):
        return _expect("no_p2p")
    if (
        p2p == "U"
        or link.kind == "XGMI"
        or re.search(r"AMD|Hygon|GeForce|GTX|TITAN", name)
        or _WITHOUT_P2P.search(name)
    ):
        return None
    return _expect(link.kind)


def _expect_of_nvlink(number: int, name: str, capability: int | None) -> Expectation:
    model = nvlink_model(name)
    bytes_per_s = model.bytes_per_s if model else _NVLINK_BY_CAPABILITY.get(capability, 25e9)
    is_unknown = model is None and capability is None
    if is_unknown and number > _MAX_NVLINKS_BEFORE_HOPPER:
        text, source, _ = _expect("more_than_12_nvlinks")
        return Expectation(text.format(hopper=number * 25, blackwell=number * 50), source)
    of_models = " (25 a link on V100, A100, H100; 50 on B200, 14 on RTX A6000 and 3090)" if is_unknown else ""
    copies = "; copies reached 93 of 100 over 4 links, 47 of 50 over 2" if bytes_per_s == 25e9 else ""
    rate = number * bytes_per_s
    text, source, _ = _expect("data_sheet")
    return Expectation(text.format(gb_per_s=rate / 1e9, of_models=of_models, copies=copies), source, rate)


def expect_to_nic(link: Link, nic: Nic | None = None) -> Expectation:
    """Returns what to expect between a GPU and an adapter."""
    if nic is not None and nic.can_gdr is False:
        return _expect("nic_without_gdr")
    if link.distance > KINDS.index("PXB"):
        return _expect("far_nic")
    return _expect({25e9: "nic_200g", 50e9: "nic_400g"}.get(nic.bytes_per_s or 0.0, "nic") if nic else "nic")


def expect_all_reduce(machine: Machine) -> Expectation | None:
    """Returns what to expect of an all-reduce over all GPUs; None if nobody has published it for such a machine."""
    links = [machine.link(*pair) for pair in machine.gpu_pairs()]
    is_hopper = all(nvlink_model(gpu.name) in (None, _HOPPER) for gpu in machine.gpus)
    is_published = len(machine.gpus) == 8 and is_hopper and all(link == Link("NV", 18) for link in links)
    if not is_published:
        return None
    expected = _expect("8_h100")
    if all(gpu.name or gpu.compute_capability == 90 for gpu in machine.gpus):
        return expected
    return Expectation(_TEXTS["8_without_names"]["text"].format(text=expected.text), expected.source)


def is_switched(machine: Machine) -> bool:
    """Returns whether NVLinks end at switches: a GPU has more of them to its peers than any model has."""
    links = [machine.links_of(gpu.label).values() for gpu in machine.gpus]
    return any(sum(link.num_nvlinks for link in of_gpu if link.kind == "NV") > 18 for of_gpu in links)


class Ring(NamedTuple):
    """An order of all GPUs in which the last is next to the first, its slowest kind of link, and how many it has."""

    labels: tuple[str, ...]
    worst: str
    num_worst: int


def find_ring(machine: Machine, *, is_optimistic: bool = False) -> Ring | None:
    """Finds a ring whose slowest link is as fast as can be, with as few of the slowest as a simple search finds.

    With ``is_optimistic`` unknown links count as the fastest, otherwise as missing.
    """
    labels = [gpu.label for gpu in machine.gpus]
    unknown = dict.fromkeys(map(frozenset, machine.gpu_pairs()), Link(KINDS[0])) if is_optimistic else {}
    links = {**unknown, **machine.links}

    def near(label: str, limit: int) -> list[str]:
        others = {other: links[pair].distance for other in labels if (pair := frozenset((label, other))) in links}
        # With peers over faster links first, the search stays among them as long as it can.
        return sorted((other for other in others if others[other] <= limit), key=lambda other: others[other] == limit)

    for distance, kind in enumerate(KINDS) if 1 < len(labels) <= _MAX_GPUS else ():
        order = _search((labels[0],), {label: near(label, distance) for label in labels}, itertools.count())
        if order is not None:
            pairs = set(map(frozenset, zip(order, (*order[1:], order[0]), strict=True)))
            return Ring(order, kind, sum(links[pair].kind == kind for pair in pairs))
    return None


def _search(path: tuple[str, ...], peers: dict[str, list[str]], steps: Iterator[int]) -> tuple[str, ...] | None:
    """Searches depth first for a closed way over all labels that begins with ``path``; gives up after `_MAX_STEPS`."""
    if len(path) == len(peers):
        return path if len(path) == 2 or path[0] in peers[path[-1]] else None
    for peer in peers[path[-1]]:
        if peer not in path and next(steps) < _MAX_STEPS and (whole := _search((*path, peer), peers, steps)):
            return whole
    return None
