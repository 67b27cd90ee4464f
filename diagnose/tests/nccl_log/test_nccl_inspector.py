"""Files of NCCL's Inspector; the records are written here after its README."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commopt_diagnose.nccl_log.findings import find_all
from commopt_diagnose.nccl_log.inspector import Inspected, Measured
from commopt_diagnose.nccl_log.reader import read_log
from diagnose_support.nccl_sample_logs import SampleJob
from lightning_commopt.measure.files import StepWriter, rank_file
from lightning_commopt.measure.record import Collective
from support.commopt import commopt
from support.simulated_link import records_of_ranks

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
    reader = Inspected()
    text = lines(2, [measured(number, version=version) for number in range(3)], version=version)
    assert all(reader.read(each) for each in text.splitlines())
    names = ("RING", "LL") if version >= 4.2 else ("", "")
    assert reader.rows() == [(COMM, Measured(COMM, "AllReduce", 1 << 20, *names), 3, 2.25)]
    assert reader.num_dropped == (3 if version >= 4.3 else 0)


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
    reader = Inspected()
    text = lines(0, [measured(0)], version=4.3) + json.dumps(measured(1)) + "\n"
    assert [reader.read(each) for each in text.splitlines()] == [True, True, False]


@pytest.mark.parametrize(
    "text",
    ['{"coll_perf": {"coll": "AllR', '{"coll_perf": 3, "header": {}}', '{"dump_stats": []}', '{"coll_perf": null}',
     '{"header": {"id": 1, "rank": "x"}, "coll_perf": {"coll": 1}}', '{"a": 1}', "coll_perf"],
)  # fmt: skip
def test_damaged_lines(text: str) -> None:
    reader = Inspected()
    assert not reader.read(text)
    assert reader.rows() == []


@pytest.mark.parametrize(("name", "is_read"), [("coll_busbw_gbs", False), ("coll_msg_size_bytes", True)])
def test_numbers_that_are_too_large_for_a_float(tmp_path: Path, name: str, is_read: bool) -> None:
    record = measured(1)
    record["coll_perf"][name] = 10**400
    (tmp_path / "log").write_text(lines(0, [measured(0), record]))
    log = read_log([tmp_path / "log"])
    assert log.inspected.num_records == 1 + is_read
    assert [finding.code for finding in find_all(log)] == []


def test_communicators_are_matched(tmp_path: Path) -> None:
    """By the id that NCCL's log has too."""
    (tmp_path / "nccl.log").write_text(SampleJob().mixed())
    for rank in range(4):
        (tmp_path / f"rank_{rank}.json").write_text(lines(rank, [measured(number) for number in range(10)]))
    files = sorted(tmp_path.iterdir())
    log = read_log(files)
    assert (log.silent_files, find_all(log)) == ([], [])
    output = commopt("nccl-log", *files).output
    assert "and 40 records of the Inspector in 5 files" in output
    row = next(line for line in output.splitlines() if "AllReduce" in line)
    assert row.split() == ["1", "AllReduce", "1048576", "RING", "LL", "40", "2.25"]


def test_large_messages_by_ll_and_no_log_of_nccl(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(lines(0, [measured(0, size=64 << 20)]))
    (found,) = find_all(read_log([tmp_path / "log"]))
    assert (found.code, found.what) == ("small_protocol", "messages of 64 MiB go by the protocol LL")


LAYOUT = (4 << 20, 1 << 20, 2 << 20)
"""Bytes of the buckets in a step."""


def write_run(
    folder: Path, steps: list[list[tuple[str, str, int]]], buckets: tuple[int, ...] = LAYOUT, source: str = ""
) -> None:
    """Writes the records of two ranks: for each step its collectives, with operation, phase and bytes."""
    calls = [
        tuple(Collective(operation, phase, source, size, None, None) for operation, phase, size in s) for s in steps
    ]
    for rank, records in enumerate(records_of_ranks(len(steps), buckets)):
        whole = [replace(record, collectives=own) for record, own in zip(records, calls, strict=True)]
        StepWriter(rank_file(folder, rank), {"rank": rank, "world_size": 2, "origin_unix_s": 0.0}).write(whole)


def sync(*sizes: int) -> list[tuple[str, str, int]]:
    return [("all_reduce", "backward", size) for size in sizes]


def inspected(numbers: dict[int, tuple[str, int, str]], *, comm: str = COMM, skips: range = range(0)) -> str:
    """Returns what the Inspector of two ranks writes: operation, bytes and protocol by the number."""
    found = []
    for rank in range(2):
        for number, (operation, size, protocol) in numbers.items():
            record = measured(number, size=size)["coll_perf"] | {"coll": operation, "coll_proto": protocol}
            about = {**header(rank), "n_ranks": 2, "id": comm}
            if size >= 8192 and number not in skips:  # the Inspector leaves out small ones
                found.append(json.dumps({"header": about, "coll_perf": {**record, "coll_busbw_gbs": size / (1 << 20)}}))
    return "".join(f"{line}\n" for line in found)


def call(folder: Path, text: str) -> tuple[list[dict[str, Any]], str]:
    """Returns what is matched, and the messages."""
    (folder / "inspector").write_text(text)
    result = commopt("nccl-log", folder / "inspector", "--run", folder, "--json")
    return json.loads(result.stdout)["matched"], result.stderr


def numbered(sizes: list[int], first: int = 0, protocol: str = "SIMPLE") -> dict[int, tuple[str, int, str]]:
    return {first + i: ("AllReduce", size, protocol) for i, size in enumerate(sizes)}


def test_buckets_are_matched(tmp_path: Path) -> None:
    """With collectives before the fit, small ones that the Inspector leaves out, and the beginning lost."""
    step = [*sync(*LAYOUT), ("all_reduce", "optimizer", 4), ("all_gather", "forward", 2 << 20)]
    write_run(tmp_path, [step] * 6)
    numbers = numbered([1 << 20, 4 << 20, 1 << 20, 64, *[*LAYOUT, 4] * 6])
    text = inspected(numbers, skips=range(9))
    text += inspected({7 + i: ("AllGather", 1 << 20, "LL") for i in range(6)})  # NCCL counts what each rank gives
    found, problems = call(tmp_path, text)
    assert problems == ""
    rows = [(row["name"], row["operation"], row["num_bytes"], row["protocol"], row["times"]) for row in found]
    assert rows == [
        ("forward 0", "AllGather", 1 << 20, "LL", 12),
        ("bucket 0", "AllReduce", 4 << 20, "SIMPLE", 8),
        ("bucket 1", "AllReduce", 1 << 20, "SIMPLE", 10),
        ("bucket 2", "AllReduce", 2 << 20, "SIMPLE", 10),
    ]
    assert [row["bus_gb_per_s"] for row in found] == [1, 4, 1, 2]
    assert "bucket 2" in commopt("nccl-log", tmp_path / "inspector", "--run", tmp_path).output


def test_one_bucket_by_two_protocols(tmp_path: Path) -> None:
    """Both are shown: the tuner may choose anew."""
    write_run(tmp_path, [sync(*LAYOUT)] * 4)
    found, _ = call(tmp_path, inspected(numbered([*LAYOUT] * 2) | numbered([*LAYOUT] * 2, 6, "LL128")))
    assert [(row["name"], row["protocol"], row["times"]) for row in found if row["name"] == "bucket 1"] == [
        ("bucket 1", "SIMPLE", 4),
        ("bucket 1", "LL128", 4),
    ]


def test_a_damaged_number_far_away(tmp_path: Path) -> None:
    """If it fails, one damaged line makes the search for a run's place endless."""
    write_run(tmp_path, [sync(*LAYOUT)] * 4)
    numbers = numbered([*LAYOUT] * 4)
    expected = call(tmp_path, inspected(numbers))
    assert len(expected[0]) == len(LAYOUT)
    assert call(tmp_path, inspected(numbers | {10**15: ("AllReduce", 1 << 20, "SIMPLE")})) == expected


@pytest.mark.parametrize(
    ("steps", "numbers", "comms", "problem"),
    [
        ([sync(1 << 20, 1 << 20)] * 4, numbered([1 << 20] * 9), 1, "several places fit"),  # which of two equal buckets
        ([sync(*LAYOUT)] * 4, numbered([*LAYOUT] * 4), 2, "several places fit"),  # which of two communicators
        ([sync(*LAYOUT)] * 4, numbered([*LAYOUT, 8 << 20] * 4), 1, "no place fits"),  # calls that are not recorded
        ([sync(*LAYOUT)] * 4, numbered([*LAYOUT][:2]), 1, "no place fits"),  # no whole step
    ],
)  # fmt: skip
def test_nothing_is_claimed(
    steps: list[Any], numbers: dict[int, Any], comms: int, problem: str, tmp_path: Path
) -> None:
    write_run(tmp_path, steps, tuple(size for *_, size in steps[0]))
    text = "".join(inspected(numbers, comm=f"0x{comm}") for comm in range(comms))
    assert call(tmp_path, text) == ([], f"commopt: {tmp_path}: AllReduce: {problem}\n")


@pytest.mark.parametrize("steps", [[], [("broadcast", "data", 8)]], ids=["none", "Lightning's own"])
def test_a_run_without_collectives(steps: list[tuple[str, str, int]], tmp_path: Path) -> None:
    write_run(tmp_path, [steps] * 2, source="lightning")
    _, problem = call(tmp_path, inspected(numbered([*LAYOUT])))
    assert "torch has hooks for since 2.14" in problem


def test_equal_buckets_that_have_one_place_only(tmp_path: Path) -> None:
    """The validation's all-reduce shows where the steps lie."""
    write_run(
        tmp_path, [sync(1 << 20, 1 << 20), [*sync(1 << 20, 1 << 20), ("all_reduce", "pause", 3 << 20)]], (1 << 20,) * 2
    )
    found, problems = call(tmp_path, inspected(numbered([1 << 20] * 4 + [3 << 20], 1)))
    assert problems == ""
    assert [(row["name"], row["times"]) for row in found] == [("bucket 0", 4), ("bucket 1", 4), ("pause 0", 2)]
