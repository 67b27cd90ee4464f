"""The files of a run keep what was measured, whatever happens to the process or the disk."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from sample_steps import header, layout, step_record, write_run

from lightning_commopt.measure.files import StepWriter, common_steps, notices, rank_file, read_run, steps_of_plan
from lightning_commopt.measure.plain import write_json
from lightning_commopt.measure.record import PHASES, StepRecord

STEPS = [step_record(step) for step in range(4)]


def _assert_same(found: StepRecord, written: StepRecord) -> None:
    """Equal but for the rounding to a tenth of a microsecond."""
    assert (found.step, found.num_samples) == (written.step, written.num_samples)
    assert [phase.name for phase in found.phases] == [phase.name for phase in written.phases]
    for one, other in zip(found.phases, written.phases, strict=True):
        assert one[1:] == pytest.approx(other[1:], abs=1e-7)
    for bucket, other_bucket in zip(found.buckets, written.buckets, strict=True):
        for field in fields(bucket):
            values = [getattr(info, field.name) for info in (bucket, other_bucket)]
            if field.name == "wire":
                values = [[at_s for interval in wire for at_s in interval] for wire in values]
            assert values[0] == pytest.approx(values[1], abs=1e-7)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_is_written_is_read(tmp_path):
    written = write_run(tmp_path, num_steps=3)
    ranks = read_run(tmp_path)
    assert [(found.rank, found.world_size) for found in ranks] == [(0, 2), (1, 2)]
    assert [found.origin_unix_s for found in ranks] == [1.7e9, 1.7e9 + 3601]
    assert ranks[1].header["backend"] == "gloo"
    assert ranks[1].path == tmp_path / "comm_time" / "rank_1.jsonl"
    for found, records in zip(ranks, written, strict=True):
        for one, other in zip(found.steps, records, strict=True):
            _assert_same(one, other)
        assert [record.layout for record in found.steps] == [layout()] * 3
    assert notices(ranks) == []


@pytest.mark.parametrize("num_buckets", [0, 1, 3])
@pytest.mark.parametrize("num_rounds", [0, 1, 2])
def test_a_line_has_what_the_record_derives(num_buckets, num_rounds):
    """Reports read these keys from the lines: a name that changes breaks them."""
    record = step_record(7, num_buckets=num_buckets, num_rounds=num_rounds)
    values = json.loads(record.to_json())
    times = ["comm_s", "queue_s", "compression_s", "wire_s", "exposed_s"]
    derived = [*times, "overlapped_share", "gradient_bytes", "wire_bytes"]
    spans = ["phases", "buckets", "collectives", "waits", "host_bound_s"]
    named = ["step", "num_samples", "step_s", *(f"{name}_s" for name in PHASES), *derived, *spans]
    assert list(values) == named
    for name in PHASES:
        assert values[f"{name}_s"] == pytest.approx(getattr(record.totals, f"{name}_s"), abs=1e-7)
    assert (values["step"], values["num_samples"]) == (record.step, record.num_samples)
    for name in ("step_s", *derived):
        expected = getattr(record.totals, name)
        assert values[name] == (None if expected is None else pytest.approx(expected, abs=1e-7))
    _assert_same(StepRecord.from_dict(values), record)


def test_a_layout_is_written_when_it_changes(tmp_path):
    writer = StepWriter(rank_file(tmp_path, 0), header(world_size=1))
    layouts = layout(2), layout(3), layout(3), dict(reversed(layout(3).items()))
    steps = [replace(record, layout=own) for record, own in zip(STEPS, layouts, strict=True)]
    writer.write(steps[:1])
    writer.write(steps[1:])
    types = [line["type"] for line in _lines(rank_file(tmp_path, 0))]
    assert types == ["run", "layout", "step", "layout", "step", "step", "step"]
    found = [record.layout for record in read_run(tmp_path)[0].steps]
    assert found == [layout(2), layout(3), layout(3), layout(3)]


def test_steps_after_a_change_of_the_plan_are_told_from_those_before(tmp_path):
    """If it fails, steps with a compressor count as steps without one, or with another."""
    none: dict[str, Any] = {"comm_hook": "none", "is_lossy": False, "plan": {}}
    plan: dict[str, Any] = {"comm_hook": "int8", "is_lossy": True, "plan": {"comm_hook": {"name": "int8"}}}
    for rank in range(2):
        writer = StepWriter(rank_file(tmp_path, rank), header(rank, **none))
        for number, values in enumerate((none, plan, plan, plan)):
            writer.write([STEPS[number]])
            writer.change(values)
    types = [line["type"] for line in _lines(rank_file(tmp_path, 0))]
    assert types == ["run", "layout", "step", "step", "change", "step", "step"]
    ranks = read_run(tmp_path)
    assert [records.header for records in ranks] == [{**ranks[0].header, **header(rank), **plan} for rank in range(2)]
    assert [*common_steps(ranks)] == [0, 1, 2, 3]
    assert [*steps_of_plan(ranks)] == [2, 3]
    # Another fit has written in between.
    with rank_file(tmp_path, 1).open("a") as file:
        file.write(f"{json.dumps({'type': 'run', 'format': 1, **header(1, fit='other')})}\n")
    writer.write([step_record(4)])
    (continued,) = (records for records in read_run(tmp_path) if records.rank == 1)
    assert (continued.header["comm_hook"], continued.num_before_change) == ("int8", 0)


def test_without_steps_there_is_no_file(tmp_path):
    StepWriter(rank_file(tmp_path, 0), header()).write([])
    assert list(tmp_path.iterdir()) == []


def test_a_header_that_json_cannot_hold_is_told_before_training(tmp_path):
    with pytest.raises(TypeError, match="set"):
        StepWriter(rank_file(tmp_path, 0), header(plan={1, 2}))


def test_of_a_resumed_run_the_last_fit_is_read(tmp_path):
    StepWriter(rank_file(tmp_path, 0), header(world_size=1, plan="one")).write(STEPS[:3])
    StepWriter(rank_file(tmp_path, 0), header(world_size=1, plan="two")).write([replace(STEPS[3], layout={})])
    (last,) = read_run(tmp_path)
    assert (last.header["plan"], [record.step for record in last.steps]) == ("two", [3])
    assert last.steps[0].layout == {}
    types = [line["type"] for line in _lines(rank_file(tmp_path, 0))]
    assert types == ["run", "layout", "step", "step", "step", "run", "step"]


def test_ranks_of_different_fits_are_not_mixed(tmp_path):
    """If it fails, waits and stragglers come from an earlier fit of a rank that was killed in the last one."""
    for rank in range(2):
        StepWriter(rank_file(tmp_path, rank), header(rank, fit="one")).write(STEPS)
    StepWriter(rank_file(tmp_path, 0), header(0, origin_unix_s=1.8e9, fit="two")).write(STEPS[:2])
    (last,) = read_run(tmp_path)
    assert (last.header["fit"], len(last.steps)) == ("two", 2)
    assert notices([last]) == ["ranks without records: 1 (of 2 ranks)"]


def test_two_runs_that_write_to_one_file_are_not_mixed(tmp_path):
    """If it fails, steps of one run count as those of another that runs in the same directory."""
    first, second = (StepWriter(rank_file(tmp_path, 0), header(world_size=1, fit=name)) for name in ("one", "two"))
    for number, writer in enumerate([first, second, first, first]):
        writer.write([STEPS[number]])
    (last,) = read_run(tmp_path)
    assert (last.header["fit"], [record.step for record in last.steps]) == ("one", [2, 3])
    assert [record.layout for record in last.steps] == [layout()] * 2


def test_a_file_that_is_cut_anywhere_gives_the_steps_before_the_cut(tmp_path):
    path = rank_file(tmp_path, 0)
    StepWriter(path, header(world_size=1)).write(STEPS)
    whole = path.read_bytes()
    ends = [index + 1 for index, byte in enumerate(whole) if byte == ord("\n")]
    for size in [*range(ends[0], len(whole), 41), *(end + by for end in ends[:-1] for by in (-1, 0, 1))][1:]:
        path.write_bytes(whole[:size])
        (found,) = read_run(tmp_path)
        num_whole_lines = sum(end - 1 <= size for end in ends)
        assert len(found.steps) == max(0, num_whole_lines - 2)
        assert found.is_cut == (size not in ends and size + 1 not in ends)
        told = f"{path}: its last line is cut off, probably by a killed process, and is ignored"
        assert notices([found]) == ([told] if found.is_cut else [])
    path.write_bytes(whole[: ends[0] - 5])
    with pytest.raises(ValueError, match="line of type 'run'"):
        read_run(tmp_path)


def test_a_fit_after_a_killed_one_begins_on_a_new_line(tmp_path):
    """Else the header would be lost with the line that was cut."""
    path = rank_file(tmp_path, 0)
    StepWriter(path, header(world_size=1)).write(STEPS[:2])
    path.write_bytes(path.read_bytes()[:-40])
    StepWriter(path, header(world_size=1)).write(STEPS[2:])
    (last,) = read_run(tmp_path)
    assert [record.step for record in last.steps] == [2, 3]
    assert notices([last]) == []


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "null",
        "[]",
        "7",
        '"type"',
        "{}",
        '{"type": "step"}',
        '{"type": "layout", "buckets": 3}',
        '{"type": "layout", "buckets": [{"index": 1e999, "gradient_bytes": 1, "names": []}]}',
        '{"type": "step", "step": Infinity}',
        '{"type": "step", "step": 1, "num_samples": 4, "phases": [["data", 0.0, NaN]], "buckets": []}',
        '{"type": "step", "step": 1, "num_samples": 4, "phases": [["data", 0.0, 1e999]], "buckets": []}',
        '{"type": "step", "step": 1, "num_samples": 4, "phases": [["data", 3.0, 2.0]], "buckets": []}',
        "[" * 100_000,
        "\x00\x00",
        "\xff",
    ],
)
def test_a_broken_line_is_left_out_and_counted(tmp_path, line):
    path = rank_file(tmp_path, 0)
    StepWriter(path, header(world_size=1)).write(STEPS[:2])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:-1], line.encode("latin-1") + b"\n", lines[-1]]))
    (found,) = read_run(tmp_path)
    assert [record.step for record in found.steps] == [0, 1]
    assert [*found.broken_lines] == [4]
    (notice,) = notices([found])
    assert notice.startswith(f"{path} is damaged, and this is ignored: line 4: ")
    assert "killed" not in notice


@pytest.mark.parametrize("broken", ['{"type": "run"}', '{"type": "run", "format": 1, "rank": 0, "world_size": "?"}'])
def test_steps_after_a_broken_header_are_of_no_fit(tmp_path, broken):
    """They must not be taken for steps of the fit before."""
    path = rank_file(tmp_path, 0)
    StepWriter(path, header(world_size=1)).write(STEPS[:1])
    path.write_text(path.read_text() + broken + "\n" + '{"type":"step",' + STEPS[1].to_json()[1:] + "\n")
    (found,) = read_run(tmp_path)
    assert [record.step for record in found.steps] == [0]
    assert [*found.broken_lines] == [4]


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "it is empty"), (b"\x89PNG\r\n\x1a\n\xff\n", "it is binary"), (b'{"type": "ru', "Unterminated string")],
)
def test_a_rank_whose_file_cannot_be_read_is_not_taken_for_absent(tmp_path, content, reason):
    """If it fails, who has a damaged file looks for a rank that has never written one."""
    write_run(tmp_path)
    path = rank_file(tmp_path, 0)
    path.write_bytes(content)
    (notice,) = notices(read_run(tmp_path))
    assert notice.startswith(f"rank 0 is ignored: {path} has no line of type 'run' that can be read (")
    assert reason in notice


def test_holes_are_counted_and_placed(tmp_path):
    path = rank_file(tmp_path, 0)
    StepWriter(path, header(world_size=1)).write(STEPS)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], b"{\n", lines[3], b"\xff\n", b"\x00\n", *lines[4:]])[:-20])
    (found,) = read_run(tmp_path)
    assert [*found.broken_lines] == [4, 6, 7]
    hole, cut = notices([found])
    assert "3 lines (4, 6, 7), the first line 4: " in hole
    assert cut.startswith(f"{path}: its last line is cut off")


def test_lines_of_later_versions_are_passed_over(tmp_path):
    path = rank_file(tmp_path, 0)
    StepWriter(path, header(world_size=1, new_key=1)).write(STEPS[:1])
    path.write_text(path.read_text() + '{"type": "memory", "peak_bytes": 1}\n\n')
    (found,) = read_run(tmp_path)
    assert len(found.steps) == 1
    assert notices([found]) == []


def test_a_later_format_is_an_error(tmp_path):
    write_run(tmp_path)
    path = rank_file(tmp_path, 1)
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(ValueError, match=r"rank_1.jsonl has format 2, but this version reads formats up to 1"):
        read_run(tmp_path)


def test_without_files_the_error_names_what_was_expected(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no records of steps: expected .*comm_time/rank_0.jsonl"):
        read_run(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"nowhere does not exist: expected"):
        read_run(tmp_path / "nowhere")


def test_the_error_for_the_folder_of_the_files_names_the_run(tmp_path):
    write_run(tmp_path)
    with pytest.raises(FileNotFoundError, match=rf"did you mean its parent, {tmp_path}\?$"):
        read_run(rank_file(tmp_path, 0).parent)


def test_ranks_are_in_order_and_missing_ones_are_reported(tmp_path):
    for rank in (10, 9, 2):
        StepWriter(rank_file(tmp_path, rank), header(rank, world_size=11)).write(STEPS)
    ranks = read_run(tmp_path)
    assert [found.rank for found in ranks] == [2, 9, 10]
    assert notices(ranks) == ["ranks without records: 0, 1, 3, 4, 5, 6, 7, 8 (of 11 ranks)"]


def test_files_of_ranks_that_the_last_fit_has_not_are_left_out(tmp_path):
    """A run on four ranks that is resumed on two leaves the files of ranks 2 and 3 behind."""
    for rank in range(4):
        StepWriter(rank_file(tmp_path, rank), header(rank, world_size=4)).write(STEPS)
    for rank in range(2):
        StepWriter(rank_file(tmp_path, rank), header(rank, origin_unix_s=1.8e9)).write(STEPS[:1])
    ranks = read_run(tmp_path)
    assert [found.rank for found in ranks] == [0, 1]
    assert all(len(found.steps) == 1 for found in ranks)


@contextmanager
def full_after(num_bytes: int) -> Iterator[None]:
    """Expects that what is written within does not fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_is_full_leaves_no_part_of_a_json_file(tmp_path):
    """If it fails, each run with a full disk leaves a hidden file there, and no file can be written any more."""
    write_json(tmp_path / "run.json", "old")
    with full_after(100):
        write_json(tmp_path / "run.json", "new" * 100)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    assert json.loads((tmp_path / "run.json").read_text()) == "old"


def test_a_disk_that_is_full_leaves_whole_lines_and_the_call_can_be_repeated(tmp_path):
    path = rank_file(tmp_path, 0)
    writer = StepWriter(path, header(world_size=1))
    writer.write(STEPS[:1])
    before = path.read_bytes()
    with full_after(len(before) + 500):
        writer.write(STEPS[1:])
    assert path.read_bytes() == before
    writer.write(STEPS[1:])
    (found,) = read_run(tmp_path)
    assert [record.step for record in found.steps] == [0, 1, 2, 3]
    assert notices([found]) == []


def test_a_directory_that_cannot_be_made_is_an_oserror(tmp_path):
    (tmp_path / "comm_time").write_text("a file")
    writer = StepWriter(rank_file(tmp_path, 0), header())
    with pytest.raises(OSError, match="comm_time"):
        writer.write(STEPS)
    (tmp_path / "comm_time").unlink()
    writer.write(STEPS)
    assert [line["type"] for line in _lines(rank_file(tmp_path, 0))] == ["run", "layout", *["step"] * 4]
