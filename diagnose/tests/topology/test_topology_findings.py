"""What hurts in a topology is found, and nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from commopt_diagnose.topology.expectations import (
    expect_all_reduce,
    expect_between_gpus,
    expect_to_nic,
    find_ring,
    nvlink_model,
)
from commopt_diagnose.topology.findings import find_all
from commopt_diagnose.topology.machine import Gpu, Link, Machine, Nic, parse_cpus
from commopt_diagnose.topology.smi_text import read_smi_text
from commopt_diagnose.topology.terminal import gpu_pairs, nic_pairs
from diagnose_support.topology_samples import SAMPLES, Sample, halves
from lightning_commopt.text.findings import Finding


def read(sample: Sample, *names: str) -> Machine:
    lines = [f"GPU {index}: {name} (UUID: GPU-{index})" for index, name in enumerate(names)]
    return read_smi_text(sample.tabbed() + "\n".join(lines), "sent")


def found(sample: str, *names: str, **changes: object) -> dict[str, Finding]:
    """Returns what is found in a changed sample, with names of its GPUs, by code."""
    changed = dataclasses.replace(SAMPLES[sample], **changes)  # type: ignore[arg-type]
    return {finding.code: finding for finding in find_all(read(changed, *names))}


@pytest.mark.parametrize(
    ("name", "codes"),
    {
        "one": set(),
        "workstation": set(),
        "bridge": set(),
        "pcie_4": {"ring_over_sockets", "fewer_nics"},
        "cube_8": {"fewer_nics"},
        "nvswitch_8": set(),
        "pcie_8": {"ring_over_sockets"},
        "pcie_10": {"fewer_nics"},
        "nvswitch_16": set(),
    }.items(),
)
def test_what_hurts(name: str, codes: set[str]) -> None:
    """If it fails, a slow machine passes, or a good one gets advice that nobody needs."""
    assert found(name).keys() == codes


@pytest.mark.parametrize(
    ("name", "codes"),
    [
        ("NVIDIA H100 80GB HBM3", ["no_nvlinks"]),
        ("NVIDIA A100-SXM4-80GB", ["no_nvlinks"]),
        ("NVIDIA H100 NVL", []),
        ("NVIDIA A100 80GB PCIe", []),
        ("NVIDIA GeForce RTX 3090", []),
        ("NVIDIA RTX A6000", []),
        ("NVIDIA L40S", []),
    ],
)
def test_a_model_that_has_nvlinks_without_any(name: str, codes: list[str]) -> None:
    """If it fails, a machine whose fabric manager is down passes, or one without bridges is called slow."""
    hidden = found("pcie_8", *[name] * 8, gpus=lambda low, high: "NODE")
    assert [code for code in hidden if "nvlink" in code] == codes
    assert all(finding.confidence == "possible" for code, finding in hidden.items() if code == "no_nvlinks")
    assert found("one", name).keys() == set()


def test_a_ring_that_must_cross_sockets() -> None:
    """If it fails, the advice names GPUs that SYS lies between."""
    finding = found("pcie_8")["ring_over_sockets"]
    assert "every ring over all 8 GPUs crosses SYS" in finding.what
    assert "2 times in the best one found" in finding.what
    assert finding.advice.endswith("CUDA_VISIBLE_DEVICES=0,1,2,3")
    rows = SAMPLES["pcie_8"].tabbed().splitlines()
    cut = "\n".join(row for row in rows if not row.startswith(("GPU4", "GPU5", "GPU6", "GPU7")))
    (of_cut,) = (each for each in find_all(read_smi_text(cut, "sent")) if each.code == "ring_over_sockets")
    assert "2 times in the best one found" in of_cut.what
    hidden = found("pcie_8", gpus=lambda low, high: "SYS", nodes=lambda gpu: 0)
    assert "a virtual machine or the BIOS may hide" in hidden["ring_over_sockets"].why


def test_two_gpus_of_wsl() -> None:
    """If it fails, a desktop with one socket is said to have gradients cross the link between two."""
    table = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \tSYS\t\t\tN/A\nGPU1\tSYS\t X \t\t\tN/A\n"
    (ring,) = find_all(read_smi_text(table, "sent"))
    assert "crosses SYS (1 time" in ring.what
    assert "unknown: no GPU has cores or a NUMA node here, as in WSL" in ring.why
    (of_two_sockets,) = find_all(read_smi_text(table.replace("SYS\t\t\t", "SYS\t0-7\t0\t"), "sent"))
    assert "crosses SYS, the link between sockets" in of_two_sockets.what


def test_18_nvlinks_without_a_name_have_two_rates() -> None:
    """If it fails, eight B200 are expected to have half their rate."""
    table = SAMPLES["nvswitch_8"].tabbed()
    unnamed = read_smi_text(table, "sent")
    rate = expect_between_gpus(Link("NV", 18), unnamed.gpus[0])
    assert rate is not None
    assert rate.text.startswith("450 GB/s")
    assert "900 by that of B200" in rate.text
    assert rate.bytes_per_s is None
    of_all = expect_all_reduce(unnamed)
    assert of_all is not None
    assert of_all.text.startswith("if these are H100")
    assert of_all.bytes_per_s is None
    named = expect_all_reduce(read_smi_text("GPU 0-7: NVIDIA H100 80GB HBM3\n" + table, "sent"))
    assert named is not None
    assert named.text.startswith("all-reduce over 8 H100")
    assert named.bytes_per_s == 241e9
    assert expect_all_reduce(read_smi_text("GPU 0-7: NVIDIA B200\n" + table, "sent")) is None


def test_rings() -> None:
    """If it fails, a ring is longer than it must be, or one that is there is not found."""
    ring = find_ring(read(SAMPLES["cube_8"]))
    assert ring is not None
    assert (sorted(ring.labels), ring.worst, ring.num_worst) == ([f"GPU{index}" for index in range(8)], "NV", 8)
    ring = find_ring(read(SAMPLES["pcie_4"]))
    assert ring is not None
    assert (ring.worst, ring.num_worst) == ("SYS", 2)
    assert find_ring(read(SAMPLES["one"])) is None


def test_nvlink_in_pairs() -> None:
    """If it fails, four GPUs with two bridges look as if NVLink connected all."""
    pairs = found("pcie_4", gpus=lambda low, high: "NV4" if low // 2 == high // 2 else "NODE")
    finding = pairs["ring_leaves_nvlink"]
    assert "goes over NODE 2 times" in finding.what
    assert finding.advice.endswith("CUDA_VISIBLE_DEVICES=0,1")


@pytest.mark.parametrize(
    ("gpus", "what"),
    [
        (lambda low, high: "NV16" if 3 in (low, high) else "NV18", "GPU3 16"),
        (lambda low, high: "NV17" if (low, high) == (1, 2) else "NV18", "GPU1 and GPU2 17"),
        (lambda low, high: "NODE" if 7 in (low, high) else "NV18", "GPU7 0"),
    ],
)
def test_degraded_nvlink(gpus: Callable[[int, int], str], what: str) -> None:
    """If it fails, a broken link that slows every collective passes."""
    degraded = found("nvswitch_8", gpus=gpus)["degraded_nvlink"]
    assert degraded.what == f"NVLinks are missing: {what}, where others have 18"


def test_degraded_nvlink_of_all() -> None:
    """If it fails, links that all GPUs lack are not missed, or are where the model is unknown."""
    names = ["NVIDIA H100 80GB HBM3"] * 8
    assert found("nvswitch_8", gpus=lambda low, high: "NV16") == {}
    every = found("nvswitch_8", *names, gpus=lambda low, high: "NV16")["degraded_nvlink"].what
    assert "GPU0 16, GPU1 16, " in every
    assert "this model has 18" in every
    assert found("nvswitch_8", *names) == {}


def test_unequal_links_without_switches_are_a_note() -> None:
    """If it fails, a part of a cube, as clouds lend it, is called broken, or a link that is down in one is not seen."""
    finding = found("cube_8", num_gpus=4, nics=())["unequal_nvlinks"]
    assert (finding.severity, finding.what[-32:]) == ("note", ": GPU0 4, GPU1 4, GPU2 5, GPU3 5")
    cube = SAMPLES["cube_8"]
    broken = found("cube_8", gpus=lambda low, high: "NV1" if (low, high) == (0, 3) else cube.gpus(low, high))
    assert ": GPU0 5, GPU1 6, GPU2 6, GPU3 5, " in broken["unequal_nvlinks"].what
    square = {"num_gpus": 4, "nics": (), "gpus": lambda low, high: "NV3"}
    assert found("cube_8", **square) == {}
    few = found("cube_8", "A100-SXM4-40GB", **square)["few_nvlinks"]
    assert "has 9 NVLinks to the others, but its model has 12" in few.what


def test_adapters() -> None:
    """If it fails, a GPU without an adapter near it passes."""
    far = found("nvswitch_8", to_nic=lambda gpu, nic: "SYS" if gpu == 5 else "PIX" if gpu == nic else "NODE")
    assert far["far_nic"].what == "no NIC nearer than SYS to GPU5"
    assert "fewer_nics" not in found("pcie_8", nics=("eth0",), has_legend_of_nics=True)


def test_lanes() -> None:
    """If it fails, a card in the wrong slot passes."""
    machine = read(SAMPLES["workstation"])
    gpus = [dataclasses.replace(gpu, pcie_width=width) for gpu, width in zip(machine.gpus, (16, 8), strict=True)]
    (finding,) = find_all(dataclasses.replace(machine, gpus=tuple(gpus)))
    assert finding.what == "fewer PCIe lanes than on other GPUs: GPU1 x8, others x16"


def test_without_the_column_of_nvlink() -> None:
    """If it fails, topo -mp of an NVSwitch machine is called slow."""
    machine = read_smi_text(
        "$ nvidia-smi topo -mp\n"
        + dataclasses.replace(SAMPLES["nvswitch_8"], gpus=halves("NODE", "SYS", 8)).tabbed().partition("Legend")[0],
        "sent",
    )
    assert {finding.code for finding in find_all(machine)} == {"no_nvlink_column"}


@pytest.mark.parametrize(
    ("name", "num_links", "bytes_per_s"),
    [
        ("NVIDIA H100 80GB HBM3", 18, 25e9),
        ("NVIDIA H200", 18, 25e9),
        ("NVIDIA A100-SXM4-80GB", 12, 25e9),
        ("Tesla V100-SXM2-32GB", 6, 25e9),
        ("NVIDIA B200", 18, 50e9),
        ("NVIDIA RTX A6000", 4, 14e9),
    ],
)
def test_models(name: str, num_links: int, bytes_per_s: float) -> None:
    """If it fails, a whole GPU is called broken, or a broken one whole."""
    assert nvlink_model(name) == (num_links, bytes_per_s)


@pytest.mark.parametrize("name", ["NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA L40S", None])
def test_models_without_a_fixed_number(name: str | None) -> None:
    """If it fails, cards whose bridges decide are called broken."""
    assert nvlink_model(name) is None


def test_figures() -> None:
    """If it fails, a figure stands beside the wrong link."""
    rates = {"NV": 300e9, "PXB": 18.5e9, "NODE": 13.5e9, "SYS": None}
    for kind, bytes_per_s in rates.items():
        expected = expect_between_gpus(Link(kind, 12 if kind == "NV" else 0))
        assert expected is not None
        assert expected.bytes_per_s == bytes_per_s
    assert expect_to_nic(Link("PIX"), Nic(label="NIC0", name="mlx5_0", bytes_per_s=25e9)).bytes_per_s == 23e9
    assert "no GPUDirect RDMA" in expect_to_nic(Link("SYS")).text
    assert expect_to_nic(Link("PXB")) == expect_to_nic(Link("PIX")) != expect_to_nic(Link("PHB"))


def test_figures_of_a_model() -> None:
    """If it fails, boards without P2P get figures of an A100, or NVLinks of another rate those of a V100."""
    for name, kind, words in (
        ("NVIDIA GeForce RTX 5090", "PHB", "copies go through host memory"),
        ("NVIDIA GeForce GTX 1080 Ti", "PHB", None),
        ("NVIDIA GeForce RTX 3090", "NV", "56 GB/s"),
        ("NVIDIA B200", "NV", "200 GB/s"),
        ("NVIDIA L40S", "PHB", "13.5 GB/s"),
        ("NVIDIA L40S-48Q", "PHB", "copies go through host memory"),
        ("GRID A100-40C", "NV", "100 GB/s"),
        ("NVIDIA A100-SXM4-80GB", "PHB", "13.5 GB/s"),
    ):
        expected = expect_between_gpus(Link(kind, 4 if kind == "NV" else 0), Gpu(label="GPU0", name=name))
        assert words == expected if words is None else expected is not None and words in expected.text
    allowed = expect_between_gpus(Link("PHB"), Gpu(label="GPU0", name="NVIDIA GeForce RTX 4090"), "OK")
    assert allowed is None
    assert expect_between_gpus(Link("XGMI", 4)) is None  # of a file that names no GPU
    blackwell = expect_between_gpus(Link("NV", 18), Gpu(label="GPU0", compute_capability=100))
    assert blackwell is not None
    assert blackwell.bytes_per_s == 900e9


def test_refused_copies() -> None:
    """If it fails, what the driver refuses is not reported, or what only NVLink or atomics lack is."""
    matrix = SAMPLES["workstation"].tabbed()
    refused = " \tGPU0\tGPU1\n GPU0\tX\tCNS\n GPU1\tCNS\tX\n"
    (finding,) = find_all(read_smi_text(f"{matrix}$ nvidia-smi topo -p2p r\n{refused}", "sent"))
    assert (finding.code, finding.what) == (
        "no_p2p",
        "no direct copies (P2P) between GPU0-GPU1: the chipset does not support it (CNS)",
    )
    assert find_all(read_smi_text(f"{matrix}$ nvidia-smi topo -p2p n\n{refused}", "sent")) == []
    assert find_all(read_smi_text(matrix + refused.replace("CNS", "OK"), "sent")) == []
    unclear = read_smi_text(matrix + refused.replace("CNS", "NS"), "sent")
    assert (find_all(unclear), gpu_pairs(unclear)[0].expectation) == ([], None)


@pytest.mark.exhaustive
def test_what_is_cut_off_is_not_judged() -> None:
    """If it fails, a cell that was lost in a paste becomes a broken link, a far adapter or a slow ring."""
    for name in ("cube_8", "nvswitch_8", "pcie_8", "pcie_4"):
        sample = SAMPLES[name]
        text = sample.tabbed()
        whole = {finding.code for finding in find_all(read_smi_text(text, "sent"))}
        begin, end = text.index("\nGPU0"), text.index("\nLegend")
        for cut in range(begin + 20, end, 5):
            machine = read_smi_text(text[:cut], "sent")
            assert {finding.code for finding in find_all(machine)} <= whole, text[:cut]
            if sample.headings == "new":  # otherwise the cores are the last word, which is taken as it is
                cores = {frozenset[int](), *(parse_cpus(sample.cpus(gpu)) for gpu in range(8))}
                assert {gpu.cpus for gpu in machine.gpus} <= cores, text[:cut]


@pytest.mark.parametrize("own", [("1", "11"), ("N/A", "N/A")])
def test_grace(own: tuple[str, str]) -> None:
    """If it fails, GPUs with memory of their own NUMA nodes fall together, or their adapters are called far."""
    lines = ["\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID"]
    lines += [f"GPU0\t X \tNV6\tNODE\t0-71\t0,2-9\t\t{own[0]}", f"GPU1\tNV6\t X \tSYS\t72-143\t10,12-19\t\t{own[1]}"]
    machine = read_smi_text("\n".join(lines), "sent")
    assert [(gpu.numa_node, gpu.is_coherent) for gpu in machine.gpus] == [(0, True), (10, True)]
    assert {finding.code for finding in find_all(machine)} == {"fewer_nics"}


@pytest.mark.parametrize(("name", "codes"), [("NVIDIA GB10", set()), ("NVIDIA H100 PCIe", {"far_nic"})])
def test_spark(name: str, codes: set[str]) -> None:
    """Its GPU has no memory but its CPU's, so that no place of a NIC is too far for GPUDirect RDMA."""
    lines = [f"GPU 0: {name} (UUID: GPU-b0)", "\tGPU0\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID"]
    lines += ["GPU0\t X \tNODE\tNODE\t0-19\t0\t\tN/A", "NIC0\tNODE\t X \tPIX", "  NIC0: rocep1s0f0"]
    assert {finding.code for finding in find_all(read_smi_text("\n".join(lines), "sent"))} == codes


@pytest.mark.parametrize(("nic", "codes"), [("roceP2p1s0f0", set()), ("roceP3p1s0f0", {"far_nic"})])
def test_spark_without_the_name_of_its_gpu(nic: str, codes: set[str]) -> None:
    """If it fails, nvidia-smi topo -m alone makes each DGX Spark a machine whose adapters are too far."""
    lines = ["\tGPU0\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID", "GPU0\t X \tNODE\tNODE\t0-19\t0\t\tN/A"]
    lines += ["NIC0\tNODE\t X \tNODE", "NIC1\tNODE\tNODE\t X ", "  NIC0: rocep1s0f0", f"  NIC1: {nic}"]
    assert {finding.code for finding in find_all(read_smi_text("\n".join(lines), "sent"))} == codes


def test_grace_blackwell() -> None:
    """If it fails, a GB200 gets the rate of older NVLinks, or GPUDirect RDMA is denied where C2C joins GPU and CPU."""
    gpus = tuple(Gpu(label=f"GPU{index}", name="NVIDIA GB200", is_coherent=True) for index in range(2))
    links = {frozenset(("GPU0", "GPU1")): Link("NV", 18), frozenset(("GPU0", "NIC0")): Link("SYS")}
    machine = Machine(source="sent", gpus=gpus, nics=(Nic(label="NIC0", name="mlx5_0"),), links=links)
    assert expect_between_gpus(Link("NV", 18), gpus[0]).bytes_per_s == 900e9  # type: ignore[union-attr]
    assert [pair.expectation for pair in nic_pairs(machine)] == [None]


def test_several_numa_nodes_on_a_socket() -> None:
    """With NPS4 (AMD) or SNC (Intel), SYS is between NUMA nodes, which may be on one socket, but not within one."""
    head = "\t".join(["", *(f"GPU{number}" for number in range(4)), "CPU Affinity", "NUMA Affinity"])
    rows = [
        "\t".join(
            [f"GPU{row}", *(" X " if row == column else "SYS" for column in range(4)), f"{row * 8}-{row * 8 + 7}"]
        )
        for row in range(4)
    ]
    for nodes, is_parted, is_hidden in (
        (range(4), True, False),
        ((0, 0, 1, 1), False, True),
        ((0, 0, 0, 0), False, True),
    ):
        text = "\n".join([head, *(f"{row}\t{node}" for row, node in zip(rows, nodes, strict=True))])
        (ring,) = [f for f in find_all(read_smi_text(text, "a")) if f.code == "ring_over_sockets"]
        assert ("NPS" in ring.why, "may hide the PCIe" in ring.why) == (is_parted, is_hidden)
