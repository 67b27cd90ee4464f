"""Files of NCCL's Inspector; the records are written here after its README."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lightning_commopt.commands.app import app
from lightning_commopt.commands.nccl_log.findings import find_all
from lightning_commopt.commands.nccl_log.inspector import InspectorReader, Measured
from lightning_commopt.commands.nccl_log.reader import read_log
from support.nccl_sample_logs import SampleJob

COMM = "0x9e3779b97f4a7c15"  # as SampleJob has it


def header(rank: int) -> dict[str, Any]:
    return {"id": COMM, "rank": rank, "n_ranks": 4, "nnodes": 1}


def measured(number: int, *, microseconds: int = 1000, version: float = 4.2, size: int = 1 << 20) -> dict[str, Any]:
    named = {"coll_algo": "RING", "coll_proto": "LL"} if version >= 4.2 else {}
    times = {"coll_exec_time_us": microseconds, "coll_algobw_gbs": 1.5, "coll_busbw_gbs": 2.25}
    return {"coll_perf": {"coll": "AllReduce", **named, "coll_sn": number, "coll_msg_size_bytes": size, **times}}


def lines(rank: int, records: list[dict[str, Any]], *, version: float = 4.2) -> str:
    """Returns a dump of one rank: since v4.3 a marker names the communicator for all records behind it."""
    about = {"header": header(rank), "metadata": {"inspector_output_format_version": f"v{version}", "pid": 7}}
    if version >= 4.3:
        stats = {"coll_records": len(records), "coll_dropped_since_last_dump": 3, "p2p_records": 0}
        found = [{**about, "dump_stats": stats}, *records]
    else:
        found = [{**about, **record} for record in records]
    return "".join(f"{json.dumps(record)}\n" for record in found)


@pytest.mark.parametrize("version", [4.0, 4.1, 4.2, 4.3, 4.4])
def test_every_format(version: float) -> None:
    reader = InspectorReader()
    text = lines(2, [measured(number, version=version) for number in range(3)], version=version)
    assert all(reader.read(each) for each in text.splitlines())
    names = ("RING", "LL") if version >= 4.2 else ("", "")
    assert reader.found.rows() == [(Measured(COMM, "AllReduce", 1 << 20, *names), 3, 2.25)]
    assert reader.found.num_dropped == (3 if version >= 4.3 else 0)


def test_a_verbose_record_is_longer_than_a_line_of_nccl(tmp_path: Path) -> None:
    record = measured(0)
    record["coll_perf"]["event_trace_ts"] = {
        "kernel_events": [{"channel_id": each, "ts": 10**15} for each in range(200)]
    }
    (tmp_path / "log").write_text(lines(0, [record]))
    assert (tmp_path / "log").stat().st_size > 8000
    assert read_log([tmp_path / "log"]).inspected.num_records == 1


def test_records_behind_the_end_of_a_dump_are_of_nobody() -> None:
    """A file that was cut or merged may have them; they are not given to the communicator before."""
    reader = InspectorReader()
    text = lines(0, [measured(0)], version=4.3) + json.dumps(measured(1)) + "\n"
    assert [reader.read(each) for each in text.splitlines()] == [True, True, False]


@pytest.mark.parametrize(
    "text",
    ['{"coll_perf": {"coll": "AllR', '{"coll_perf": 3, "header": {}}', '{"dump_stats": []}', '{"coll_perf": null}',
     '{"header": {"id": 1, "rank": "x"}, "coll_perf": {"coll": 1}}', '{"a": 1}', "coll_perf"],
)  # fmt: skip
def test_damaged_lines(text: str) -> None:
    reader = InspectorReader()
    assert not reader.read(text)
    assert reader.found.rows() == []


def test_communicators_are_matched(tmp_path: Path) -> None:
    """By the id that NCCL's log has too."""
    (tmp_path / "nccl.log").write_text(SampleJob().mixed())
    for rank in range(4):
        (tmp_path / f"rank_{rank}.json").write_text(lines(rank, [measured(number) for number in range(10)]))
    files = sorted(tmp_path.iterdir())
    log = read_log(files)
    assert (log.silent_files, find_all(log)) == ([], [])
    output = CliRunner().invoke(app, ["nccl-log", *map(str, files)], env={"COLUMNS": "120"}).output
    assert "and 40 records of the Inspector in 5 files" in output
    row = next(line for line in output.splitlines() if "AllReduce" in line)
    assert row.split() == ["1", "AllReduce", "1048576", "RING", "LL", "40", "2.25"]


def test_large_messages_by_ll_and_no_log_of_nccl(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(lines(0, [measured(0, size=64 << 20)]))
    (found,) = find_all(read_log([tmp_path / "log"]))
    assert (found.code, found.what) == ("small_protocol", "messages of 64 MiB go by the protocol LL")
