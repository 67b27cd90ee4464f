"""Hosts meet, try connections to each other, and say who is missing or cannot be reached."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from commopt_diagnose.doctor.facts import Facts, Port, can_dma_buf, has_peer_memory, has_sharp_plugin
from commopt_diagnose.doctor.findings import find, find_in_adapters, find_wrong_interfaces
from commopt_diagnose.doctor.meeting import (
    ListeningPort,
    MeetingError,
    UnreachablePort,
    disambiguate_hosts,
    find_unreachable,
    interfaces_to_try,
    listen_on_ports,
    meet,
)
from commopt_diagnose.doctor.terminal import list_unchecked
from commopt_diagnose.rank_identity import RankIdentity
from lightning_commopt.launch.interfaces import Interface, choose_for_gloo, choose_for_nccl
from lightning_commopt.launch.lab import NetLab, RankError
from lightning_commopt.testing.ranks import PROCESSES
from lightning_commopt.text.findings import Finding, Severity
from support.ranks import run_ranks  # noqa: F401 - tells the fork server what to import

LOOPBACK = Interface("lo", "127.0.0.1", 8)
ETHERNET = Interface("eth0", "10.0.0.1", 24)
FACTS = Facts(
    host="a", address="10.0.0.1", versions={"torch": "2.15.0"}, num_cores=8, num_threads=1,
    interfaces=(LOOPBACK, ETHERNET), gloo_interface=ETHERNET, nccl_interface=ETHERNET, no_topology="no GPU",
)  # fmt: skip
PORT = Port(name="mlx5_0:1", state="ACTIVE", rate="400 Gb/sec (4X NDR)", errors={})


def met(rank: int, world_size: int, port: int, limit_s: float) -> Any:
    """Returns what one rank learns, as hosts a, b and so on; runs in a process of its own."""
    hosts = tuple("abcd"[:world_size])
    identity = RankIdentity(
        rank=rank,
        world_size=world_size,
        host=hosts[rank],
        address="127.0.0.1",
        port=port,
        hosts_store=rank == 0,
        rank_hosts=hosts,
        is_of_launcher=False,
    )
    facts = replace(FACTS, rank=rank, host=hosts[rank], gloo_interface=LOOPBACK, nccl_interface=LOOPBACK)
    try:
        meeting = meet(facts, identity, limit_s=limit_s)
    except MeetingError as error:
        return str(error)
    return [each.host for each in meeting.all_facts], meeting.all_facts[rank] == facts, meeting.unreachable


def test_hosts_of_one_name() -> None:
    """If it fails, two machines that are both called localhost count as one, and are not tried."""
    all_facts = [replace(FACTS, rank=rank) for rank in range(4)]
    named = [each.host for each in disambiguate_hosts(all_facts, listeners=[0, 2])]
    assert named == ["a (rank 0)", "a (rank 0)", "a (rank 2)", "a (rank 2)"]
    assert disambiguate_hosts(all_facts, listeners=[0]) == all_facts


def test_a_meeting_and_one_that_somebody_misses(port: int) -> None:
    """If it fails, hosts are compared wrongly, or nobody is told who is missing."""
    with PROCESSES.Pool(3) as pool:
        found = pool.starmap_async(met, [(rank, 3, port, 60.0) for rank in range(3)], chunksize=1).get(120)
        assert found == [(["a", "b", "c"], True, [])] * 3
        found = pool.starmap_async(met, [(rank, 4, port, 0.5) for rank in range(3)], chunksize=1).get(120)
    assert found[0].startswith(f"d did not reach 127.0.0.1:{port} within 0.5 s")
    assert found == found[:1] * 3


def test_an_interface_that_nobody_uses_is_not_tried() -> None:
    """If it fails, hosts that train on CPU are refused for an address that only NCCL would take."""
    facts = replace(FACTS, nccl_interface=DOCKER)
    assert interfaces_to_try(facts) == {"gloo": ETHERNET, "NCCL": None}
    assert interfaces_to_try(replace(facts, gpus=["H100"])) == {"gloo": ETHERNET, "NCCL": DOCKER}
    assert interfaces_to_try(FACTS) == {"gloo": ETHERNET, "NCCL": ETHERNET}


def test_ports_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a connection that works counts as failed, or one that fails passes."""
    with listen_on_ports({"gloo": LOOPBACK, "NCCL": LOOPBACK, "none": None}) as ports:
        (port,) = ports
        assert (port.interface, port.users) == ("lo", "gloo and NCCL")
        assert find_unreachable("a", {"a": ports, "b": ports}, limit_s=5) == []
    (closed,) = find_unreachable("a", {"b": ports}, limit_s=5)
    assert closed[:3] == ("a", "b", port)
    assert find_unreachable("b", {"b": ports}, limit_s=5) == []
    assert "a firewall rejects it" in closed.reason
    monkeypatch.setattr(socket, "create_connection", mock.Mock(side_effect=TimeoutError))
    assert "no answer within 5 s" in find_unreachable("a", {"b": ports}, limit_s=5)[0].reason


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this kernel has no IPv6")
def test_ports_of_a_host_with_ipv6_only() -> None:
    """If it fails, hosts without IPv4 do not meet, or count as unreachable."""
    with listen_on_ports({"gloo": Interface("lo", "::1", 128)}) as ports:
        assert find_unreachable("a", {"b": ports}, limit_s=5) == []
    ethernet = Interface("eth0", "fd77::1", 64)
    facts = replace(FACTS, address="fd77::1", gloo_interface=ethernet, nccl_interface=ethernet, gpus=("H100",))
    named = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
    for environment in ({}, named):
        assert list(find_wrong_interfaces(replace(facts, environment=environment), has_others=True)) == []


def test_unreachable_ports_are_errors() -> None:
    """If it fails, who cannot reach whom, on which port and interface, is not reported."""
    closed = [
        UnreachablePort("a", "b", ListeningPort("eth0", "10.0.0.2", 40123, "gloo and NCCL"), "no answer within 5 s")
    ]
    (finding,) = find([FACTS, replace(FACTS, rank=1, host="b")], closed)
    assert (finding.severity, finding.where) == ("error", "a")
    assert finding.what == (
        "cannot reach b at port 40123 of 10.0.0.2 (eth0, which gloo and NCCL would use): no answer within 5 s"
    )
    assert "GLOO_SOCKET_IFNAME" in finding.advice
    (finding,) = find([FACTS], gloo_error="Connection closed by peer")
    assert "an all-reduce over gloo fails: Connection closed by peer" in finding.what


DOCKER, INFINIBAND = Interface("docker0", "172.17.0.1"), Interface("ib0", "10.1.0.1")
HERE = [LOOPBACK, DOCKER, ETHERNET, Interface("eth1", "10.0.1.1")]


@pytest.mark.parametrize(
    ("there", "variable", "chosen"),
    [
        (HERE, None, "eth0"),
        ([*HERE, INFINIBAND], None, "ib0"),
        ([LOOPBACK, DOCKER], None, "docker0"),
        ([LOOPBACK], None, "lo"),
        (HERE, "eth1", "eth1"),
        (HERE, "eth", "eth0"),
        (HERE, "=eth", None),
        (HERE, "=eth1,eth0", "eth0"),
        (HERE, "^docker,lo", "eth0"),
        (HERE, "^=eth0,lo,docker0", "eth1"),
        (HERE, "ens", None),
    ],
)
def test_the_interface_of_nccl(there: list[Interface], variable: str | None, chosen: str | None) -> None:
    """If it fails, connections are tried on an interface that NCCL does not take."""
    environment = {} if variable is None else {"NCCL_SOCKET_IFNAME": variable}
    found = choose_for_nccl(there, environment)
    assert (None if found is None else found.name) == chosen


def test_the_interface_of_gloo() -> None:
    """If it fails, connections are tried on an interface that gloo does not take."""
    assert choose_for_gloo(HERE, {}, "10.0.1.1") == HERE[3]
    assert choose_for_gloo(HERE, {}, None) is None
    assert choose_for_gloo(HERE, {"GLOO_SOCKET_IFNAME": "docker0"}, "10.0.1.1") == DOCKER
    assert choose_for_gloo(HERE, {"GLOO_SOCKET_IFNAME": "eth"}, "10.0.1.1") is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"address": "127.0.1.1"}, "name resolves to 127.0.1.1"),
        ({"address": "127.0.1.1", "environment": {"GLOO_SOCKET_IFNAME": "eth0"}}, None),
        (
            {"address": "203.0.113.5", "is_own_address": False, "gloo_interface": None},
            "resolves to 203.0.113.5, which this host does not have; there are: lo 127.0.0.1, eth0 10.0.0.1",
        ),
        ({"address": "10.0.0.7", "gloo_interface": None}, None),
        ({"gloo_interface": None, "environment": {"GLOO_SOCKET_IFNAME": "eth9"}}, "GLOO_SOCKET_IFNAME=eth9, and there"),
        (
            {"nccl_interface": None, "environment": {"NCCL_SOCKET_IFNAME": "ens"}},
            "there are: lo 127.0.0.1, eth0 10.0.0.1",
        ),
        ({"nccl_interface": DOCKER, "gpus": ["H100"]}, "NCCL would use docker0"),
        ({"nccl_interface": DOCKER}, None),
    ],
)
def test_wrong_interfaces(changes: dict[str, Any], words: str | None) -> None:
    """If it fails, an interface that other hosts cannot reach passes, or one that they can is called wrong."""
    found = [finding.what for finding in find_wrong_interfaces(replace(FACTS, **changes), has_others=True)]
    assert len(found) == (words is not None)
    assert words is None or words in found[0]


def test_lists_that_differ() -> None:
    """If it fails, hosts that were given other lists look alike."""
    facts = replace(FACTS, hosts=["a", "b"], world_size=2)
    found = find([facts, replace(facts, rank=1, host="b", hosts=["a", "b", "c"], world_size=3)])
    assert [finding.what for finding in found] == [
        "--hosts differs: a,b on rank 0, a,b,c on rank 1",
        "the number of ranks differs: 2 on rank 0, 3 on rank 1",
    ]


def test_what_the_topology_says_is_passed_on() -> None:
    """If it fails, a broken NVLink is seen by commopt topo only."""
    severities: tuple[Severity, ...] = ("error", "slow", "note")
    hurts = [Finding(severity=severity, what=severity, advice="advice") for severity in severities]
    found = find([replace(FACTS, topology=hurts)])
    assert [(finding.severity, finding.what) for finding in found] == [("error", "error"), ("slow", "slow")]


def test_adapters_at_different_rates() -> None:
    """If it fails, a port that came up at half its rate passes."""
    ports = [PORT, replace(PORT, name="mlx5_1:1", rate="200 Gb/sec (2X NDR)")]
    (finding,) = find_in_adapters(replace(FACTS, ports=ports))
    assert "mlx5_0:1 400 Gb/sec (4X NDR), mlx5_1:1 200 Gb/sec (2X NDR)" in finding.what
    alone, other = (replace(FACTS, ports=[port]) for port in ports)
    (finding,) = find([alone, replace(other, rank=1, host="b")])
    assert finding.what.startswith("the rate of InfiniBand or RoCE ports differs")


def test_gpudirect_rdma_and_sharp(tmp_path: Path) -> None:
    """If it fails, a host without GPUDirect RDMA passes, or one that has it through DMA-BUF is called slow."""
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/modules").write_text("nvidia_peermem 16384 0 - Live\n")
    assert has_peer_memory(tmp_path)
    version = tmp_path / "proc/driver/nvidia/version"
    version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54\n")
    assert can_dma_buf(tmp_path, "5.15.0-100-generic")
    assert not can_dma_buf(tmp_path, "5.4.0")
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54\n")
    assert not can_dma_buf(tmp_path, "6.8.0")
    assert not has_sharp_plugin(tmp_path, {"LD_LIBRARY_PATH": str(tmp_path)})
    (tmp_path / "libnccl-net.so").touch()
    assert has_sharp_plugin(tmp_path, {"LD_LIBRARY_PATH": f"/nowhere:{tmp_path}"})
    asked = replace(FACTS, gpus=["H100"], has_gpu_driver=True, ports=[PORT], environment={"NCCL_COLLNET_ENABLE": "1"})
    assert [finding.code for finding in find_in_adapters(asked)] == ["no_sharp", "no_gdr"]
    assert list(find_in_adapters(replace(asked, can_dma_buf=True, has_sharp_plugin=True))) == []


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"sys/class/infiniband/rdmap16s27/device/p2p": "NVIDIA"}, True),
        (
            {"sys/class/infiniband/rdmap16s27/device/p2p": "NVIDIA peermem", "proc/modules": "efa 1 0 - Live 0x0\n"},
            True,
        ),
        ({"proc/modules": "efa_nv_peermem 16384 0 - Live 0x0\n"}, True),
        ({"sys/class/infiniband/rdmap16s27/device/p2p": ""}, False),
        ({"sys/class/infiniband/rdmap16s27/device/p2p": "NEURON"}, False),
    ],
)
def test_gpudirect_rdma_of_efa(files: dict[str, str], expected: bool, tmp_path: Path) -> None:
    """If it fails, healthy hosts of AWS are told to load a module that their adapters do not need."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert has_peer_memory(tmp_path) == expected


_IDLE = replace(PORT, name="mlx5_bond_0:1", state="DOWN", rate="25 Gb/sec (1X EDR)", errors={"link_downed": 1})
_STORAGE = replace(_IDLE, name="mlx5_10:1", state="ACTIVE")


@pytest.mark.parametrize(
    ("chosen", "codes"),
    [
        (None, ["port_errors", "port_errors", "port_state", "unequal_rates"]),
        ("mlx5", ["port_errors", "port_errors", "port_state", "unequal_rates"]),
        ("mlx5_1", ["port_errors"]),
        ("=mlx5_0", []),
        ("=mlx5_0:1,mlx5_9", []),
        ("mlx5_0:1", []),
        ("^mlx5_1,mlx5_bond", []),
        ("^=mlx5_10,mlx5_bond_0:1", []),
        ("=mlx5", ["no_adapter"]),
        ("mlx5_0:2", ["no_adapter"]),
        ("ibp", ["no_adapter"]),
    ],
)
def test_adapters_that_nccl_was_told_to_leave_out(chosen: str | None, codes: list[str]) -> None:
    """If it fails, who follows the advice to name adapters in NCCL_IB_HCA gets the same advice again."""
    environment = {} if chosen is None else {"NCCL_IB_HCA": chosen}
    facts = replace(FACTS, gpus=["H100"], ports=[PORT, _STORAGE, _IDLE], environment=environment)
    assert sorted(finding.code for finding in find_in_adapters(facts)) == codes
    other = replace(facts, rank=1, host="b", ports=[PORT, replace(_IDLE, rate="10 Gb/sec (4X SDR)")])
    rates = [finding.what for finding in find([facts, other]) if "the rate of" in finding.what]
    assert len(rates) == (chosen in (None, "mlx5", "mlx5_1"))


@pytest.mark.parametrize(
    ("changes", "codes"),
    [
        ({}, ["locked_memory", "no_gdr"]),
        ({"gpus": [], "has_gpu_driver": False}, []),
        ({"gpus": ["AMD Instinct MI300X"], "has_gpu_driver": False}, ["locked_memory"]),
        ({"environment": {"NCCL_IB_DISABLE": "1"}}, []),
        ({"ports": [replace(PORT, state="DOWN")]}, ["port_state"]),
        ({"has_verbs_files": False}, ["no_verbs_files"]),
        ({"ports": [replace(PORT, name="hfi1_0:1")]}, ["locked_memory"]),
        ({"ports": [PORT, replace(PORT, name="hfi1_0:1")]}, ["locked_memory", "no_gdr"]),
    ],
)
def test_adapters_that_nccl_does_not_use(changes: dict[str, Any], codes: list[str]) -> None:
    """If it fails, a healthy host gets an error about adapters that training does not use, such as its Ethernet."""
    facts = replace(FACTS, gpus=["H100"], has_gpu_driver=True, ports=[PORT], max_locked_bytes=2**23)
    assert [finding.code for finding in find_in_adapters(replace(facts, **changes))] == codes


def test_hosts_that_have_the_same_address() -> None:
    """If it fails, a bridge of containers that NCCL takes on each host looks like a firewall between them."""
    bridge = Interface("br-3c27", "172.18.0.1", 16)
    facts = replace(FACTS, interfaces=(LOOPBACK, bridge, ETHERNET), nccl_interface=bridge)
    closed = UnreachablePort("a", "b", ListeningPort("br-3c27", "172.18.0.1", 40123, "NCCL"), "refused")
    (finding,) = find([facts, replace(facts, rank=1, host="b")], [closed])
    assert finding.what == (
        "cannot reach b at 172.18.0.1 (br-3c27, which NCCL would use): this host has the same address"
    )
    assert "NCCL_SOCKET_IFNAME" in finding.advice


@pytest.mark.parametrize(("named", "codes"), [({}, ["host_name"]), ({"GLOO_SOCKET_IFNAME": "lo"}, ["own_address"])])
def test_a_loopback_address_is_reported_once(named: dict[str, str], codes: list[str]) -> None:
    """If it fails, the most frequent mistake in /etc/hosts has two reasons, one of them wrong."""
    facts = replace(FACTS, address="127.0.1.1", gloo_interface=LOOPBACK, environment=named)
    closed = UnreachablePort("a", "b", ListeningPort("lo", "127.0.0.1", 40123, "gloo"), "refused")
    other = replace(facts, rank=1, host="b", address="10.0.0.2", gloo_interface=ETHERNET)
    assert [finding.code for finding in find([facts, other], [closed]) if finding.where == "a"] == codes


def test_a_topology_that_could_not_be_read() -> None:
    """If it fails, a host whose driver does not work, or lacks a tool, looks as if it had no GPU."""
    reason = "NVML: Driver/library version mismatch; nvidia-smi is not on PATH"
    broken = replace(FACTS, host="b", has_gpu_driver=True, no_topology=reason)
    other = replace(broken, host="c", gpus=["AMD Instinct MI300X"], has_gpu_driver=False)
    given_none = replace(broken, host="d", has_gpu_files=False)
    lines = list_unchecked([FACTS, broken, other, given_none])
    assert lines[:2] == ["links between GPUs: no GPU on a, d", f"links between GPUs on b, c: {reason}"]


def test_what_was_not_checked() -> None:
    """If it fails, nothing found looks like nothing wrong."""
    assert [line.partition(":")[0] for line in list_unchecked([FACTS])] == [
        "connections to other hosts",
        "links between GPUs",
        "InfiniBand, RoCE and GPUDirect RDMA",
    ]
    whole = replace(FACTS, ports=[PORT], no_topology=None, environment={"NCCL_COLLNET_ENABLE": "1"})
    assert list_unchecked([whole, replace(whole, rank=1, host="b")]) == []


@pytest.fixture(scope="module")
def lab(lab_machine: None) -> Iterator[NetLab]:
    with NetLab(2) as lab:
        yield lab


def outputs(lab: NetLab, script: str) -> list[str]:
    """Runs a script on both hosts, as nobody's rank, and returns what they print, whether they fail or not."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # of a venv that is not activated
    environment = {"RANK": "", "COLUMNS": "200", "PATH": path}
    try:
        return lab.run(["sh", "-c", script], environment=environment, timeout_s=240)
    except RankError as error:
        return error.outputs


BLOCK = """
if [ $NODE_RANK = 1 ]; then
    ip rule add pref 10 ipproto tcp dport 29511 lookup main
    ip rule add pref 20 to 10.0.0.1 ipproto tcp sport 30000-65534 blackhole
fi
"""


@pytest.mark.exhaustive
def test_two_hosts(lab: NetLab) -> None:
    """If it fails, two hosts without a launcher cannot be compared."""
    first, second = outputs(lab, "NCCL_ALGO=$NODE_RANK commopt doctor --hosts 10.0.0.1,host1 --json; echo status $?")
    found = json.loads(first[: first.rindex("status")])
    assert [each["what"] for each in found["findings"] if "differs" in each["what"]] == [
        "NCCL_ALGO differs: 0 on rank 0, 1 on rank 1"
    ]
    assert [each["gloo_interface"] for each in found["ranks"]] == [["eth0", "10.0.0.1", 24], ["eth0", "10.0.0.2", 24]]
    assert second.strip() == "status 1"


BRIDGE = """
ip link add ib0 type veth peer name unused; ip link set unused up; ip addr add 172.18.0.1/16 dev ib0; ip link set ib0 up
unset NCCL_SOCKET_IFNAME
"""


@pytest.mark.exhaustive
def test_an_interface_of_nccl_on_hosts_without_gpus(lab_machine: None) -> None:
    """If it fails, hosts that train on CPU are refused for an address that only NCCL would take."""
    with NetLab(2) as bridged:
        first, _ = outputs(bridged, f"{BRIDGE} commopt doctor --hosts host0,host1")
    assert "host0, host1: gloo would use eth0, NCCL would use ib0\nNothing is wrong" in first


@pytest.mark.exhaustive
def test_two_hosts_of_slurm(lab: NetLab) -> None:
    """If it fails, srun commopt doctor does not meet."""
    variables = (
        "SLURM_JOB_ID=77 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST='host[0-1]' SLURM_NODEID=$NODE_RANK"
        " SLURM_STEP_TASKS_PER_NODE='1(x2)' SLURM_PROCID=$NODE_RANK SLURM_LOCALID=0 SLURMD_NODENAME=host$NODE_RANK"
    )
    first, _ = outputs(lab, f"{variables} commopt doctor")
    assert "2 ranks on 2 hosts\nhost0, host1: gloo would use eth0, NCCL would use eth0\nNothing is wrong" in first


@pytest.mark.exhaustive
def test_a_host_that_never_comes(lab: NetLab) -> None:
    """If it fails, a host that is down keeps the others waiting, and nobody is told which it is."""
    first, _ = outputs(lab, "[ $NODE_RANK = 1 ] || commopt doctor --hosts host0,host1 --limit-s 2")
    assert first.startswith("commopt: host1 did not reach host0:29511 within 2 s")
    _, second = outputs(lab, "[ $NODE_RANK = 0 ] || commopt doctor --hosts host0,host1 --limit-s 2; true")
    assert second.startswith("commopt: host0 refuses connections to port 29511")


@pytest.mark.exhaustive
def test_a_firewall_between_hosts(lab_machine: None) -> None:
    """If it fails, hosts that meet, but cannot open the ports of gloo and NCCL, look ready to train."""
    with NetLab(2) as blocked:
        first, _ = outputs(blocked, f"{BLOCK} commopt doctor --hosts host0,host1; true")
    assert "Fix this first:\nerror: host0: cannot reach host1 at port " in first
    assert "of 10.0.0.2 (eth0, which gloo and NCCL would use): no answer within 5 s: probably a firewall" in first


@pytest.mark.exhaustive
def test_a_meeting_place_that_cannot_be_reached(lab_machine: None) -> None:
    """If it fails, a route that is missing looks like a host that is late."""
    with NetLab(2) as blocked:
        script = "[ $NODE_RANK = 0 ] || ip route add unreachable 10.0.0.1"
        _, second = outputs(blocked, f"{script}; commopt doctor --hosts host0,host1 --limit-s 8; true")
    assert "host0:29511 cannot be reached: no route to that host" in second
