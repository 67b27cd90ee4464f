"""How runs end, what is cut away, and what is no log of ranks: shapes of public logs, written here."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from commopt_diagnose.nccl_log.communicators import NcclLog
from commopt_diagnose.nccl_log.findings import find_all
from commopt_diagnose.nccl_log.reader import read_log
from commopt_diagnose.nccl_log.summary import extras_of, versions_of
from commopt_diagnose.nccl_log.terminal import print_log
from diagnose_support.nccl_sample_logs import findings, read

HEAD = "node-a:10:11 [0] NCCL INFO "


def shown(log: NcclLog) -> str:
    output = io.StringIO()
    print_log(log, find_all(log), Console(file=output, width=200, color_system=None))
    return output.getvalue()


def test_a_cut_id_makes_no_other_communicator() -> None:
    start = "ncclCommInitRank comm 0x5f0{rank} rank {rank} nranks 3 cudaDev {rank} busId {rank}0 commId 0x996ee6f117cb"
    lines = [f"n:1{rank}:2{rank} [{rank}] NCCL INFO {start.format(rank=rank)}8e1e - Init START" for rank in (0, 1)]
    lines.append(f"n:12:22 [2] NCCL INFO {start.format(rank=2)}")
    (communicator,) = read("\n".join(lines)).communicators
    assert list(communicator.members) == [0, 1, 2]


def test_a_cut_warning_is_left_out_unless_it_is_known(tmp_path: Path) -> None:
    unknown = f"{HEAD}Using network IB\nnode-a:10:11 [0] misc/ibvwrap.cc:63 NCCL WARN Fai"
    known = "node-a:10:11 [0] NCCL WARN Call to connect returned Connection refused, re"
    for name, text in (("unknown", unknown), ("known", known)):
        (tmp_path / name).write_text(text)
    assert "warning" not in [finding.code for finding in find_all(read_log([tmp_path / "unknown"]))]
    assert "unreachable" in [finding.code for finding in find_all(read_log([tmp_path / "known"]))]


def test_nvls_is_unused_only_where_the_number_of_its_channels_is_known() -> None:
    begin = f"{HEAD}comm 0x5f rank 0 nRanks 2 nNodes 1 localRanks 2 localRank 0 MNNVL 0\n"
    begin += f"{HEAD}NVLS multicast support is available on dev 0\n"
    assert extras_of(read(begin).communicators[0])["NVLS"] == "available"
    rest = f"{HEAD}16 coll channels, 16 collnet channels, 0 nvls channels, 16 p2p channels\n"
    assert extras_of(read(begin + rest).communicators[0])["NVLS"] == "available, not used"


def test_rccl_names_the_number_of_ranks_in_each_line() -> None:
    line = "Channel 00/0 : 16[17000] -> 18[21000] via P2P/IPC comm 0x5609 nRanks 32"
    warn = "node-a:10:11 [0] src/init.cc:20 NCCL WARN MSCCL++: Cannot enable MSCCL++\n"
    text = f"{HEAD}RCCL version : 2.22.3-HEAD:271856d\n{HEAD}{line}\n{warn}"
    log = read(text)
    assert (versions_of(log), log.communicators[0].num_ranks) == (["2.22.3 (RCCL)"], 32)
    assert findings(text)["mscclpp"].severity == "note"


def test_packages_name_the_version_where_nccl_does_not() -> None:
    """Such as in the output of pip or of torch's collect_env."""
    package, line = "[pip3] nvidia-nccl-cu12==2.19.3\n", f"{HEAD}Connected all rings\n"
    assert versions_of(read(package + line)) == ["2.19.3"]
    assert versions_of(read(package + line + "NCCL version 2.21.5+cuda12.4\n")) == ["2.21.5+cuda12.4"]


def test_processes_without_a_communicator_are_shown() -> None:
    text = "#  Rank  0 Group  0 Pid     10 on node-a device  0 [0x07] A100\n" + "".join(
        f"{host}:10:11 [0] NCCL INFO {message}\n"
        for host in ("node-a", "node-b")
        for message in ("NET/IB: [0] mlx5_3:1/IB", "NCCL_IB_DISABLE set by environment to 1.")
    )
    log, found = read(text), findings(text)
    assert "1 on node-a, 1 on node-b, NICs mlx5_3:1/IB\nnccl-tests lists 1 rank on node-a" in shown(log)
    assert (found["socket_network"].severity, found["socket_network"].what) == (
        "slow",
        "hosts talk over TCP (network Socket)",
    )
    assert "socket_network" not in findings(text.replace("node-b", "node-a"))
    assert "1 on node-a" in shown(read(f"{HEAD}NET/OFI Initializing aws-ofi-nccl 1.9.1-aws\n"))


def test_lines_that_name_no_communicator_belong_to_the_one_that_lacks_their_rank() -> None:
    """Threads of one process, of which a cut log has the name of the communicator only for some."""
    name = "n:9:1{rank} [{rank}] NCCL INFO comm 0x5f0{rank} rank {rank} nRanks 4 nNodes 1 localRanks 4 localRank 0\n"
    tree = "n:9:1{rank} [{device}] NCCL INFO Trees [0] -1/-1/-1->{rank}->0\n"
    named = "".join(name.format(rank=rank) for rank in (0, 2))
    (communicator,) = read(named + "".join(tree.format(rank=rank, device=rank) for rank in (1, 3))).communicators
    assert communicator.is_complete
    # Another rank on a GPU that has one already is in another communicator.
    assert len(read(named + "".join(tree.format(rank=rank, device=2) for rank in (1, 3))).communicators) > 1


def test_quotes_are_no_part_of_a_host() -> None:
    log = read("log `node-a:10:11 [1] NCCL INFO Using network IB\nnode-a:10:11 [1] NCCL INFO Using network IB\n")
    assert [process.host for process in log.processes] == ["node-a"]


def test_one_cut_line_of_a_ring_is_no_communicator_of_one_rank() -> None:
    log = read(f"{HEAD}Channel 00/02 :    0\n")
    assert (log.communicators[0].num_ranks, "ring on" in shown(log)) == (None, False)
