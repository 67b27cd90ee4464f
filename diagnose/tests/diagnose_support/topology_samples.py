"""Machines and what tools print of them; none of them was run: the shapes follow public reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

HEADINGS = {
    "old": ("CPU Affinity",),
    "numa": ("CPU Affinity", "NUMA Affinity"),
    "new": ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID"),
}
LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
"""
NVLINK_LEGEND = "  NV#  = Connection traversing a bonded set of # NVLinks\n"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A machine.

    Attributes:
        num_gpus: of it.
        gpus: the link between two GPUs.
        nics: names of adapters.
        to_nic: the link between a GPU and an adapter, by numbers.
        cpus: near each GPU.
        nodes: NUMA node of each GPU.
        headings: key of `HEADINGS`.
        has_legend_of_nics: adapters are NIC0 and so on in the matrix, and a legend names them.
    """

    num_gpus: int
    gpus: Callable[[int, int], str]
    nics: Sequence[str] = ()
    to_nic: Callable[[int, int], str] = lambda gpu, nic: "SYS"
    cpus: Callable[[int], str] = lambda gpu: "0-63"
    nodes: Callable[[int], int] = lambda gpu: 0
    headings: str = "new"
    has_legend_of_nics: bool = True

    @property
    def labels(self) -> list[str]:
        nics = [f"NIC{index}" for index in range(len(self.nics))] if self.has_legend_of_nics else list(self.nics)
        return [*(f"GPU{index}" for index in range(self.num_gpus)), *nics]

    def cell(self, row: int, column: int) -> str:
        """Returns what the matrix says."""
        low, high = min(row, column), max(row, column)
        if low == high:
            return "X"
        if high < self.num_gpus:
            return self.gpus(low, high)
        if low < self.num_gpus:
            return self.to_nic(low, high - self.num_gpus)
        return "SYS"

    def tail(self, row: int) -> list[str]:
        return [self.cpus(row), str(self.nodes(row)), "N/A"][: len(HEADINGS[self.headings])]

    def tabbed(self) -> str:
        """Returns what the tool prints: with tabs, two of them behind the NUMA node."""
        lines = ["\t" + "\t".join([*self.labels, *HEADINGS[self.headings]])]
        for row, label in enumerate(self.labels):
            cells = [f" {cell} " if cell == "X" else cell for cell in self._cells(row)]
            tail = self.tail(row) if row < self.num_gpus else [""] * len(HEADINGS[self.headings])
            if len(tail) == 3:
                tail.insert(2, "")
            lines.append("\t".join([label, *cells, *tail]))
        return "\n".join(lines) + "\n" + LEGEND + NVLINK_LEGEND + self.legend_of_nics

    def spaced(self) -> str:
        """Returns the same as a terminal shows it."""
        return self.tabbed().expandtabs(8)

    def _cells(self, row: int) -> list[str]:
        return [self.cell(row, column) for column in range(len(self.labels))]

    @property
    def legend_of_nics(self) -> str:
        nics = "".join(f"  NIC{index}: {name}\n" for index, name in enumerate(self.nics))
        return f"\nNIC Legend:\n\n{nics}" if nics and self.has_legend_of_nics else ""


def halves(near: str, far: str, num_gpus: int) -> Callable[[int, int], str]:
    """Returns links of two sockets with half of the GPUs each."""
    return lambda low, high: near if (low < num_gpus // 2) == (high < num_gpus // 2) else far


def switches_of_two(low: int, high: int) -> str:
    return "PIX" if low // 2 == high // 2 else "SYS"


_CUBE = [
    "  1 1 2 2 - - -", "    2 1 - 2 - -", "      2 - - 1 -", "        - - - 1",
    "          1 1 2", "            2 1", "              2",
]  # fmt: skip


def cube(low: int, high: int) -> str:
    """Returns links of eight V100 in a hybrid cube mesh: six NVLinks each, to four others."""
    number = _CUBE[low].split()[high - low - 1]
    return "SYS" if number == "-" else f"NV{number}"


def cpus_of_two_sockets(num_gpus: int) -> Callable[[int], str]:
    return lambda gpu: "0-31,64-95" if gpu < num_gpus // 2 else "32-63,96-127"


SAMPLES = {
    "one": Sample(num_gpus=1, gpus=lambda low, high: ""),
    "workstation": Sample(num_gpus=2, gpus=lambda low, high: "PHB"),
    "bridge": Sample(num_gpus=2, gpus=lambda low, high: "NV4", headings="old"),
    "pcie_4": Sample(
        num_gpus=4,
        gpus=switches_of_two,
        nics=("mlx5_0", "mlx5_1"),
        to_nic=lambda gpu, nic: "PXB" if gpu // 2 == nic else "SYS",
        cpus=cpus_of_two_sockets(4),
        nodes=lambda gpu: gpu // 2,
        headings="numa",
        has_legend_of_nics=False,
    ),
    "cube_8": Sample(
        num_gpus=8,
        gpus=cube,
        nics=("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"),
        to_nic=lambda gpu, nic: "PIX" if gpu // 2 == nic else "PHB" if gpu // 4 == nic // 2 else "SYS",
        cpus=cpus_of_two_sockets(8),
        headings="old",
        has_legend_of_nics=False,
    ),
    "nvswitch_8": Sample(
        num_gpus=8,
        gpus=lambda low, high: "NV18",
        nics=[f"mlx5_{index}" for index in range(8)],
        to_nic=lambda gpu, nic: "PIX" if gpu == nic else "NODE" if gpu // 4 == nic // 4 else "SYS",
        cpus=cpus_of_two_sockets(8),
        nodes=lambda gpu: gpu // 4,
    ),
    "pcie_8": Sample(
        num_gpus=8, gpus=halves("NODE", "SYS", 8), cpus=cpus_of_two_sockets(8), nodes=lambda gpu: gpu // 4
    ),
    "pcie_10": Sample(
        num_gpus=10,
        gpus=lambda low, high: "PIX" if low // 5 == high // 5 else "NODE",
        nics=("mlx5_0",),
        to_nic=lambda gpu, nic: "PXB",
        headings="numa",
    ),
    "nvswitch_16": Sample(
        num_gpus=16,
        gpus=lambda low, high: "NV6",
        nics=[f"mlx5_{index}" for index in range(18)],
        to_nic=lambda gpu, nic: "PIX" if gpu // 2 == nic // 2 else "SYS",
        cpus=cpus_of_two_sockets(16),
        nodes=lambda gpu: gpu // 8,
        headings="numa",
    ),
}

XML = """<system version="1">
  <cpu host_hash="0x1" numaid="0" affinity="00000000,ffffffff" arch="x86_64" vendor="GenuineIntel">
    <pci busid="0000:10:00.0" class="0x060400" link_speed="16.0 GT/s PCIe" link_width="16">
      <pci busid="0000:11:00.0" class="0x030200" vendor="0x10de" link_speed="16.0 GT/s PCIe" link_width="16">
        <gpu dev="0" sm="80" rank="0" gdr="1">
          <nvlink target="0000:91:00.0" count="4" tclass="0x030200"/>
        </gpu>
      </pci>
      <pci busid="0000:12:00.0" class="0x020700" vendor="0x15b3" link_speed="16.0 GT/s PCIe" link_width="16">
        <nic>
          <net name="mlx5_0" dev="0" speed="200000" port="1" guid="0x1" maxconn="131072" gdr="1"/>
        </nic>
      </pci>
    </pci>
    <pci busid="0000:21:00.0" class="0x030200" vendor="0x10de" link_speed="16.0 GT/s PCIe" link_width="8">
      <gpu dev="1" sm="80" rank="1" gdr="1"/>
    </pci>
  </cpu>
  <cpu host_hash="0x1" numaid="1" affinity="ffffffff,00000000" arch="x86_64" vendor="GenuineIntel">
    <pci busid="0000:90:00.0" class="0x060400" link_speed="16.0 GT/s PCIe" link_width="16">
      <pci busid="0000:91:00.0" class="0x030200" vendor="0x10de" link_speed="16.0 GT/s PCIe" link_width="16">
        <gpu dev="2" sm="80" rank="2" gdr="1">
          <nvlink target="0000:11:00.0" count="4" tclass="0x030200"/>
        </gpu>
      </pci>
    </pci>
  </cpu>
</system>
"""

PRINTED = {
    "pcie": replace(SAMPLES["pcie_4"], headings="new"),
    "broken": replace(SAMPLES["nvswitch_8"], nics=(), gpus=lambda low, high: "NV16" if 3 in (low, high) else "NV18"),
}
