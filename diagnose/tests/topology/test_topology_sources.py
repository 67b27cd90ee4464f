"""Topologies from NCCL's XML, from NVML and from nvidia-smi; what is none is one clear line."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import stat
import sys
from collections.abc import Callable, Iterator
from ctypes import c_ulonglong
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from rich.console import Console

from commopt_diagnose.topology.findings import find_all
from commopt_diagnose.topology.machine import Machine, TopologyError, cpus_text
from commopt_diagnose.topology.nvml import read_nvml
from commopt_diagnose.topology.sources import read_content, read_machine
from commopt_diagnose.topology.terminal import print_topology, to_plain, write_page
from diagnose_support.documented import is_documented
from diagnose_support.topology_samples import PRINTED, SAMPLES, XML
from support.commopt import commopt, refusal

LINKS = {
    "GPU0 GPU1": "PHB",
    "GPU0 GPU2": "NV4",
    "GPU1 GPU2": "SYS",
    "GPU0 mlx5_0": "PIX",
    "GPU1 mlx5_0": "PHB",
    "GPU2 mlx5_0": "SYS",
}
BUSES = ["00000000:11:00.0", "00000000:12:00.0", "00000000:91:00.0"]


def links_of(machine: Machine) -> dict[str, str]:
    return {" ".join(sorted(pair)): str(link) for pair, link in machine.links.items()}


def test_xml() -> None:
    """If it fails, NCCL's own view of a machine is read wrongly."""
    machine = read_content(f"some log\n{XML}more of it".encode(), "dump")
    assert links_of(machine) == LINKS
    assert [(gpu.numa_node, cpus_text(gpu.cpus), gpu.pcie_width) for gpu in machine.gpus] == [
        (0, "0-31", 16),
        (0, "0-31", 8),
        (1, "32-63", 16),
    ]
    assert machine.nics[0].bytes_per_s == 25e9
    assert [finding.code for finding in find_all(machine)][-1] == "unequal_nvlinks"


def test_xml_of_switches_and_of_several_hosts() -> None:
    """If it fails, GPUs behind NVSwitch look unconnected, or a second host's GPUs are the first one's."""
    text = XML.replace('0x030200"/>', '0x068000"/>').replace('numaid="1"', 'numaid="1"')
    assert links_of(read_content(text.encode(), "dump"))["GPU0 GPU2"] == "NV4"
    cut = XML.replace('0x1" numaid="1"', '0x2" numaid="1"')
    machine = read_content(cut.encode(), "dump")
    assert [gpu.label for gpu in machine.gpus] == ["GPU0", "GPU1"]
    assert machine.notices == ("the file has 2 hosts: only the first is shown",)


def test_xml_of_hosts_that_nvlink_joins() -> None:
    """If it fails, a GPU without its NVLinks on the second host of a domain goes unseen. As on two trays of GB300."""
    link = '<nvlink target="fffffff:ff:ff.0" count="18" tclass="0x068000"/>'
    hosts = [
        f'<cpu host_hash="0x{host}" numaid="0">'
        + "".join(
            f'<pci busid="000{number}:06:00.0" class="0x030200"><gpu dev="{number}" sm="103" rank="{number}" gdr="1">'
            f"{link if (host, number) != (2, 1) else ''}</gpu></pci>"
            for number in range(4)
        )
        + "</cpu>"
        for host in (1, 2)
    ]
    machine = read_content(f"<system version='1'>{''.join(hosts)}</system>".encode(), "dump")
    assert machine.notices[0] == "the file has 2 hosts: only number 2 is shown, where a GPU has the fewest NVLinks"
    assert find_all(machine)[0].what == "NVLinks are missing: GPU1 0, where others have 18"


class FakeDriver:
    """Three GPUs: 0 and 2 with four NVLinks, 1 alone; in nvidia-ml-py's functions, which must exist."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.processes: dict[int, list[int]] = {}
        functions: dict[str, Callable[..., Any]] = {
            "Init": lambda: None,
            "Shutdown": lambda: None,
            "DeviceGetCount": lambda: 3,
            "DeviceGetHandleByIndex": lambda index: index,
            "DeviceGetName": lambda handle: b"NVIDIA A100-SXM4-80GB" if handle == 2 else "NVIDIA A100-SXM4-80GB",
            "DeviceGetPciInfo": self.pci_info,
            "DeviceGetCpuAffinity": self.cpu_affinity,
            "DeviceGetTopologyCommonAncestor": lambda one, other: (
                pynvml.NVML_TOPOLOGY_SYSTEM if 2 in (one, other) else pynvml.NVML_TOPOLOGY_HOSTBRIDGE
            ),
            "DeviceGetNvLinkState": self.nvlink_state,
            "DeviceGetNvLinkRemoteDeviceType": lambda handle, link: pynvml.NVML_NVLINK_DEVICE_TYPE_GPU,
            "DeviceGetNvLinkRemotePciInfo": lambda handle, link: self.pci_info(2 - handle),
            "DeviceGetCurrPcieLinkWidth": lambda handle: 16,
            "DeviceGetComputeRunningProcesses": lambda handle: [
                SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in self.processes.get(handle, [])
            ],
        }
        for name, function in functions.items():
            patch.setattr(pynvml, f"nvml{name}", function)

    def pci_info(self, handle: int) -> Any:
        info = pynvml.nvmlPciInfo_t()
        info.busId = BUSES[handle].encode()
        return info

    def cpu_affinity(self, handle: int, num_words: int) -> Any:
        words = (c_ulonglong * num_words)()
        words[0] = 0xFFFFFFFF << (32 if handle == 2 else 0)
        return words

    def nvlink_state(self, handle: int, link: int) -> int:
        if handle == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if link >= 12:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return int(link < 4)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return FakeDriver(monkeypatch)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Returns a file system with two NUMA nodes, three GPUs and an adapter."""
    devices = {
        "0000:11:00.0": ("pci0000:10/0000:10:01.0/0000:11:01.0", 0),
        "0000:12:00.0": ("pci0000:10/0000:10:02.0", 0),
        "0000:91:00.0": ("pci0000:90/0000:90:01.0", 1),
        "0000:13:00.0": ("pci0000:10/0000:10:01.0/0000:11:02.0", 0),
    }
    folder = tmp_path / "sys/bus/pci/devices"
    folder.mkdir(parents=True)
    for bus, (above, node) in devices.items():
        device = tmp_path / "sys/devices" / above / bus
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
        (folder / bus).symlink_to(device)
    adapter = tmp_path / "sys/class/infiniband/mlx5_0"
    (adapter / "ports/1").mkdir(parents=True)
    (adapter / "ports/1/rate").write_text("200 Gb/sec (4X HDR)\n")
    (adapter / "device").symlink_to(folder / "0000:13:00.0")
    return tmp_path


def test_nvml(driver: FakeDriver, root: Path) -> None:
    """If it fails, what the driver reports is read wrongly."""
    machine = read_nvml(root)
    assert links_of(machine) == LINKS
    assert [(gpu.name, gpu.numa_node, cpus_text(gpu.cpus)) for gpu in machine.gpus] == [
        ("NVIDIA A100-SXM4-80GB", 0, "0-31"),
        ("NVIDIA A100-SXM4-80GB", 0, "0-31"),
        ("NVIDIA A100-SXM4-80GB", 1, "32-63"),
    ]
    assert machine.nics[0].bytes_per_s == 25e9


def test_nvml_on_grace(driver: FakeDriver, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, adapters of a live Grace machine are called far, though no path there is too far."""
    assert "far_nic" in {finding.code for finding in find_all(read_nvml(root))}
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda handle: "NVIDIA GH200 480GB")
    assert "far_nic" not in {finding.code for finding in find_all(read_nvml(root))}


def test_nvml_behind_switches(driver: FakeDriver, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, NVSwitch is not seen: the links of two GPUs are those that both have."""
    kind = pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
    monkeypatch.setattr(pynvml, "nvmlDeviceGetNvLinkRemoteDeviceType", lambda handle, link: kind)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetNvLinkState", lambda handle, link: int(link < 12 - handle))
    links = links_of(read_nvml(root))
    assert [links[pair] for pair in ("GPU0 GPU1", "GPU0 GPU2", "GPU1 GPU2")] == ["NV11", "NV10", "NV10"]


def test_processes_on_far_cores(driver: FakeDriver, root: Path) -> None:
    """If it fails, ranks that are pinned to the wrong socket are not found, or others are."""
    driver.processes = {0: [10, 12], 2: [11, 13]}
    for pid, cpus, maps in (
        (10, "32-40", "libcuda.so"),
        (11, "32-40", "libcuda.so"),
        (12, "0-63", "libcuda.so"),
        (13, "0-1", ""),
    ):
        (root / f"proc/{pid}").mkdir(parents=True)
        (root / f"proc/{pid}/status").write_text(f"Name:\tpython\nCpus_allowed_list:\t{cpus}\n")
        (root / f"proc/{pid}/maps").write_text(maps)
    (finding,) = (each for each in find_all(read_nvml(root)) if each.code == "wrong_numa_node")
    assert finding.what == "process 10 on GPU0 may use cores 32-40 only; near are 0-31 (NUMA node 0)"
    assert "numactl --cpunodebind=0" in finding.advice


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the path of a program that is called nvidia-smi, alone on PATH but for what it needs."""
    path = tmp_path / "bin" / "nvidia-smi"
    path.parent.mkdir()
    monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}/usr/bin{os.pathsep}/bin")
    return path


@pytest.mark.usefixtures("no_driver")
@pytest.mark.parametrize("variable", ["SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"])
def test_further_ranks_speak_of_themselves_only(variable: str, smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, eight ranks print eight matrices, or keep back that they are on far cores."""
    near = replace(SAMPLES["pcie_4"], cpus=lambda gpu: "9000" if gpu == 1 else "0-9000")
    (smi.parent / "matrix").write_text(near.tabbed())
    write_program(smi, f"cat {smi.parent}/matrix")
    for rank, words in (("1", "slow: process "), ("2", "")):
        monkeypatch.setenv(variable, rank)
        output = commopt("topo").output
        assert output[: len(words) or None] == words


@pytest.mark.usefixtures("no_driver")
@pytest.mark.parametrize(
    ("visible", "labels"),
    [
        (None, ["GPU1"]),
        ("", ["GPU1"]),
        ("2, 3", ["GPU3"]),
        ("2", ["GPU2"]),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,GPU-1", []),
        ("MIG-8932f937", []),
        ("2,GPU-1", []),
    ],
)
def test_the_own_gpu_is_what_the_launcher_shows(visible: str | None, labels: list[str], smi: Path) -> None:
    """If it fails, the cores of a rank are compared with those near another rank's GPU."""
    (smi.parent / "matrix").write_text(SAMPLES["pcie_4"].tabbed())
    write_program(smi, f"cat {smi.parent}/matrix")
    environment = {"LOCAL_RANK": "1"} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert [label for label, _, _ in read_machine(environment=environment).processes] == labels


def write_program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.mark.usefixtures("no_driver")
def test_nvidia_smi(smi: Path) -> None:
    """If it fails, a machine without nvidia-ml-py has no topology."""
    (smi.parent / "matrix").write_text(SAMPLES["pcie_4"].tabbed())
    names = "".join(f"GPU {index}: NVIDIA L40S (UUID: GPU-{index})\\n" for index in range(4))
    write_program(smi, f"case $1 in topo) cat {smi.parent}/matrix;; -L) printf '{names}';; esac")
    machine = read_machine(environment={"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "2,3"})
    assert machine.gpus[3].name == "NVIDIA L40S"
    assert str(machine.link("GPU0", "mlx5_0")) == "PXB"
    assert machine.processes == (("GPU3", os.getpid(), frozenset(os.sched_getaffinity(0))),)


@pytest.mark.usefixtures("no_driver")
@pytest.mark.parametrize(
    ("program", "words"),
    [
        (None, "nvidia-smi is not on PATH"),
        ("echo No devices were found; exit 6", "nvidia-smi topo -m: No devices were found"),
        ("echo cannot communicate with the driver >&2; exit 9", "cannot communicate with the driver"),
        ("echo something else", "no matrix of nvidia-smi topo -m"),
    ],
)
def test_a_machine_without_a_gpu(program: str | None, words: str, smi: Path) -> None:
    """If it fails, a machine without a GPU ends in a traceback."""
    if program is not None:
        write_program(smi, program)
    assert words in refusal("topo")


def test_without_nvidia_ml_py(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, the message does not name what to install, and a misspelt source is not refused."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "pip install 'commopt-diagnose[topo]'" in refusal("topo", "--source", "nvml")
    assert "must be auto, nvml or nvidia-smi, got 'nvm'" in refusal("topo", "--source", "nvm")
    line = refusal("topo", "--source", "nvml", "--from", "a.txt")
    assert line == "commopt: --source nvml is for this machine: leave it out with a.txt"


def test_xml_with_links_that_join_nothing() -> None:
    """If it fails, links that a file lists in one direction, or to the GPU itself, count as links between two GPUs."""
    one_way = XML.replace('<nvlink target="0000:11:00.0" count="4" tclass="0x030200"/>', "")
    machine = read_content(one_way.encode(), "dump")
    assert machine.notices == ("links are listed in one direction only: GPU0 to GPU2",)
    itself = re.sub(r'(busid="([^"]*)"(?:(?!busid).)*?<nvlink target=)"[^"]*"', r'\1"\2"', XML, flags=re.DOTALL)
    machine = read_content(itself.encode(), "dump")
    assert str(machine.link("GPU0", "GPU2")) == "SYS"
    codes = {finding.code: finding.what for finding in find_all(machine)}
    assert codes["no_nvlink_column"].startswith("this is a file whose NVLinks lead to the GPU itself")
    assert "ring_over_sockets" not in codes
    twice = read_content((XML + XML).encode(), "dump")
    assert (len(twice.gpus), twice.notices) == (3, ("the file has 2 systems: only the first is shown",))


@pytest.mark.parametrize(
    ("vendor", "number", "name"), [("0x1002", "gfx942", "AMD gfx942"), ("0x1d94", "21943", "Hygon DCU")]
)
def test_xml_of_amd_and_hygon(vendor: str, number: str, name: str) -> None:
    """If it fails, their GPUs look as if only PCIe joined them, or get figures of NVIDIA's."""
    text = XML.replace("nvlink", "xgmi").replace('sm="80"', f'sm="94" gcn="{number}"')
    text = text.replace('vendor="0x10de"', f'vendor="{vendor}"')
    machine = read_content(text.encode(), "dump")
    assert (str(machine.link("GPU0", "GPU2")), machine.gpus[0].name) == ("XGMI", name)
    assert all(
        pair["expectation"] is None for pair in to_plain(machine, [])["pairs"] if pair["other"].startswith("GPU")
    )
    assert "far_nic" not in {finding.code for finding in find_all(machine)}


@pytest.mark.parametrize(("first", "last", "near"), [("0", "2", "GPU0"), ("2", "0", "GPU2"), ("2", "2", "GPU0")])
def test_xml_numbers_gpus_as_cuda_does(first: str, last: str, near: str) -> None:
    """If it fails, a GPU has the number of another one; where two claim one number, the order of the file counts."""
    text = XML.replace('<gpu dev="0"', f'<gpu dev="{first}"').replace(
        '<gpu dev="2" sm="80" rank="2"', f'<gpu dev="{last}"'
    )
    machine = read_content(text.encode(), "dump")
    assert [gpu.label for gpu in machine.gpus if str(machine.link(gpu.label, "mlx5_0")) == "PIX"] == [near]


def test_xml_leaves_out_what_is_no_adapter() -> None:
    """If it fails, a container's interfaces, or an adapter and what NCCL has merged it into, count as adapters."""
    net = '<net name="mlx5_0" dev="0" speed="200000" port="1" guid="0x1" maxconn="131072" gdr="1"/>'
    assert net in XML
    more = [net.replace("mlx5_0", name) for name in ("mlx5_1", "mlx5_0+mlx5_1", "veth268d", "br-3c27", "docker0")]
    machine = read_content(XML.replace(net, net + net + "".join(more)).encode(), "dump")
    assert [nic.name for nic in machine.nics] == ["mlx5_0", "mlx5_1"]
    assert machine.notices == ("virtual network interfaces are left out: 3",)


def test_xml_without_gpudirect() -> None:
    """If it fails, advice is to raise a distance where there is no GPUDirect RDMA at all."""
    findings = {each.code: each for each in find_all(read_content(XML.replace('gdr="1"', 'gdr="0"').encode(), "dump"))}
    assert findings["no_gdr"].what == "no GPUDirect RDMA for GPU0, GPU1, GPU2, mlx5_0 (gdr=0)"
    assert "far_nic" not in findings
    assert "Omni-Path" not in findings["no_gdr"].advice
    omni_path = XML.replace('gdr="1"', 'gdr="0"').replace("mlx5_0", "hfi1_0")
    (advice,) = (each.advice for each in find_all(read_content(omni_path.encode(), "dump")) if each.code == "no_gdr")
    assert "Omni-Path (hfi1) takes it from its own driver" in advice
    grace = XML.replace('rank="1" gdr="1"/>', 'rank="1" gdr="1"><c2c bw="44712" count="5"/></gpu>')
    machine = read_content(grace.encode(), "dump")
    assert machine.notices == ("NVLink-C2C joins CPU and GPU: GPU1",)
    (far,) = (each for each in find_all(machine) if each.code == "far_nic")
    assert far.what == "no NIC nearer than SYS to GPU2"


def test_static_file_of_a_cloud() -> None:
    """If it fails, a file for NCCL_TOPO_FILE is refused, or called slow for NVLinks that it never lists."""
    text = re.sub(r"<gpu [^>]*/>|<(gpu|nic)\b.*?</\1>", "", XML, flags=re.DOTALL)
    machine = read_content(f"<!-- GPUs & NICs -->{text}".encode(), "static")
    assert [(gpu.bus_id, gpu.numa_node) for gpu in machine.gpus] == [
        ("0000:11:00.0", 0),
        ("0000:21:00.0", 0),
        ("0000:91:00.0", 1),
    ]
    assert [nic.name for nic in machine.nics] == ["0000:12:00.0"]
    assert str(machine.link("GPU0", "NIC0")) == "PIX"
    assert [finding.code for finding in find_all(machine)] == ["narrow_pcie", "no_nvlink_column"]
    without_class = re.sub(r' class="\w+"', "", text)
    with pytest.raises(TopologyError, match=r"has no GPU \(no <gpu>, no PCI class 0x0302\)"):
        read_content(without_class.encode(), "static")


def test_gzip() -> None:
    """If it fails, a compressed file is called binary."""
    packed = gzip.compress(SAMPLES["pcie_4"].tabbed().encode())
    assert len(read_content(packed, "sent").gpus) == 4
    with pytest.raises(TopologyError, match=r"^sent: the gzip file is damaged"):
        read_content(packed[:40], "sent")


BAD_FILES = {
    "missing": (None, "No such file"),
    "empty": (b" \n", "the file is empty"),
    "binary": (bytes(range(256)), "not a text file"),
    "text": (b"Epoch 0\n", "no matrix of nvidia-smi topo -m, and no XML"),
    "cut_xml": (XML[:900].encode(), "is cut off: it has no </system>"),
    "xml_from_its_middle": (XML[XML.index("<pci busid") :].encode(), "is cut off: it has no <system>"),
    "damaged_xml": (XML.replace("<nic>", "<nick>").encode(), "is damaged: mismatched tag"),
    "other_xml": (b"<system><cpu/></system>", "has no GPU"),
    "xml_without_a_cpu": (b"<system><pci><cpu/></pci></system>", "has no GPU"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_input_is_one_line(name: str, tmp_path: Path) -> None:
    """If it fails, a wrong file ends in a traceback, or in an empty topology."""
    content, words = BAD_FILES[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert words in refusal("topo", tmp_path / name)


def test_a_file_is_named_once(tmp_path: Path) -> None:
    """If it fails, one of two files is read without a word, or --from is not what an argument is."""
    (tmp_path / "a.txt").write_text(SAMPLES["pcie_4"].spaced())
    path = tmp_path / "a.txt"
    assert commopt("topo", path).output == commopt("topo", "--from", path).output
    assert (
        refusal("topo", path, "--from", "b.txt")
        == f"commopt: FILE {path} and --from b.txt are two sources: give one of them"
    )


def test_a_page_needs_a_folder_as_the_files_of_bench_do(tmp_path: Path) -> None:
    """If it fails, a mistyped path becomes a folder."""
    (tmp_path / "a.txt").write_text(SAMPLES["pcie_4"].spaced())
    line = refusal("topo", tmp_path / "a.txt", "--output", tmp_path / "pages" / "a.html")
    assert "there is no folder" in line
    assert not (tmp_path / "pages").exists()


def test_json_page_and_input(tmp_path: Path) -> None:
    """If it fails, programs cannot read a topology, or a page shows markup that came with a file."""
    page = tmp_path / "topology.html"
    text = SAMPLES["pcie_4"].spaced() + "GPU 0: NVIDIA <script>L40S\n"
    found = json.loads(commopt("topo", "-", "--json", "--output", page, input=text).stdout)
    assert found["source"] == "input"
    (pair,) = (each for each in found["pairs"] if (each["one"], each["other"]) == ("GPU0", "GPU1"))
    assert (pair["link"], pair["meaning"]) == ("PIX", "one PCIe switch between them")
    assert pair["expectation"]["bytes_per_s"] == 18.5e9
    assert {each["code"] for each in found["findings"]} == {"ring_over_sockets", "fewer_nics"}
    written = page.read_text()
    assert "every ring over all 4 GPUs crosses SYS" in written
    assert "NVIDIA &lt;script&gt;L40S" in written
    assert "<script" not in written


def damaged(chance: random.Random) -> Iterator[bytes]:
    """Gives files that were cut, mixed and written over."""
    names = chance.sample(sorted(SAMPLES), 2)
    texts = [SAMPLES[names[0]].tabbed(), SAMPLES[names[1]].spaced(), XML]
    for text in texts:
        content = bytearray(text.encode())
        begin = chance.randrange(len(content))
        yield bytes(content[begin:])
        yield bytes(content[:begin])
        for _ in range(len(content) // 60):
            content[chance.randrange(len(content))] = chance.choice(b'\t\n NVGPUXSYS0123456789<>"&\x00\x1b\xff')
        yield bytes(content)
        words = text.split(" ")
        chance.shuffle(words)
        yield " ".join(words).encode()
        lines = text.splitlines()
        yield "\n".join(line[chance.randrange(len(line) + 1) :] for line in lines).encode()
        yield "\n".join(chance.choices([line for each in texts for line in each.splitlines()], k=60)).encode()
    yield chance.randbytes(5000)
    yield b"GPU0 GPU1 " * 3000 + b"\nGPU0 X" + b" NV999" * 5000
    yield b"<system>" + b"<cpu><pci>" * 20_000 + b"</system>"


def show(machine: Machine, folder: Path) -> None:
    """Does all that the command does."""
    findings = find_all(machine)
    json.dumps(to_plain(machine, findings))
    with (folder / "out").open("w") as file:
        print_topology(machine, findings, Console(file=file, width=100))
    write_page(machine, findings, folder / "page.html")


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 16))])
def test_no_file_breaks_it(seed: int, tmp_path: Path) -> None:
    """If it fails, a file that was damaged on its way ends in a traceback."""
    for content in damaged(random.Random(seed)):
        try:
            machine = read_content(content, "sent")
        except TopologyError as error:
            message = str(error)
        else:
            show(machine, tmp_path)
            continue
        assert len(message.splitlines()) == 1


def test_docs_show_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, docs/topology.md shows what the command does not print."""
    monkeypatch.chdir(tmp_path)
    Path("pcie.txt").write_text(PRINTED["pcie"].tabbed())
    output = commopt("topo", "pcie.txt").output
    assert is_documented("topology.md", "commopt topo pcie.txt", output)


def test_links_without_a_count_are_not_nccls() -> None:
    """If it fails, an invented example with NVLinks reads as a machine without them."""
    text = '<system version="1"><cpu numaid="0"><pci busid="0000:01:00.0"><gpu dev="0"><nvlink target="1"/></gpu></pci>'
    with pytest.raises(TopologyError, match="a link of a GPU has no count"):
        read_content(f"{text}</cpu></system>".encode(), "invented")
