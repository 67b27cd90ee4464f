"""Text of ``nvidia-smi topo`` is read by meaning, however it was copied."""

from __future__ import annotations

import io
import itertools
import json
import re
from collections.abc import Callable

import pytest
from rich.console import Console

from commopt_diagnose.topology.findings import find_all
from commopt_diagnose.topology.machine import Machine, TopologyError, cpus_text
from commopt_diagnose.topology.smi_text import read_smi_text
from commopt_diagnose.topology.terminal import by_place, gpu_pairs, print_topology
from diagnose_support.topology_samples import SAMPLES, Sample


def wrapped(text: str, width: int) -> str:
    """Breaks lines as a terminal does, in the middle of words too."""
    return "\n".join(
        line[begin : begin + width] for line in text.splitlines() for begin in range(0, max(1, len(line)), width)
    )


def coloured(text: str, start: str) -> str:
    """Colours the head, and each cell by itself."""
    head, _, rows = text.partition("\n")
    cells = re.sub(r"\t ?([A-Z0-9]+)", rf"\t{re.escape(start)}32m\1{re.escape(start)}0m".replace("\\[", "["), rows)
    return f"{start}4m{head}{start}0m\n{cells}"


COPIES = {
    "tabs": Sample.tabbed,
    "spaces": Sample.spaced,
    "coloured": lambda sample: coloured(sample.tabbed(), "\x1b["),
    "colours_without_escape": lambda sample: coloured(sample.tabbed(), "["),
    "indented": lambda sample: re.sub(r"^", "        ", sample.spaced(), flags=re.MULTILINE),
    "windows": lambda sample: sample.spaced().replace("\n", "\r\n"),
    "quoted": lambda sample: re.sub(r"^", "> ", sample.spaced(), flags=re.MULTILINE),
    "by_mpirun": lambda sample: re.sub(r"^", "[1,0]<stdout>:", sample.tabbed(), flags=re.MULTILINE),
    "in_a_log": lambda sample: f"GPU0 is slow, GPU1 as well:\n$ nvidia-smi topo -m\n{sample.spaced()}\nGPU 0 100 %\n",
    "legend_first": lambda sample: "Legend:\n" + sample.spaced().partition("Legend:")[2] + sample.spaced(),
    "wrapped_60": lambda sample: wrapped(sample.spaced(), 60),
    "wrapped_79": lambda sample: wrapped(sample.spaced(), 79),
    "in_comments": lambda sample: re.sub(r"^", "# ", sample.spaced(), flags=re.MULTILINE),
    "one_line": lambda sample: "\n".join(re.sub(r"\s+", " ", part) for part in re.split("(?=NIC L)", sample.tabbed())),
    "single_spaces": lambda sample: re.sub(r"[ \t]+", " ", sample.spaced()),
}


def markdown(text: str) -> str:
    """Writes a matrix as a table of Markdown, with NVLinks in bold."""
    head, *rows = (line.split() for line in text.splitlines())
    head = ["", *(word for word in head if word not in ("Affinity", "ID"))]
    lines = [head, ["---"] * len(head), *([f"**{word}**" if "NV" in word else word for word in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def check(machine: Machine, sample: Sample) -> None:
    assert [gpu.label for gpu in machine.gpus] == sample.labels[: sample.num_gpus]
    assert [nic.name for nic in machine.nics] == list(sample.nics)
    for row, one in enumerate(sample.labels[: sample.num_gpus]):
        for column, other in enumerate(sample.labels):
            assert one == other or str(machine.link(one, other)) == sample.cell(row, column)
        gpu = machine.gpus[row]
        assert cpus_text(gpu.cpus) == sample.cpus(row)
        assert gpu.numa_node == (sample.nodes(row) if sample.headings != "old" else None)


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("name", SAMPLES)
def test_a_machine(name: str, copy: str) -> None:
    """If it fails, a matrix that somebody sent is read wrongly, or not at all."""
    machine = read_smi_text(COPIES[copy](SAMPLES[name]), "sent")
    check(machine, SAMPLES[name])
    assert not machine.without_nvlink


def test_what_is_cut_off_comes_from_the_other_rows() -> None:
    """If it fails, links that a cut matrix still has are lost, or links that it does not have are made up."""
    sample = SAMPLES["nvswitch_8"]
    lines = sample.spaced().splitlines()
    machine = read_smi_text("\n".join(lines[:7]), "sent")  # the head and six GPUs
    assert machine.link("GPU7", "GPU0") == machine.link("GPU0", "GPU1")
    assert machine.link("GPU7", "GPU6") is None
    assert "no row for GPU6, GPU7" in machine.notices[0]
    narrow = read_smi_text("\n".join(line[:40] for line in lines[:9]), "sent")
    assert str(narrow.link("GPU0", "GPU3")) == "NV18"
    headless = read_smi_text("\n".join(lines[1:]), "sent")
    assert str(headless.link("GPU2", "NIC2")) == "PIX"
    assert headless.link("GPU7", "GPU0") == machine.link("GPU7", "GPU0")


def test_a_missing_cell_does_not_move_the_others() -> None:
    """If it fails, a cell that was lost in a print gives every later one to another device."""
    lines = SAMPLES["pcie_4"].spaced().splitlines()
    lines[1] = lines[1].replace("PIX", "   ", 1)  # GPU0 to GPU1
    machine = read_smi_text("\n".join(lines), "sent")
    check(machine, SAMPLES["pcie_4"])


def test_rows_that_disagree() -> None:
    """If it fails, a link that is broken in one direction looks whole."""
    text = SAMPLES["bridge"].tabbed().replace("NV4", "NV3", 1)
    machine = read_smi_text(text, "sent")
    assert str(machine.link("GPU0", "GPU1")) == "NV3"
    assert "two rows disagree on GPU0 and GPU1" in machine.notices[0]


def test_without_nvlink() -> None:
    """If it fails, what topo -mp leaves out is taken for what the machine has not."""
    text = SAMPLES["pcie_10"].tabbed()
    assert not read_smi_text(text, "sent").without_nvlink
    assert read_smi_text(re.sub(r"\n +NV#.*", "", text), "sent").without_nvlink
    for end in ("  NV#", "  PIX ", "  PXB "):  # a legend that was cut
        assert not read_smi_text(text.partition(end)[0], "sent").without_nvlink
    cut = text.partition("Legend")[0]
    assert read_smi_text(f"$ nvidia-smi topo -mp\n{cut}", "sent").without_nvlink


def test_former_words_names_and_other_matrices() -> None:
    """If it fails, an old driver's words, or what else stands in a report, break a matrix."""
    peers = "\tGPU0\tGPU1\nGPU0\tX\tOK\nGPU1\tOK\tX\n"
    text = peers + SAMPLES["workstation"].tabbed().replace("PHB\t", "SOC\t") + peers
    text += "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)\n|   1  Tesla V100-SXM2-16GB  On | 00000000:07:00.0 Off |\n"
    machine = read_smi_text(text, "sent")
    assert str(machine.link("GPU0", "GPU1")) == "SYS"
    assert [gpu.name for gpu in machine.gpus] == ["NVIDIA H100 80GB HBM3", "Tesla V100-SXM2-16GB"]


@pytest.mark.parametrize("text", ["", "Epoch 0\nGPU0 is slow\n", "GPU0 GPU1\n"])
def test_no_topology(text: str) -> None:
    """If it fails, any text is a topology."""
    with pytest.raises(TopologyError, match=r"^sent: no matrix of nvidia-smi topo -m"):
        read_smi_text(text, "sent")


def test_what_stands_there_instead() -> None:
    """If it fails, an error of nvidia-smi that came through a pipe looks like a matrix that cannot be read."""
    text = (
        "\n\x1b[31mFailed to initialize NVML: Driver/library version mismatch\x1b[0m\nNVML library version: 535.171\n"
    )
    with pytest.raises(TopologyError, match="it begins with 'Failed to initialize NVML: Driver/library version mism"):
        read_smi_text(text, "input")
    with pytest.raises(TopologyError, match=r"it begins with 'x x .* \[\.\.\.\]'$") as refused:
        read_smi_text("x " * 5000, "input")
    assert len(str(refused.value)) < 250


def test_a_table_of_markdown() -> None:
    """If it fails, a matrix in a README is read wrongly, or not at all."""
    sample = SAMPLES["nvswitch_8"]
    matrix = sample.tabbed().partition("\nNIC0")[0]
    machine = read_smi_text(f"The nodes:\n\n{markdown(matrix)}\n\nGPU0 is fine\n", "sent")
    assert [str(machine.link("GPU0", label)) for label in ("GPU7", "NIC0", "NIC1", "NIC4")] == [
        "NV18",
        "PIX",
        "NODE",
        "SYS",
    ]
    assert len(machine.nics) == 8


def test_places() -> None:
    """If it fails, GPUs of different sockets look as if they were on one, or a node is made up."""
    old = SAMPLES["cube_8"].tabbed()  # cores, but no NUMA nodes
    assert [(place, cores, len(gpus)) for place, cores, gpus in by_place(read_smi_text(old, "sent"))] == [
        ("NUMA node ?", "0-31,64-95", 4),
        ("NUMA node ?", "32-63,96-127", 4),
    ]
    short = "GPU0 GPU1 CPU Affinity NUMA\nGPU0 X NV18 0-51 0\nGPU1 NV18 X 52-103 1\n"
    assert [gpu.numa_node for gpu in read_smi_text(short, "sent").gpus] == [0, 1]
    both = short.replace(" 0\n", " 0-1\n")
    assert read_smi_text(both, "sent").gpus[0].numa_node is None


def test_names_of_several_gpus() -> None:
    """If it fails, a report's list of models is not read."""
    text = SAMPLES["pcie_4"].tabbed() + "GPU 0,2-3: NVIDIA L40S\nGPU 1: NVIDIA A40 (UUID: GPU-1)\n"
    assert [gpu.name for gpu in read_smi_text(text, "sent").gpus] == [
        "NVIDIA L40S",
        "NVIDIA A40",
        "NVIDIA L40S",
        "NVIDIA L40S",
    ]


def test_columns_that_nothing_names() -> None:
    """If it fails, columns of a matrix without its head and last rows become adapters that nobody has."""
    rows = SAMPLES["pcie_8"].tabbed().splitlines()[1:6]
    machine = read_smi_text("\n".join(rows), "sent")
    assert [gpu.label for gpu in machine.gpus] == ["GPU0", "GPU1", "GPU2", "GPU3", "GPU4"]
    assert machine.nics == ()


def test_only_a_matrix_about_direct_copies() -> None:
    """If it fails, what the driver says of P2P is refused where the links are not beside it."""
    text = "  PIX  = Connection traversing at most a single PCIe bridge\n\n        GPU0    GPU1\n GPU0   X       GNS\n"
    machine = read_smi_text(f"{text} GPU1   GNS     X\n", "sent")
    assert (machine.links, machine.p2p) == ({}, {frozenset(("GPU0", "GPU1")): "GNS"})
    without_head = read_smi_text("GPU0\tX\tOK\tCNS\nGPU1\tOK\tX\tOK\nGPU2\tCNS\tOK\tX\n", "sent")
    assert [gpu.label for gpu in without_head.gpus] == ["GPU0", "GPU1", "GPU2"]
    assert [pair for pair, status in without_head.p2p.items() if status == "CNS"] == [frozenset(("GPU0", "GPU2"))]
    assert machine.notices == ("only a matrix of topo -p2p: what lies between GPUs is unknown",)


def test_affinity_in_front_of_the_matrix() -> None:
    """If it fails, a cluster's manual that begins with the cores is refused."""
    rows = ["| CPU Affinity | NUMA Affinity | | GPU0 | GPU1 | mlx5_0 |", "|---|---|---|---|---|---|"]
    rows += ["| 24-31,56-63 | 3 | GPU0 | X | NV4 | SYS |", "| 16-23 | 2 | GPU1 | NV4 | X | PHB |"]
    machine = read_smi_text("\n".join([*rows, "| | | mlx5_0 | SYS | PHB | X |"]), "sent")
    assert [(gpu.numa_node, cpus_text(gpu.cpus)) for gpu in machine.gpus] == [(3, "24-31,56-63"), (2, "16-23")]
    assert [str(machine.link(*pair)) for pair in (("GPU0", "GPU1"), ("GPU1", "mlx5_0"))] == ["NV4", "PHB"]


def test_words_that_a_terminal_has_glued() -> None:
    """If it fails, columns behind two words without a space are read as their neighbours."""
    rows = ["\tGPU0\tGPU1\tNIC0\tNIC1NIC2\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID"]
    rows += ["GPU0\tX\tNV18\tPXB\tNODENODE\t0-55\t0\t\tN/A", "GPU1\tNV18\tX\tNODE\tNODEPXB\t56-99\t1\t\tN/A"]
    machine = read_smi_text("\n".join(rows), "sent")
    assert [str(machine.link("GPU1", f"NIC{index}")) for index in range(3)] == ["NODE", "NODE", "PXB"]
    assert [gpu.numa_node for gpu in machine.gpus] == [0, 1]
    head = "GPU0  GPU1  NIC0CPU Affinity  NUMA Affinity  GPU NUMA ID"
    machine = read_smi_text(f"{head}\nGPU0 X NV18 PXB 0-55 0N/A\nGPU1 NV18 X NODE 56-99 1N/A\n", "sent")
    assert [nic.name for nic in machine.nics] == ["NIC0"]
    assert [gpu.numa_node for gpu in machine.gpus] == [0, 1]


CUT_HEAD = """\
        GPU0    GPU1    CPU Affinity    NUMA Affinity
GPU0     X      NV12    SYS     SYS     0-15    0
GPU1    NV12     X      SYS     SYS     0-15    0
GPU2    SYS     SYS      X      NV12    16-31   1
GPU3    SYS     SYS     NV12     X      16-31   1
"""


def test_more_rows_than_columns() -> None:
    """The X of a row shows the column that a cut head does not name."""
    machine = read_smi_text(CUT_HEAD, "a")
    assert [gpu.label for gpu in machine.gpus] == ["GPU0", "GPU1", "GPU2", "GPU3"]
    assert [gpu.numa_node for gpu in machine.gpus] == [0, 0, 1, 1]
    pairs = ("GPU0", "GPU1"), ("GPU0", "GPU3"), ("GPU2", "GPU3")
    assert [str(machine.link(*pair)) for pair in pairs] == ["NV12", "SYS", "NV12"]
    assert "no column for GPU2, GPU3 in the head" in machine.notices[-1]


def test_a_row_without_a_column_says_what_is_between_it_and_the_others() -> None:
    lines = CUT_HEAD.splitlines()
    narrow = [line[:24] + line[40:] if number else line for number, line in enumerate(lines)]
    machine = read_smi_text("\n".join(narrow), "a")
    assert str(machine.link("GPU1", "GPU2")) == "SYS"
    assert machine.link("GPU2", "GPU3") is None
    assert [gpu.numa_node for gpu in machine.gpus] == [0, 0, 1, 1]


def _amd_table(title: str, labels: list[str], cell: Callable[[int, int], str]) -> str:
    numbers = range(len(labels))
    rows = [f"{labels[row]}  " + "  ".join(cell(row, column).ljust(12) for column in numbers) for row in numbers]
    return "\n".join([title, "      " + "  ".join(labels), *rows, ""])


def _sockets(same: str, other: str) -> Callable[[int, int], str]:
    return lambda row, column: "0" if row == column else same if row // 2 == column // 2 else other


FOUR = ["GPU0", "GPU1", "GPU2", "GPU3"]


def test_tables_of_rocm_smi() -> None:
    """Hops of 2 are within a NUMA node and 3 between two, by AMD's guide."""
    text = (
        _amd_table("=== Weight between two GPUs ===", FOUR, _sockets("40", "72"))
        + _amd_table("=== Hops between two GPUs ===", FOUR, _sockets("2", "3"))
        + _amd_table("=== Link Type between two GPUs ===", FOUR, _sockets("PCIE", "PCIE"))
        + "".join(f"GPU[{number}]\t\t: (Topology) Numa Node: {number // 2}\n" for number in range(4))
        + "=== End of ROCm SMI Log ===\n"
    )
    machine = read_smi_text(text, "a")
    assert [str(machine.link("GPU0", other)) for other in FOUR[1:]] == ["PHB", "SYS", "SYS"]
    assert [gpu.numa_node for gpu in machine.gpus] == [0, 0, 1, 1]
    assert machine.notices == ("AMD's tables do not name PCIe switches: PHB may be PIX or PXB",)
    assert [finding.code for finding in find_all(machine)] == ["ring_over_sockets"]
    assert [pair.expectation for pair in gpu_pairs(machine)] == [None] * 6  # the known rates are NVIDIA's


def test_tables_of_amd_smi() -> None:
    """xGMI may go through a third GPU, which only the weight shows; devices are named by their PCI address."""
    labels = ["0000:0c:00.0", "0000:22:00.0", "0000:38:00.0", "0000:5c:00.0"]
    text = (
        _amd_table("WEIGHT TABLE:", labels, _sockets("15", "30"))
        + _amd_table("HOPS TABLE:", labels, _sockets("1", "1"))
        + _amd_table("LINK TYPE TABLE:", labels, _sockets("XGMI", "XGMI"))
        + _amd_table("NUMA BW TABLE:", labels, _sockets("50000-100000", "N/A"))
    )
    machine = read_smi_text(text, "a")
    assert {str(link) for link in machine.links.values()} == {"XGMI"}
    assert [(gpu.label, gpu.bus_id) for gpu in machine.gpus] == list(zip(FOUR, labels, strict=True))
    assert machine.notices == (
        "xGMI goes through other GPUs between GPU0-GPU2, GPU0-GPU3, GPU1-GPU2, GPU1-GPU3, by their weight",
    )
    assert find_all(machine) == []
    with Console(file=io.StringIO(), width=100) as console:
        print_topology(machine, [], console)


def test_json_of_amd_smi() -> None:
    """If it fails, what scripts keep of amd-smi is refused, or a link is read from its place in a list."""
    cell = _sockets("XGMI", "PCIE")
    gpus = [
        {
            "gpu": row,
            "bdf": f"0000:{row}c:00.0",
            "links": [
                {
                    "gpu": column,
                    "weight": 15,
                    "link_status": "ENABLED",
                    "link_type": kind,
                    "num_hops": 1 + 2 * (kind == "PCIE"),
                }
                for column in reversed(range(4))
                for kind in [cell(row, column).replace("0", "SELF")]
            ],
        }
        for row in range(4)
    ]
    machine = read_smi_text(f"$ amd-smi topology --json\n{json.dumps(gpus, indent=4)}\n$", "a")
    assert [gpu.label for gpu in machine.gpus] == FOUR
    assert [str(machine.link("GPU0", other)) for other in FOUR[1:]] == ["XGMI", "SYS", "SYS"]
    for wrong in (
        '[{"gpu": 0, "links": [7, {"gpu": "x", "link_type": "XGMI"}]}]',
        '[{"gpu": ' + "[" * 10_000 + '"link_type"',
    ):
        with pytest.raises(TopologyError, match="the whole output of either, as text or with --json"):
            read_smi_text(wrong, "a")


def test_json_of_rocm_smi() -> None:
    """rocm-smi prints one line, which is longer than those of a table, and each pair once."""
    names = {"Weight": ("40", "72"), "Hops": ("2", "3"), "Link type": ("PCIE", "PCIE")}
    cards = {
        f"card{number}": {"(Topology) Numa Node": str(number // 4), "(Topology) Numa Affinity": str(number // 4)}
        for number in range(8)
    }
    pairs = {
        f"(Topology) {name} between DRM devices {row} and {column}": values[row // 4 != column // 4]
        for name, values in names.items()
        for row, column in itertools.combinations(range(8), 2)
    }
    machine = read_smi_text(json.dumps({**cards, "system": pairs}), "a")
    assert [str(machine.link("GPU7", f"GPU{other}")) for other in (0, 3, 4, 6)] == ["SYS", "SYS", "PHB", "PHB"]
    assert [gpu.numa_node for gpu in machine.gpus] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_links_of_pcie_without_hops_are_refused() -> None:
    text = _amd_table("=== Link Type between two GPUs ===", FOUR, _sockets("PCIE", "PCIE"))
    with pytest.raises(TopologyError, match="no table of rocm-smi --showtopo or amd-smi topology"):
        read_smi_text(text, "a")
