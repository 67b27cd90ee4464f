"""Finds what costs time in a topology, with advice."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from commopt_diagnose.findings import FindingTexts, worst_first
from commopt_diagnose.topology.expectations import find_ring, is_switched, nvlink_model
from commopt_diagnose.topology.machine import KINDS, Link, Machine, cpus_text
from lightning_commopt.text.findings import Finding
from lightning_commopt.text.formatting import count, list_some

_MAX_SHOWN = 8
_MAX_BRIDGED = 4  # NVLinks of models that are joined by bridges, which most machines do not have
_MAX_SOCKETS = 2  # of most machines with GPUs; with more NUMA nodes than that, a socket mostly has several
_RDMA = re.compile(r"(NIC\d|mlx|bnxt_re|irdma|hfi|efa|rdma|roce|ib|erdma|hns|qedr|mana)", re.IGNORECASE)
_finding = FindingTexts(Path(__file__).with_name("findings.txt")).finding


def find_all(machine: Machine) -> list[Finding]:
    """Returns all findings, the worst first."""
    finders = (_find_nvlinks, _find_ring, _find_p2p, _find_nics, _find_pcie_width, _find_pinning)
    return worst_first(finding for find in finders for finding in find(machine))


def _find_nvlinks(machine: Machine) -> Iterator[Finding]:
    """Finds GPUs with fewer NVLinks than others, or than their model has."""
    if machine.without_nvlink:
        yield _finding("note", "no_nvlink_column", source=machine.without_nvlink)
    links = {pair: machine.link(*pair) for pair in machine.gpu_pairs()}
    num_links = {pair: link.num_nvlinks for pair, link in links.items() if link is not None and link.kind != "XGMI"}
    of_model = max((model.num_links for gpu in machine.gpus if (model := nvlink_model(gpu.name))), default=0)
    if any(num_links.values()) and is_switched(machine):
        yield from _find_degraded(machine, num_links, of_model)
    elif any(num_links.values()) and None not in links.values():
        yield from _find_unequal(machine, num_links, of_model)
    elif num_links and None not in links.values() and of_model > _MAX_BRIDGED and not machine.without_nvlink:
        yield _finding("slow", "no_nvlinks", of_model=of_model, confidence="possible")


def _find_degraded(machine: Machine, num_links: dict[tuple[str, str], int], of_model: int) -> Iterator[Finding]:
    """Finds GPUs behind NVSwitch, or else pairs of them, with fewer NVLinks than the full number."""
    full = max(of_model, *num_links.values())
    of_gpu = {
        gpu.label: max((number for pair, number in num_links.items() if gpu.label in pair), default=full)
        for gpu in machine.gpus
    }
    fewer = {label: number for label, number in of_gpu.items() if number < full}
    of_pair = {pair: number for pair, number in num_links.items() if number < full and not fewer.keys() & set(pair)}
    fewer |= {" and ".join(pair): number for pair, number in of_pair.items()}
    if fewer:
        shown = list_some([f"{label} {number}" for label, number in fewer.items()], _MAX_SHOWN)
        whose = "others have" if full in num_links.values() else "this model has"
        yield _finding("error", "degraded_nvlink", shown=shown, whose=whose, full=full)


def _find_unequal(machine: Machine, num_links: dict[tuple[str, str], int], of_model: int) -> Iterator[Finding]:
    """Finds what may be a broken link between directly connected GPUs, which may also differ by design."""
    totals = {gpu.label: sum(n for pair, n in num_links.items() if gpu.label in pair) for gpu in machine.gpus}
    most = max(totals.values())
    if len(set(totals.values())) > 1:
        shown = ", ".join(f"{label} {number}" for label, number in totals.items())
        yield _finding("note", "unequal_nvlinks", shown=shown)
    elif most < of_model:
        yield _finding("note", "few_nvlinks", most=most, of_model=of_model)


def _find_ring(machine: Machine) -> Iterator[Finding]:
    """Finds that every ring crosses the link between sockets, or leaves NVLink somewhere."""
    ring, at_best = find_ring(machine), find_ring(machine, is_optimistic=True)
    if machine.without_nvlink or ring is None or at_best is None or at_best.worst != ring.worst:
        return  # there may be a better ring over a link that is unknown
    ring = at_best  # unknown links are no reason to cross slow ones more often
    island = _largest_island(machine)
    numbers = ",".join(sorted((label.removeprefix("GPU") for label in island), key=int))
    texts: dict[str, Any] = {"num_gpus": len(machine.gpus), "worst": ring.worst, "numbers": numbers}
    texts["order"] = " ".join(label.removeprefix("GPU") for label in ring.labels)
    texts["times"] = count(ring.num_worst, "time")
    if ring.worst == "SYS":
        nodes = {gpu.label: gpu.numa_node for gpu in machine.gpus}
        hidden = "; SYS is also within a NUMA node: a virtual machine or the BIOS may hide the PCIe switches"
        unknown = "; whether it is the link between sockets is unknown: no GPU has cores or a NUMA node here, as in WSL"
        smaller = f"; for small models {len(island)} GPUs without it: CUDA_VISIBLE_DEVICES={numbers}"
        parted = "; with several NUMA nodes on a socket (NPS, SNC), it may stay within one"
        several = parted if len(set(nodes.values()) - {None}) > _MAX_SOCKETS else ""
        far = [pair for pair in machine.gpu_pairs() if machine.link(*pair) == Link("SYS")]
        is_hidden = any(nodes[one] == nodes[other] is not None for one, other in far)
        texts["hidden"] = hidden if is_hidden else several
        texts["sockets"] = ", the link between sockets"
        if not any(gpu.cpus or gpu.numa_node is not None for gpu in machine.gpus):
            texts["hidden"], texts["sockets"] = unknown, ""
        yield _finding("slow", "ring_over_sockets", **texts, smaller=smaller if len(island) > 1 else "")
    elif ring.worst != "NV" and any(link.kind == "NV" for link in machine.links.values()):
        yield _finding("slow", "ring_leaves_nvlink", **texts)


def _largest_island(machine: Machine) -> list[str]:
    """Returns the largest group of GPUs that NVLink connects, or without NVLink any link but SYS."""
    limit = KINDS.index("XGMI" if any(link.num_nvlinks for link in machine.links.values()) else "NODE")
    islands: list[set[str]] = []
    for gpu in machine.gpus:
        peers = {other for other, link in machine.links_of(gpu.label).items() if link.distance <= limit}
        near = [island for island in islands if island & peers]
        islands = [island for island in islands if island not in near] + [{gpu.label}.union(*near)]
    return max(map(list, islands), key=len)


def _find_p2p(machine: Machine) -> Iterator[Finding]:
    """Finds pairs of GPUs between which the driver refuses direct copies, by its status."""
    for status in ("GNS", "CNS", "TNS", "NS", "DR"):
        pairs = ["-".join(pair) for pair in machine.gpu_pairs() if machine.p2p.get(frozenset(pair)) == status]
        if pairs:
            finding = _finding("slow", f"no_p2p_{status}", pairs=list_some(pairs, _MAX_SHOWN), status=status)
            yield replace(finding, code="no_p2p")


def _find_nics(machine: Machine) -> Iterator[Finding]:
    """Finds adapters that are too few, too far, or without GPUDirect RDMA."""
    nics = [nic for nic in machine.nics if _RDMA.match(nic.name)]
    if not nics:
        return
    if len(nics) < len(machine.gpus):
        yield _finding("slow", "fewer_nics", nics=count(len(nics), "NIC"), num_gpus=len(machine.gpus))
    without = [gpu.label for gpu in machine.gpus if gpu.can_gdr is False]
    without += [nic.name for nic in nics if nic.can_gdr is False]
    if without:
        own = "; Omni-Path (hfi1) takes it from its own driver, if that is built with GPUDirect"
        omni_path = own if any(name.startswith("hfi") for name in without) else ""
        yield _finding("slow", "no_gdr", devices=list_some(without, _MAX_SHOWN), omni_path=omni_path)
    far: dict[str, list[str]] = {}
    for gpu in machine.gpus:
        link, nearest = machine.nearest_nics(gpu.label)
        # With Grace, RDMA goes through the CPU's memory at full rate. RCCL has other limits than NCCL.
        is_judged = not gpu.is_coherent and not (gpu.name or "").startswith(("AMD", "Hygon"))
        has_gdr = gpu.can_gdr is not False and any(nic.can_gdr is not False for nic in nearest)
        if link is not None and link.distance > KINDS.index("PXB") and is_judged and has_gdr:
            far.setdefault(link.kind, []).append(gpu.label)
    for kind, labels in far.items():
        yield _finding("slow", "far_nic", kind=kind, gpus=list_some(labels, _MAX_SHOWN))


def _find_pcie_width(machine: Machine) -> Iterator[Finding]:
    widths = {gpu.label: gpu.pcie_width for gpu in machine.gpus if gpu.pcie_width}
    narrow = {label: width for label, width in widths.items() if width < max(widths.values())}
    if narrow:
        shown = ", ".join(f"{label} x{width}" for label, width in narrow.items())
        yield _finding("slow", "narrow_pcie", shown=shown, most=max(widths.values()))


def _find_pinning(machine: Machine) -> Iterator[Finding]:
    """Finds processes that may only use cores that are far from their GPU."""
    gpus = {gpu.label: gpu for gpu in machine.gpus}
    for label, pid, cpus in machine.processes:
        gpu = gpus.get(label)
        if gpu is None or not gpu.cpus or not cpus or cpus & gpu.cpus:
            continue
        number, own, near = gpu.numa_node, cpus_text(cpus), cpus_text(gpu.cpus)
        node = "" if number is None else f" (NUMA node {number})"
        bind = "" if number is None else f"numactl --cpunodebind={number} --membind={number}, "
        yield _finding("slow", "wrong_numa_node", pid=pid, label=label, own=own, near=near, node=node, bind=bind)
