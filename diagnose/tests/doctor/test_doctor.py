"""commopt doctor finds what keeps hosts from training together, and says what to do."""

import json
import os
import resource
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from commopt_diagnose.doctor.facts import Facts, Port, collect_facts, max_locked_bytes, quota_cores, read_ports
from commopt_diagnose.doctor.findings import find
from commopt_diagnose.doctor.meeting import MeetingError, check_port
from commopt_diagnose.rank_identity import find_rank_identity
from commopt_diagnose.topology.machine import TopologyError, parse_cpus
from lightning_commopt.launch.interfaces import Interface
from lightning_commopt.measure.plain import from_plain
from lightning_commopt.text.findings import Finding, Line
from support.commopt import commopt

_PORT = Port(name="mlx5_0:1", state="ACTIVE", rate="400 Gb/sec (4X NDR)", errors={})
_HEALTHY = Facts(
    host="node0",
    address="10.0.0.1",
    versions={"torch": "2.15.0", "nccl": "2.30.7"},
    gpus=["H100"] * 8,
    has_gpu_driver=True,
    num_cores=64,
    num_threads=8,
    ranks_per_node=8,
    shared_memory_bytes=2**36,
    ports=[_PORT],
    has_peer_memory=True,
    environment={"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "8"},
)


def test_a_healthy_host_has_no_findings() -> None:
    """If it fails, users learn to ignore what the doctor says."""
    assert find([_HEALTHY]) == []
    assert find([_HEALTHY, replace(_HEALTHY, rank=1, host="node1", address="10.0.0.2")]) == []


def test_facts_of_a_later_version_are_read() -> None:
    """If it fails, hosts with different versions of this package end in a TypeError instead of a finding."""
    line = Line(text="x", file="log", number=1)
    finding = Finding(severity="note", what="a", advice="b", evidence=(line,))
    interface = Interface("eth0", "10.0.0.1", 24)
    facts = replace(
        _HEALTHY, gpus=("H100",), ports=(_PORT,), interfaces=(interface,), gloo_interface=interface, topology=(finding,)
    )
    plain = json.loads(json.dumps(asdict(facts)))
    assert from_plain(Facts, plain) == facts
    for added in (plain, plain["ports"][0], plain["topology"][0], plain["topology"][0]["evidence"][0]):
        added["added"] = 1
    plain["interfaces"][0].append("added")
    plain["gloo_interface"].append("added")
    assert from_plain(Facts, plain) == facts


@pytest.mark.parametrize(
    ("fault", "severity", "what", "advice"),
    [
        ({"gpus": []}, "error", "finds no CUDA device", "torch that is built for CUDA"),
        ({"gpus": [], "has_gpu_files": False}, "warning", "there is no GPU here: no /dev/nvidia0", "--gpus all"),
        ({"shared_memory_bytes": 2**26}, "warning", "/dev/shm has 64 MiB", "--ipc=host"),
        ({"environment": {"NCCL_DEBGU": "INFO"}}, "error", "did you mean NCCL_DEBUG?", "unset NCCL_DEBGU"),
        ({"environment": {"GLOO_SOCKET_IFNAME": "ib{0}"}}, "error", "GLOO_SOCKET_IFNAME=ib{0}, and", "set it"),
        ({"environment": {"GLOO_SOCKET_IFNAME": "^lo"}}, "error", "GLOO_SOCKET_IFNAME=^lo, and", "whole name"),
        ({"environment": {"NCCL_SOCKET_IFNAME": "ib"}}, "error", "NCCL_SOCKET_IFNAME=ib leaves no interface", "set it"),
        ({"max_locked_bytes": 2**16}, "error", "lock 0 MiB", "ulimit -l unlimited"),
        ({"max_locked_bytes": 2**23}, "error", "lock 8 MiB", "IPC_LOCK"),
        ({"has_peer_memory": False}, "warning", "nvidia_peermem is not loaded", "modprobe"),
        ({"ports": [replace(_PORT, state="DOWN")]}, "warning", "mlx5_0:1 is DOWN", "cable"),
        ({"ports": [_PORT, *(replace(_PORT, name=name, state="DOWN") for name in ("mlx5_2:1", "mlx5_3:1"))]}, "warning",
         "ports mlx5_2:1, mlx5_3:1 are DOWN", "not in use"),
        ({"ports": [replace(_PORT, errors={"link_downed": 3})]}, "warning", "link_downed 3", "grow"),
    ],
)  # fmt: skip
def test_a_fault_of_a_host(fault: dict[str, Any], severity: str, what: str, advice: str) -> None:
    """If it fails, a fault that is known passes."""
    (finding,) = find([replace(_HEALTHY, **fault)])
    assert (finding.severity, finding.where) == (severity, "node0")
    assert what in finding.what
    assert advice in finding.advice


@pytest.mark.parametrize(
    ("limit", "capabilities", "users", "expected"),
    [
        (2**13, "0000000000000000", "0 0 4294967295", 2**13),
        (2**13, "000001fffeffffff", "0 0 4294967295", None),
        (2**13, "000001fffeffffff", "0 1000 1", 2**13),
        (2**13, "000001fffeffbfff", "0 0 4294967295", 2**13),
        (resource.RLIM_INFINITY, "0000000000000000", "0 0 4294967295", None),
    ],
)
def test_memory_that_may_be_locked(
    limit: int, capabilities: str, users: str, expected: int | None, tmp_path: Path
) -> None:
    """If it fails, a healthy host gets an error: the kernel asks root's capability first, except in user namespaces."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text(f"Name:\tpython\nCapEff:\t{capabilities}\nSeccomp:\t0\n")
    (tmp_path / "proc/self/uid_map").write_text(f"         {users}\n")
    with mock.patch("resource.getrlimit", return_value=(limit, limit)):
        assert max_locked_bytes(tmp_path) == expected


def test_an_eighth_of_the_memory_is_enough_to_lock() -> None:
    """Distributions allow that, which is no error."""
    assert find([replace(_HEALTHY, max_locked_bytes=2**38)]) == []


def test_threads_of_all_ranks_are_compared_with_the_cores_of_all() -> None:
    """If it fails, ranks that are pinned to cores of their own are told to take fewer threads, or others are not."""
    pinned = [replace(_HEALTHY, rank=rank, num_cores=8, cores=f"{8 * rank}-{8 * rank + 7}") for rank in range(8)]
    assert find(pinned) == []
    other = [replace(facts, rank=facts.rank + 8, host="node1") for facts in pinned]
    assert find([*pinned, *other]) == []
    for cores, num_cores, best in (("0-63", 64, 8), ("0-7", 8, 1), ("", 64, 8)):
        shared = [replace(facts, num_cores=num_cores, cores=cores, num_threads=16) for facts in pinned]
        (finding,) = find(shared)
        assert (finding.severity, finding.where, finding.advice) == ("warning", "node0", f"OMP_NUM_THREADS={best}")
        assert finding.what == f"8 ranks have 128 threads together, and may use {num_cores} cores"


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/", {"cpu.max": "400000 100000"}, 4),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/user.slice/user-7.slice/session-1.scope", {"user.slice/user-7.slice/cpu.max": "400000 100000"}, 4),
        ("0::/a/b", {"a/cpu.max": "150000 100000", "a/b/cpu.max": "400000 100000"}, 1.5),
        ("3:cpu,cpuacct:/docker/7", {"cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "100000"}, 1.5),
        ("3:cpu:/a", {"cpu/a/cpu.cfs_quota_us": "150000", "cpu/a/cpu.cfs_period_us": "100000"}, 1.5),
        ("3:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("3:cpuset:/a", {"a/cpu.max": "400000 100000"}, None),
        ("0::/", {}, None),
    ],
)
def test_threads_of_a_container_are_compared_with_its_limit(
    groups: str, files: dict[str, str], expected: float | None, tmp_path: Path
) -> None:
    """If it fails, a pod that may use 4 cores starts a thread for each core of its host, and nobody says so."""
    files = {f"sys/fs/cgroup/{name}": text for name, text in files.items()} | {"proc/self/cgroup": groups}
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    assert quota_cores(tmp_path) == expected
    found = find([replace(_HEALTHY, cores="0-63", num_threads=64, quota_cores=expected, ranks_per_node=1)])
    cores = {None: "", 4: "4 cores", 1.5: "1 core"}[expected]
    told = f"1 rank has 64 threads together, and may use {cores}"
    assert [finding.what for finding in found] == ([told] if cores else [])


@pytest.mark.parametrize(
    ("difference", "message"),
    [
        ({"versions": {"torch": "2.14.0", "nccl": "2.30.7"}}, "the version of torch differs: 2.15.0 on rank 0, 2.14.0"),
        ({"gpus": ["H100"] * 4}, "the number of GPUs of a host differs: 8 on rank 0, 4 on rank 1"),
        ({"gpus": ["A100"] * 8}, "the kind of GPU differs: H100 on rank 0, A100 on rank 1"),
        ({"environment": {"NCCL_DEBUG": "WARN"}}, "NCCL_DEBUG differs: INFO on rank 0, WARN on rank 1"),
        ({"environment": {}}, "NCCL_DEBUG differs: INFO on rank 0, unset on rank 1"),
        ({"address": "127.0.1.1"}, "name resolves to 127.0.1.1"),
        ({"address": None}, "name resolves to nothing"),
    ],
)
def test_a_difference_between_hosts(difference: dict[str, Any], message: str) -> None:
    """If it fails, hosts that cannot train together look as if they could."""
    other = replace(_HEALTHY, **{"rank": 1, "host": "node1", "address": "10.0.0.2", **difference})
    (finding,) = find([_HEALTHY, other])
    assert message in finding.what


@pytest.mark.parametrize(
    ("name", "severities"),
    [
        ("NCCL_COMM_ID", ["error"]),
        ("NCCL_DEBUG_SUBSYS", ["warning"]),
        ("NCCL_SOCKET_IFNAME", ["warning"]),
        ("NCCL_IB_HCA", ["warning"]),
        ("NCCL_HOSTID", []),
        ("NCCL_DEBUG_FILE", []),
        ("NCCL_TOPO_FILE", []),
        ("NCCL_GRAPH_FILE", []),
    ],
)
def test_a_setting_that_differs(name: str, severities: list[str]) -> None:
    """If it fails, a setting that hosts need for themselves stops a job, or one that must be equal passes."""
    interface = Interface("eth0", "10.0.0.1", 24)
    first = replace(_HEALTHY, ports=[], nccl_interface=interface, environment={name: "INIT"})
    second = replace(first, rank=1, host="node1", environment={name: "NET"})
    found = find([first, second])
    assert [(finding.severity, finding.what) for finding in found] == [
        (severity, f"{name} differs: INIT on rank 0, NET on rank 1") for severity in severities
    ]
    assert all(("unless" in finding.advice) == (finding.severity == "warning") for finding in found)


def test_errors_come_first() -> None:
    """If it fails, what to fix first is hidden behind what may wait."""
    faulty = replace(_HEALTHY, shared_memory_bytes=2**20, gpus=[])
    assert [finding.severity for finding in find([faulty])] == ["error", "warning"]


def test_ports_are_read(tmp_path: Path) -> None:
    """If it fails, InfiniBand's state is not what the kernel says."""
    port = tmp_path / "mlx5_0" / "ports" / "1"
    (port / "counters").mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("200 Gb/sec (4X HDR)\n")
    (port / "counters" / "link_downed").write_text("2\n")
    (port / "counters" / "port_rcv_errors").write_text("0\n")
    expected = Port(name="mlx5_0:1", state="ACTIVE", rate="200 Gb/sec (4X HDR)", errors={"link_downed": 2})
    assert read_ports(tmp_path) == [expected]
    assert read_ports(tmp_path / "nowhere") == []


def test_facts_of_this_machine() -> None:
    """If it fails, the doctor cannot look at the machine that it runs on."""
    launcher = {"RANK": "3", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    facts = collect_facts({"NCCL_ALGO": "Ring", "HOME": "/"}, identity=find_rank_identity(environment=launcher))
    assert (facts.rank, facts.ranks_per_node, facts.environment) == (3, 2, {"NCCL_ALGO": "Ring"})
    assert facts.host == socket.gethostname()
    assert facts.num_cores == len(parse_cpus(facts.cores)) == len(os.sched_getaffinity(0))


def test_a_name_that_leads_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a host whose name has a former address looks ready, and gloo listens where nobody reaches it."""
    monkeypatch.setattr(socket, "gethostname", lambda: "203.0.113.5")
    assert not collect_facts({}).is_own_address
    monkeypatch.setattr(socket, "gethostname", lambda: "127.0.0.1")
    assert collect_facts({}).is_own_address


def test_a_container_without_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a container that was started without GPUs or adapters looks as if it had its host's."""

    def fail() -> None:
        raise TopologyError("no GPU found here (NVML: Not Found; nvidia-smi (535): a; b); commopt topo FILE reads")

    monkeypatch.setattr("commopt_diagnose.doctor.facts.read_machine", fail)
    facts = collect_facts({}, root=tmp_path)
    assert (facts.has_gpu_files, facts.has_verbs_files) == (False, False)
    assert facts.no_topology == "NVML: Not Found; nvidia-smi (535): a; b"
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    (tmp_path / "dev/nvidiactl").touch()
    (tmp_path / "dev/nvidia1").touch()
    (tmp_path / "dev/infiniband/uverbs0").touch()
    facts = collect_facts({}, root=tmp_path)
    assert (facts.has_gpu_files, facts.has_verbs_files) == (True, True)


def test_the_command() -> None:
    """If it fails, commopt doctor says something else than it finds."""
    output = commopt("doctor", "--json", status=1, env={"NCCL_TREE_THRESHOLD": "0", "NCCL_DEBGU": "INFO"}).output
    found = {finding["what"]: finding["severity"] for finding in json.loads(output)["findings"]}
    assert found["NCCL_TREE_THRESHOLD has no effect since NCCL 2.5, which removed it"] == "warning"
    assert found["NCCL_DEBGU is not a variable of NCCL; did you mean NCCL_DEBUG?"] == "error"


def test_a_port_where_nothing_listens_and_a_name_that_is_unknown(port: int) -> None:
    """If it fails, a launch that cannot work ends in a timeout that tells nothing."""
    with pytest.raises(MeetingError, match=f"refuses connections to port {port}"):
        check_port("127.0.0.1", port, limit_s=0.1)
    with pytest.raises(MeetingError, match=r"no-such-host\.invalid cannot be resolved"):
        check_port("no-such-host.invalid", port, limit_s=0.1)


def test_a_firewall(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, packets that are dropped look like a rank that is late."""
    monkeypatch.setattr(socket, "create_connection", mock.Mock(side_effect=TimeoutError))
    with pytest.raises(MeetingError, match="firewall"):
        check_port("127.0.0.1", 1, limit_s=0.1)


@pytest.mark.exhaustive
def test_ranks_of_torchrun_meet() -> None:
    """If it fails, hosts cannot be compared, or ranks that torchrun has restarted read what they wrote before."""
    script = """
import os
from lightning_commopt.commands.app import app
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.environ["NCCL_ALGO"] = "Ring"
app(["doctor"])
raise SystemExit(os.environ["TORCHELASTIC_RESTART_COUNT"] == "0")
"""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "--no-python"]
    launcher += ["--max-restarts=1"]
    ran = subprocess.run(
        [*launcher, sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=240,
        env={name: value for name, value in os.environ.items() if not name.startswith("NCCL_")},
    )
    first, second = ran.stdout.split("2 ranks on 1 host")[-2:]
    differs = "NCCL_ALGO differs: unset on rank 0, Ring on rank 1"
    assert (differs in first, differs in second) == (True, False)
