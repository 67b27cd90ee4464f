"""What in a topology costs time, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_commopt.commands.topology.expectations import Ring, find_ring, is_switched, nvlink_model
from lightning_commopt.commands.topology.machine import KINDS, Machine, cpus_text
from lightning_commopt.text.findings import Finding, worst_first
from lightning_commopt.text.formatting import count, list_some

_MAX_SHOWN = 8


def find_all(machine: Machine) -> list[Finding]:
    """Returns what hurts, the worst first."""
    found = [
        *_find_nvlinks(machine),
        *_find_ring(machine, find_ring(machine)),
        *_find_nics(machine),
        *_find_pcie_width(machine),
        *_find_pinning(machine),
    ]
    return worst_first(found)


def _find_nvlinks(machine: Machine) -> Iterator[Finding]:
    """Finds GPUs with fewer NVLinks than others, or than their model has."""
    if not machine.has_nvlink_column:
        yield Finding(
            code="no_nvlink_column",
            severity="note",
            what="this is the output of nvidia-smi topo -mp, which leaves NVLink out",
            why="GPUs that NVLink connects look as if only PCIe did",
            advice="nvidia-smi topo -m shows both",
        )
    links = {pair: machine.link(*pair) for pair in machine.gpu_pairs()}
    num_links = {pair: link.num_nvlinks for pair, link in links.items() if link is not None}
    of_model = max((model.num_links for gpu in machine.gpus if (model := nvlink_model(gpu.name))), default=0)
    if any(num_links.values()):
        find = _find_degraded if is_switched(machine) else _find_unequal
        yield from find(machine, num_links, of_model)


def _find_degraded(machine: Machine, num_links: dict[tuple[str, str], int], of_model: int) -> Iterator[Finding]:
    """Finds GPUs behind NVSwitch, or else pairs of them, with less than the full number."""
    full = max(of_model, *num_links.values())
    of_gpu = {
        gpu.label: max((number for pair, number in num_links.items() if gpu.label in pair), default=full)
        for gpu in machine.gpus
    }
    fewer = {label: number for label, number in of_gpu.items() if number < full}
    fewer |= {
        " and ".join(pair): number
        for pair, number in num_links.items()
        if number < full and not fewer.keys() & set(pair)
    }
    if not fewer:
        return
    shown = list_some([f"{label} {number}" for label, number in fewer.items()], _MAX_SHOWN)
    whose = "others have" if full in num_links.values() else "this model has"
    yield Finding(
        code="degraded_nvlink",
        severity="error",
        what=f"NVLinks are missing: {shown}, where {whose} {full}",
        why="every collective runs at the rate of the slowest GPU",
        advice="nvidia-smi nvlink --status and dmesg (Xid 74); restart nvidia-fabricmanager, then the machine; if they"
        " stay away, the GPU or its board is for repair",
    )


def _find_unequal(machine: Machine, num_links: dict[tuple[str, str], int], of_model: int) -> Iterator[Finding]:
    """Finds what may be a broken link between GPUs that are connected directly, where numbers differ by design."""
    totals = {gpu.label: sum(n for pair, n in num_links.items() if gpu.label in pair) for gpu in machine.gpus}
    check = "nvidia-smi nvlink --status; compare with another machine of its kind"
    if len(set(totals.values())) > 1:
        yield Finding(
            code="unequal_nvlinks",
            severity="note",
            what=f"GPUs have different numbers of NVLinks: {', '.join(f'{each} {n}' for each, n in totals.items())}",
            why="a link may be down; in a part of a larger machine, as clouds lend it, this is how it should be",
            advice=check,
        )
    elif max(totals.values()) < of_model:
        yield Finding(
            code="few_nvlinks",
            severity="note",
            what=f"each GPU has {max(totals.values())} NVLinks to the others, and its model has {of_model}",
            why="the rest are down, or end at GPUs that are not in the matrix",
            advice=check,
        )


def _find_ring(machine: Machine, ring: Ring | None) -> Iterator[Finding]:
    """Finds that no ring avoids the link between sockets, or leaves NVLink only in part."""
    if ring is None or not machine.has_nvlink_column:
        return
    has_nvlink = any(link.kind == "NV" for pair in machine.gpu_pairs() if (link := machine.link(*pair)) is not None)
    order = " ".join(label.removeprefix("GPU") for label in ring.labels)
    fewer = "send fewer bytes over it: comm_hook=bf16, then powersgd"
    if ring.worst == "SYS":
        nodes = {gpu.numa_node for gpu in machine.gpus}
        why = "all gradients cross it in every step, and often go through host memory (NCCL: via SHM)"
        if len(nodes) == 1 and None not in nodes:
            why += "; the GPUs are on one NUMA node: a virtual machine or the BIOS may hide the PCIe switches"
        within = _largest_island(machine)
        smaller = (
            f"; for small models {len(within)} GPUs without it: CUDA_VISIBLE_DEVICES={_numbers(within)}"
            if len(within) > 1
            else ""
        )
        yield Finding(
            code="ring_over_sockets",
            severity="slow",
            what=f"every ring over all {len(machine.gpus)} GPUs crosses SYS, the link between sockets"
            f" ({count(ring.num_worst, 'time')} in the best one found: {order})",
            why=why,
            advice=fewer + smaller,
        )
    elif has_nvlink and ring.worst != "NV":
        yield Finding(
            code="ring_leaves_nvlink",
            severity="slow",
            what=f"NVLink does not connect all {len(machine.gpus)} GPUs: the best ring ({order}) goes over {ring.worst}"
            f" {count(ring.num_worst, 'time')}",
            why="a ring is as fast as its slowest link",
            advice=f"{fewer}; or only GPUs that NVLink connects:"
            f" CUDA_VISIBLE_DEVICES={_numbers(_largest_island(machine))}",
        )


def _largest_island(machine: Machine) -> list[str]:
    """Returns the most GPUs that links of NVLink connect, or without NVLink such as are no SYS; the first of equals."""
    links = [link for pair in machine.gpu_pairs() if (link := machine.link(*pair)) is not None]
    limit = 0 if any(link.kind == "NV" for link in links) else KINDS.index("NODE")
    islands: list[list[str]] = []
    for gpu in machine.gpus:
        near = [
            island
            for island in islands
            if any((link := machine.link(gpu.label, other)) is not None and link.distance <= limit for other in island)
        ]
        islands = [island for island in islands if island not in near]
        islands.append([*(label for island in near for label in island), gpu.label])
    return max(islands, key=len, default=[])


def _numbers(labels: Sequence[str]) -> str:
    return ",".join(sorted((label.removeprefix("GPU") for label in labels), key=int))


def _find_nics(machine: Machine) -> Iterator[Finding]:
    """Finds adapters that are too few, or too far."""
    nics = [nic for nic in machine.nics if nic.can_rdma]
    if not nics:
        return
    if len(nics) < len(machine.gpus):
        yield Finding(
            code="fewer_nics",
            severity="slow",
            what=f"{count(len(nics), 'NIC')} for {len(machine.gpus)} GPUs",
            why="between hosts, GPUs share a NIC's rate; one host alone does not notice",
            advice="several hosts: comm_hook=hierarchical sends each gradient across once for a host, with inner=bf16"
            " or less",
        )
    far: dict[str, list[str]] = {}
    for gpu in machine.gpus:
        link, _ = machine.nearest_nics(gpu.label)
        if link is not None and link.distance > KINDS.index("PXB"):
            far.setdefault(link.kind, []).append(gpu.label)
    for kind, labels in far.items():
        yield Finding(
            code="far_nic",
            severity="slow",
            what=f"no NIC nearer than {kind} to {list_some(labels, _MAX_SHOWN)}",
            why="beyond PCIe switches (PIX, PXB) NCCL goes without GPUDirect RDMA, through host memory, unless another"
            " GPU forwards (PXN, with NVLink)",
            advice="put NICs behind the GPUs' switches; else measure NCCL_NET_GDR_LEVEL=SYS; commopt nccl-log shows"
            " GDRDMA",
        )


def _find_pcie_width(machine: Machine) -> Iterator[Finding]:
    widths = {gpu.label: gpu.pcie_width for gpu in machine.gpus if gpu.pcie_width}
    narrow = {label: width for label, width in widths.items() if width < max(widths.values())}
    if narrow:
        shown = ", ".join(f"{label} x{width}" for label, width in narrow.items())
        yield Finding(
            code="narrow_pcie",
            severity="slow",
            what=f"fewer PCIe lanes than on other GPUs: {shown}, others x{max(widths.values())}",
            why="copies from the host and all-reduces over PCIe run at the rate of the slowest GPU",
            advice="reseat the card or its riser; check the slot and the BIOS (lspci -vv: LnkSta)",
        )


def _find_pinning(machine: Machine) -> Iterator[Finding]:
    """Finds processes that may only use cores that are far from their GPU."""
    gpus = {gpu.label: gpu for gpu in machine.gpus}
    for label, pid, cpus in machine.processes:
        gpu = gpus.get(label)
        if gpu is None or not gpu.cpus or not cpus or cpus & gpu.cpus:
            continue
        node = f" (NUMA node {gpu.numa_node})" if gpu.numa_node is not None else ""
        bind = f"numactl --cpunodebind={gpu.numa_node} --membind={gpu.numa_node}, " if gpu.numa_node is not None else ""
        yield Finding(
            code="wrong_numa_node",
            severity="slow",
            what=f"process {pid} on {label} may use cores {cpus_text(cpus)} only; near are {cpus_text(gpu.cpus)}{node}",
            why="every copy and every launch of a kernel crosses the link between sockets",
            advice=f"{bind}torchrun --numa-binding=node, or srun --gpu-bind=closest",
        )
