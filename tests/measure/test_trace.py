"""A trace opens in the viewers, and says what the records say."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from sample_steps import MB, STEP_S, header, layout, step_record, write_run
from trace_format import Event, check_trace, rows
from typer.testing import CliRunner

from lightning_commopt.commands.app import app
from lightning_commopt.measure.files import StepWriter, rank_file, read_run
from lightning_commopt.measure.trace import to_trace, write_trace

# Records round both ends to a tenth of a microsecond, traces to an eighth.
ROUNDED_US = 0.1 + 0.125 + 1e-6


def _command(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["trace", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.output


def _trace(run_dir: Path, first: int = 0, num: int = 100) -> dict[str, Any]:
    """Through JSON, as viewers get it."""
    trace = json.loads(json.dumps(to_trace(read_run(run_dir), range(first, first + num))))
    check_trace(trace)
    return trace


def _of_kind(trace: dict[str, Any], rank: int, kind: str) -> list[Event]:
    """The slices in all rows of a kind."""
    return [
        piece for (pid, name), row in rows(trace).items() if (pid, name.split()[0]) == (rank, kind) for piece in row
    ]


def test_the_command_writes_a_trace_that_viewers_open(tmp_path):
    write_run(tmp_path, num_steps=5)
    status, output = _command(tmp_path)
    assert status == 0
    path = tmp_path / "comm_time" / "trace.json"
    assert output.startswith(f"{path}: steps 0 to 4 of 2 ranks; 5 steps saved.")
    trace = json.loads(path.read_text())
    check_trace(trace)
    named = {event["pid"]: event["args"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert named == {0: {"name": "rank 0"}, 1: {"name": "rank 1"}}
    of_one = {name for rank, name in rows(trace) if rank == 1}
    assert of_one == {"steps", "phases", "buckets", "buckets 2", "buckets 3", "wire", "wire 2"}


def test_steps_and_phases_last_as_long_as_in_the_records(tmp_path):
    written = write_run(tmp_path, num_steps=3)
    found = rows(_trace(tmp_path))
    for rank, records in enumerate(written):
        spans = {
            "steps": [(f"step {r.step}", r.end_s - r.start_s) for r in records],
            "phases": [(phase.name, phase.end_s - phase.start_s) for r in records for phase in r.phases],
        }
        for name, expected in spans.items():
            assert [piece["name"] for piece in found[rank, name]] == [span[0] for span in expected]
            lasts_us = [lasts_s * 1e6 for _, lasts_s in expected]
            assert [piece["dur"] for piece in found[rank, name]] == pytest.approx(lasts_us, abs=ROUNDED_US)


def test_buckets_last_as_long_as_in_the_records(tmp_path):
    written = write_run(tmp_path, num_steps=3)
    trace = _trace(tmp_path)
    for rank, records in enumerate(written):
        of_buckets = {(p["args"]["step"], p["name"]): p for p in _of_kind(trace, rank, "buckets")}
        for record in records:
            for bucket in record.buckets:
                waits = of_buckets.pop((record.step, f"bucket {bucket.index} waits"))
                travels = of_buckets.pop((record.step, f"bucket {bucket.index}"))
                assert waits["dur"] == pytest.approx((bucket.start_s - bucket.ready_s) * 1e6, abs=ROUNDED_US)
                assert travels["dur"] == pytest.approx((bucket.end_s - bucket.start_s) * 1e6, abs=ROUNDED_US)
                assert travels["ts"] == waits["ts"] + waits["dur"]
        assert not of_buckets
        wire_us = [(end - start) * 1e6 for record in records for bucket in record.buckets for start, end in bucket.wire]
        on_wire_us = [piece["dur"] for piece in _of_kind(trace, rank, "wire")]
        assert sorted(on_wire_us) == pytest.approx(sorted(wire_us), abs=ROUNDED_US)


def test_slices_say_what_they_are(tmp_path):
    write_run(tmp_path, num_steps=1)
    found = rows(_trace(tmp_path))
    (step,) = found[0, "steps"]
    record = step_record(0)
    assert step["args"]["exposed_ms"] == pytest.approx(record.totals.exposed_s * 1e3, abs=1e-3)
    assert step["args"]["num_samples"] == 32
    bucket = next(piece for piece in found[0, "buckets"] if piece["name"] == "bucket 0")
    assert bucket["args"] == {
        "step": 0,
        "index": 0,
        "backward": 0,
        "gradient_bytes": MB,
        "wire_bytes": MB,
        "names": ["layer0.0", "layer0.1"],
    }
    assert found[0, "wire"][1]["args"] == {"step": 0, "bucket": 0, "collective": 1}


def test_many_names_are_cut_short_and_names_of_another_layout_are_not_shown(tmp_path):
    writer = StepWriter(rank_file(tmp_path, 0), header(world_size=1))
    other = {index: replace(bucket, gradient_bytes=7) for index, bucket in layout(3).items()}
    layouts = layout(3, names_each=10), other
    writer.write([replace(step_record(number), layout=own) for number, own in enumerate(layouts)])
    found = rows(_trace(tmp_path))
    names = [piece["args"]["names"] for piece in found[0, "buckets"] if piece["name"] == "bucket 0"]
    assert names == [[*(f"layer0.{i}" for i in range(8)), "and 2 more"], []]


def test_clocks_that_differ_by_an_hour_are_aligned_by_the_collectives(tmp_path):
    """Without that, nobody can see which rank the others waited for."""
    write_run(tmp_path, num_steps=3)
    trace = _trace(tmp_path)
    found = rows(trace)
    for name in ("steps", "phases", "wire"):
        of_both = [[piece["ts"] for piece in found[rank, name]] for rank in (0, 1)]
        assert of_both[0] == pytest.approx(of_both[1], abs=1)
    corrections_us = trace["otherData"]["clock_corrections_us"]
    assert corrections_us["0"] == 0
    assert corrections_us["1"] == pytest.approx(-3600e6, abs=1)


def test_one_late_collective_does_not_move_the_clock(tmp_path):
    late = step_record(0)
    moved = replace(late.buckets[2], end_s=late.buckets[2].end_s + 0.02, wire=((0.06, 0.09),))
    records = [[step_record(0), step_record(1)], [replace(late, buckets=(*late.buckets[:2], moved)), step_record(1)]]
    for rank, of_rank in enumerate(records):
        StepWriter(rank_file(tmp_path, rank), header(rank)).write(of_rank)
    assert _trace(tmp_path)["otherData"]["clock_corrections_us"] == {"0": 0, "1": pytest.approx(0, abs=0.2)}


def test_without_collectives_the_hosts_clocks_align(tmp_path):
    for rank in range(2):
        first_line = header(rank, origin_unix_s=1.7e9 + 2 * rank)
        StepWriter(rank_file(tmp_path, rank), first_line).write([step_record(0, num_rounds=0)])
    trace = _trace(tmp_path)
    found = rows(trace)
    apart_us = found[1, "steps"][0]["ts"] - found[0, "steps"][0]["ts"]
    assert apart_us == pytest.approx(2e6, abs=1)
    assert trace["otherData"]["clock_corrections_us"] == {"0": 0, "1": 0}


def test_the_counter_has_the_exposed_time_of_every_step(tmp_path):
    (records, _) = write_run(tmp_path, num_steps=3)
    trace = _trace(tmp_path)
    steps = rows(trace)[1, "steps"]
    counted = [event for event in trace["traceEvents"] if event["ph"] == "C" and event["pid"] == 1]
    exposed_ms = [*(record.totals.exposed_s * 1e3 for record in records), 0]
    assert [event["args"]["ms"] for event in counted] == pytest.approx(exposed_ms, abs=1e-3)
    assert [event["ts"] for event in counted] == [*(p["ts"] for p in steps), steps[-1]["ts"] + steps[-1]["dur"]]


def test_one_rank_without_buckets(tmp_path):
    StepWriter(rank_file(tmp_path, 0), header(world_size=1)).write([step_record(0, num_buckets=0)])
    trace = _trace(tmp_path)
    assert set(rows(trace)) == {(0, "steps"), (0, "phases")}
    assert not [event for event in trace["traceEvents"] if event["ph"] == "C"]


def test_marks_out_of_order_by_the_clocks_rounding(tmp_path):
    """CUDA events of two streams may be read a microsecond in the wrong order."""
    record = step_record(0)
    early = replace(record.buckets[0], ready_s=record.buckets[0].start_s + 1e-6, wire=((0.0451, 0.0450),))
    records = [replace(record, buckets=(early, *record.buckets[1:]))]
    StepWriter(rank_file(tmp_path, 0), header(world_size=1)).write(records)
    found = rows(_trace(tmp_path))
    assert found[0, "buckets"][0]["name"] == "bucket 0"
    assert found[0, "wire"][0]["dur"] == 0


def test_times_after_a_week_adjoin_still(tmp_path):
    """Seconds are large then, and what a float has left for microseconds is little."""
    records = [step_record(step, since_s=7 * 86400 + 0.1234567) for step in range(20)]
    StepWriter(rank_file(tmp_path, 0), header(world_size=1)).write(records)
    phases = rows(_trace(tmp_path))[0, "phases"]
    for one, other in pairwise(phases):
        assert other["ts"] == pytest.approx(one["ts"] + one["dur"], abs=ROUNDED_US)


def test_a_rank_without_these_steps_is_shown_empty(tmp_path):
    StepWriter(rank_file(tmp_path, 0), header(0)).write([step_record(step) for step in range(4)])
    StepWriter(rank_file(tmp_path, 1), header(1)).write([step_record(0)])
    trace = _trace(tmp_path, first=2)
    assert {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"} == {
        "rank 0",
        "rank 1",
    }
    assert not [event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == 1]


def test_a_window_of_steps(tmp_path):
    write_run(tmp_path, num_steps=9)
    path = tmp_path / "deep" / "t.json"
    written, _ = write_trace(tmp_path, path, first_step=3, num_steps=2)
    assert written == f"{path}: steps 3 to 4 of 2 ranks; 9 steps saved"
    trace = json.loads(path.read_text())
    check_trace(trace)
    found = rows(trace)
    assert [piece["name"] for piece in found[0, "steps"]] == ["step 3", "step 4"]
    assert found[0, "steps"][0]["ts"] == 0
    assert sum(piece["dur"] for piece in found[0, "steps"]) == pytest.approx(2 * STEP_S * 1e6, abs=1)
    status, output = _command(tmp_path, "--first-step", 8, "--num-steps", 50, "--output", tmp_path / "t.json")
    assert (status, (tmp_path / "t.json").exists()) == (0, True)
    assert "steps 8 to 8 of 2 ranks; 9 steps saved" in output


def test_missing_lines_and_ranks_are_reported(tmp_path):
    write_run(tmp_path, world_size=2)
    rank_file(tmp_path, 0).unlink()
    path = rank_file(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-9])
    status, output = _command(tmp_path)
    assert status == 0
    assert f"commopt: {path}: its last line is cut off" in output
    assert "commopt: ranks without records: 0 (of 2 ranks)" in output


def test_mistakes_are_one_line(tmp_path):
    expected = f"expected {rank_file(tmp_path, 0)}, which CommTimeMonitor writes"
    assert _command(tmp_path) == (2, f"commopt: {tmp_path} has no records of steps: {expected}\n")
    write_run(tmp_path, num_steps=3)
    assert _command(tmp_path, "--first-step", 3) == (
        2,
        f"commopt: first_step=3 and num_steps=100 select no step: {tmp_path} has steps 0 to 2\n",
    )
    status, output = _command(tmp_path, "--output", tmp_path)
    assert (status, len(output.splitlines())) == (2, 1)
    assert _command(tmp_path, "--num-steps", 0)[0] == 2
    with pytest.raises(ValueError, match="num_steps must be at least 1, got 0"):
        write_trace(tmp_path, num_steps=0)
