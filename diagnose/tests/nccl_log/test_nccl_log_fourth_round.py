"""nccl-log on logs of a fourth round: kept by Docker and clouds, of DGX Spark, racks of NVLink, and HPC-X's plugin."""

from __future__ import annotations

import io
import json
import re

import pytest
from rich.console import Console

from commopt_diagnose.nccl_log.summary import extras_of, networks_of
from commopt_diagnose.nccl_log.terminal import print_log
from diagnose_support.nccl_sample_logs import HEALTHY, SampleJob, findings, read, told, watchdog


def _collected(kind: str, line: str) -> str:
    """Returns a line as something that collects logs keeps it."""
    if kind == "docker":  # JSON of Docker has no < and >
        kept = json.dumps({"log": f"{line}\n", "stream": "stdout", "time": "2026-03-18T11:13:09.1Z"})
        return kept.replace("<", r"\u003c").replace(">", r"\u003e")
    if kind == "cloud":
        return json.dumps({"insertId": "a1", "resource": {"labels": {"pod": "w-0"}}, "textPayload": line})
    if kind == "pretty":
        return f'    "message": {json.dumps(line)},'
    return f'2026-03-18T11:13:09Z,w-0,"{line}"'


@pytest.mark.parametrize("kind", ["docker", "cloud", "pretty", "csv"])
def test_logs_kept_as_json_or_csv_are_read_as_they_were_written(kind: str) -> None:
    """What follows the message in its line must not become a part of it."""
    lines = [*HEALTHY.text().splitlines(), watchdog(0, 7).strip(), '[rank3]: KeyError: a "b"']
    plain, kept = read(*lines), read(*(_collected(kind, line.replace('"', "'")) for line in lines))
    [before], [after] = plain.communicators, kept.communicators
    assert networks_of(after) == ["IB"]
    assert extras_of(after) == extras_of(before)
    assert after.machines == before.machines
    assert [connection.path for connection in after.connections] == [c.path for c in before.connections]
    assert [process.interfaces.keys() for process in kept.processes] == [{"eth0"}] * len(kept.processes)
    assert [timeout.call for timeout in kept.timeouts.values()] == [timeout.call for timeout in plain.timeouts.values()]
    assert [warning.rank for warning in kept.warnings] == [3]


@pytest.mark.parametrize(
    "prefix",
    ["#033[34m", r"\x1b[34m", r"\u001b[34m", "^[[34m", "level=info msg=", "rank-0|", "2026-03-18T11:13:09Z,w-0,"],
)
def test_what_stands_right_in_front_of_a_host_is_no_part_of_its_name(prefix: str) -> None:
    """Colours of a terminal reach logs as syslog and editors write them; logfmt and CSV put no space there."""
    [process] = read(prefix + told("Bootstrap : Using eth0:10.0.0.1<0>", host="node-3")).processes
    assert (process.host, process.pid) == ("node-3", 7)


def test_quotes_in_a_line_that_nothing_has_quoted() -> None:
    line = told('NCCL_TOPO_FILE set by environment to "a", "b"')
    [process] = read(line).processes
    assert process.settings["NCCL_TOPO_FILE"].value == '"a", "b"'


def test_nics_have_their_own_names() -> None:
    """And not those of the files by which libibverbs opens them."""
    opened = "NET/IB: [1] rocep1s0f1:uverbs1:1/RoCE provider=Mlx5 speed=200000 pciPath=/sys/a/0000:01:00.0 ar=0"
    using = "NET/IB : Using [0]rocep1s0f1:1/RoCE [1]mlx5_2:1/IB [RO]; OOB eth0:10.0.0.1<0>"
    [process] = read(told(opened), told(using), told("Using network IB")).processes
    assert list(process.nics) == ["rocep1s0f1:1/RoCE", "mlx5_2:1/IB"]


def test_nvlink_within_a_host_of_a_rack() -> None:
    """In a rack that NVLink joins, NCCL calls the NVLinks within a host MNNVL as well."""
    ranks = [
        told(f"comm 0x{rank} rank {rank} nRanks 3 nNodes 1 localRanks 3 localRank {rank} MNNVL 1", host=host, pid=rank)
        + told(f"Channel 00/0 : {rank}[0] -> {(rank + 1) % 3}[0] via P2P/MNNVL", host=host, pid=rank)
        for rank, host in enumerate("aab")
    ]

    def shown(*lines: str) -> str:
        file = io.StringIO()
        print_log(read(*lines), [], Console(file=file, width=200))
        return file.getvalue()

    printed = shown(*ranks)
    assert re.search("P2P/MNNVL +in a host +0 > 1", printed)
    assert re.search("P2P/MNNVL +between hosts +1 > 2, 2 > 0", printed)
    assert "2 hosts, which NVLink joins" in printed
    assert "1 host," in shown(*ranks[:2])
    assert "joins" not in shown(*ranks[:2])


def _efa(*messages: str, between: str = "NET/Libfabric/0") -> str:
    """Returns the log of two hosts over EFA, whose plugin writes further messages."""
    notes = (
        "NET/OFI Selected provider is efa, fabric is efa (found 1 nics)",
        *messages,
        "DMA-BUF is available on GPU 0",
    )
    return SampleJob(hosts=("a", "b"), gpus=1, nics=(), network="Libfabric", between=between, notes=notes).text()


@pytest.mark.parametrize(
    ("message", "setting"),
    [
        ("NET/OFI Adding NCCL_PROTO=simple to environment", "NCCL_PROTO"),
        ('NET/OFI Setting NCCL_PROTO to "simple"', "NCCL_PROTO"),
        ("NET/OFI Running on P4d platform, Setting NCCL_TOPO_FILE environment variable to /a.xml", "NCCL_TOPO_FILE"),
    ],
)
def test_settings_of_a_plugin_are_not_the_user_s(message: str, setting: str) -> None:
    """EFA delivers bytes in any order, so a run without this protocol would compute wrong sums."""
    seen = f"{setting} set by environment to simple"
    assert findings(_efa(message, seen, between="NET/Libfabric/0/GDRDMA")) == {}
    assert len(findings(_efa(seen, between="NET/Libfabric/0/GDRDMA"))) == 1
