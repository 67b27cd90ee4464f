"""InfiniBand and RoCE adapters, GPUDirect RDMA and SHARP, as far as the files of a host show them.

``ibstat`` and ``perfquery`` read the same files.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_ERROR_COUNTERS = (
    *("port_rcv_errors", "port_rcv_remote_physical_errors", "port_xmit_discards", "excessive_buffer_overrun_errors"),
    *("link_error_recovery", "link_downed"),
)
_SHARP_FOLDERS = (
    "opt/mellanox/sharp/lib",
    "opt/hpcx/nccl_rdma_sharp_plugin/lib",
    "usr/lib",
    "usr/lib/x86_64-linux-gnu",
)
_DMA_BUF_KERNEL = (5, 12)


@dataclass(frozen=True, kw_only=True)
class Port:
    """A port of an InfiniBand or RoCE adapter.

    Attributes:
        name: adapter and port, such as "mlx5_0:1".
        state: such as "ACTIVE".
        rate: such as "200 Gb/sec (4X HDR)".
        errors: error counters that are above 0.
    """

    name: str
    state: str
    rate: str
    errors: dict[str, int]


def read_ports(folder: Path) -> list[Port]:
    """Returns the ports of all adapters below ``/sys/class/infiniband``."""
    ports = []
    for path in sorted(folder.glob("*/ports/*")):
        counts = {name: _count(path / "counters" / name) for name in _ERROR_COUNTERS}
        ports.append(
            Port(
                name=f"{path.parents[1].name}:{path.name}",
                state=read_text(path / "state").rpartition(": ")[2],
                rate=read_text(path / "rate"),
                errors={name: count for name, count in counts.items() if count > 0},
            )
        )
    return ports


def has_peer_memory(root: Path) -> bool:
    """Returns whether the kernel module for GPUDirect RDMA is loaded."""
    names = ("nvidia_peermem", "nv_peer_mem")
    return any(line.split(" ", 1)[0] in names for line in read_text(root / "proc/modules").splitlines())


def can_dma_buf(root: Path, kernel: str = platform.release()) -> bool:
    """Returns whether GPUDirect RDMA works without that module: a new kernel, and NVIDIA's open kernel modules."""
    version = tuple(map(int, re.findall(r"\d+", kernel)[:2]))
    return version >= _DMA_BUF_KERNEL and "Open Kernel Module" in read_text(root / "proc/driver/nvidia/version")


def has_sharp_plugin(root: Path, environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether NCCL would find a network plugin, which SHARP needs."""
    folders = [Path(folder) for folder in environment.get("LD_LIBRARY_PATH", "").split(":") if folder]
    folders += [root / folder for folder in _SHARP_FOLDERS]
    return any(list(folder.glob("libnccl-net*.so*")) for folder in folders)


def read_text(path: Path) -> str:
    """Returns the text of a file; "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _count(path: Path) -> int:
    text = read_text(path)
    return int(text) if text.isdecimal() else 0
