import math
import re
from pathlib import Path

import pytest

from lightning_commopt.measure.files import rank_file
from lightning_commopt.report.runs import read_runs
from support.sample_runs import plan_run, save_rates, save_run, write_run


@pytest.fixture
def sweep(tmp_path):
    """Four runs, whole."""
    for number, comm_hook in enumerate(["none", "bf16", "int8", "powersgd"]):
        write_run(tmp_path / "sweep" / str(number), plan_run(comm_hook, 25, 0))
    return tmp_path / "sweep"


def test_a_run_is_read_as_it_was_written(sweep):
    found = read_runs([sweep])
    assert not found.problems
    assert [run.name for run in found.finished] == ["0", "1", "2", "3"]
    run = found.finished[1]
    assert run.choices == {"strategy/comm_hook": "bf16", "strategy.bucket_cap_mb": 25}
    assert run.settings.get("seed") == 0
    assert [point.kind for point in run.losses].count("val") == 2


def test_jobs_are_in_the_order_of_their_numbers(tmp_path):
    for number in (10, 9, 0):
        save_run(tmp_path / str(number))
    assert [run.name for run in read_runs([tmp_path]).finished] == ["0", "9", "10"]


def test_runs_at_any_depth_and_single_ones(tmp_path):
    save_run(tmp_path / "a" / "b" / "c")
    save_run(tmp_path / "one")
    found = read_runs([tmp_path / "a", tmp_path / "one"])
    assert [run.name for run in found.finished] == ["a/b/c", "one"]
    assert read_runs([tmp_path / "one"]).finished[0].name == "one"


def test_what_a_sweep_has_set_aside_is_left_out(tmp_path):
    save_run(tmp_path / "0")
    save_run(tmp_path / "earlier" / "0.1")
    (tmp_path / "sweep.json").write_text("[]")
    assert [run.name for run in read_runs([tmp_path]).finished] == ["0"]
    (tmp_path / "sweep.json").unlink()
    assert len(read_runs([tmp_path]).finished) == 2


def test_folders_of_one_name_are_told_apart_by_their_paths(tmp_path):
    save_run(tmp_path / "a" / "sweep" / "0")
    save_run(tmp_path / "b" / "sweep" / "0")
    names = [run.name for run in read_runs([tmp_path / "a" / "sweep", tmp_path / "b" / "sweep"]).finished]
    assert names == ["a/sweep/0", "b/sweep/0"]


def test_errors_keep_words_that_are_folders_of_the_reader(tmp_path, monkeypatch):
    monkeypatch.chdir(save_run(tmp_path / "a" / "x", status="failed", error="ValueError: a b").parent.parent)
    assert read_runs([tmp_path.joinpath("a").relative_to(tmp_path)]).failed[0].record.error == "ValueError: a b"


def test_no_run_counts_twice(sweep, monkeypatch):
    monkeypatch.chdir(sweep.parent)
    assert len(read_runs([sweep, sweep / "1", sweep.relative_to(sweep.parent), sweep.parent]).finished) == 4


def test_a_failed_run_keeps_its_error(sweep):
    save_run(sweep / "4", status="failed", error="ValueError: no")
    found = read_runs([sweep])
    assert [(run.name, run.record.error) for run in found.failed] == [("4", "ValueError: no")]
    assert len(found.finished) == 4


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"status": "finished", "sync_method": "none", "samples_per_s": "fast"}',
        '{"status": "finished", "sync_method": "none", "comm_time": {"step_s": null}}',
        "\xff\xfe",  # no UTF-8
    ],
)
def test_a_broken_record_is_a_line_and_the_rest_is_read(sweep, text):
    (sweep / "2" / "run.json").write_text(text, encoding="latin-1")
    found = read_runs([sweep])
    assert [run.name for run in found.finished] == ["0", "1", "3"]
    assert len(found.problems) == 1
    assert found.problems[0].startswith("2/run.json cannot be read, so the run is left out: ")


def test_a_broken_file_beside_the_record_is_a_line_and_the_run_is_kept(sweep):
    (sweep / "1" / "loss.jsonl").write_text("{}\n")
    rank_file(sweep / "2", 2).symlink_to("gone")
    found = read_runs([sweep])
    assert len(found.finished) == 4
    beginnings = ("1/loss.jsonl cannot be read: ", "2/comm_time cannot be read: ")
    assert all(line.startswith(begin) for line, begin in zip(found.problems, beginnings, strict=True))


def test_cut_lines_of_steps_and_ranks_without_them_are_a_line(sweep):
    path = rank_file(sweep / "1", 1)
    path.write_text(path.read_text()[:-30])
    rank_file(sweep / "2", 1).unlink()
    assert read_runs([sweep]).problems == (
        "1: comm_time/rank_1.jsonl: its last line is cut off, probably by a killed process, and is ignored",
        "2: ranks without records: 1 (of 2 ranks)",
    )


def test_runs_without_records_are_one_line_each_kind(tmp_path):
    found = read_runs([save_rates(tmp_path, {"none": [1.0] * 6})])
    names = "none_0, none_1, none_2, none_3 and 2 more"
    assert found.problems == (
        f"no loss curve, as there is no loss.jsonl: {names}",
        f"no timeline, as CommTimeMonitor has saved no steps in comm_time: {names}",
    )


NO_MONITOR = "SpeedMonitor was not among the callbacks"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        *(({"samples_per_s": rate}, NO_MONITOR) for rate in (None, 0.0)),
        ({"num_timed_steps": 0}, "no steps followed the warm-up"),
    ],
)
def test_a_run_without_throughput_is_named(tmp_path, fields, why):
    save_run(tmp_path / "0", **fields)
    assert f"no throughput, as {why}: 0" in read_runs([tmp_path]).problems


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("samples_per_s", float("nan"), "nan, which is not a finite number"),
        ("wire_bytes_per_step", float("inf"), "inf, which is not a finite number"),
        ("seconds", -1.0, "-1.0, which is below 0"),
    ],
)
def test_a_number_that_no_run_has_is_named(sweep, name, value, what):
    """If it fails, tables and figures show what a damaged file says."""
    save_run(sweep / "4", **{name: value})
    found = read_runs([sweep])
    assert found.problems == (f"4/run.json cannot be read, so the run is left out: {name} is {what}",)


def test_a_metric_may_be_anything(tmp_path):
    """A run that has diverged is a run."""
    save_run(tmp_path / "0", metrics={"val_loss": float("nan")}, comm_time={"compression_ratio": float("inf")})
    assert [math.isnan(run.record.val_loss or 0) for run in read_runs([tmp_path]).finished] == [True]


def test_a_point_of_a_loss_curve_is_named_by_its_line(sweep):
    path = sweep / "1" / "loss.jsonl"
    first = path.read_text().splitlines()[0]
    path.write_text(f'{first}\n\n{{"kind": "train", "step": 1, "seconds": NaN, "loss": 1.0}}\n')
    (problem,) = read_runs([sweep]).problems
    assert problem.startswith("1/loss.jsonl cannot be read: ")
    assert "line 3 is not a point of a loss curve: seconds is nan" in problem
    path.write_text(f'{first}\n{{"kind": "train", "step": 1, "seconds": 2.0, "loss": NaN}}\n')
    assert read_runs([sweep]).problems == ()


def test_a_run_that_still_runs_is_named(sweep):
    save_run(sweep / "4", status="running")
    found = read_runs([sweep])
    assert found.problems == ("still running or killed, left out: 4",)
    assert len(found.finished) == 4


def test_other_directories_are_lines_beside_a_sweep(sweep, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    found = read_runs([sweep, tmp_path / "empty", tmp_path / "gone", tmp_path / "file"])
    assert len(found.finished) == 4
    assert found.problems == (
        "empty is not a sweep: neither it nor a subdirectory has a run.json, which commopt-train and RunRecorder write",
        "gone does not exist",
        "file is not a directory",
    )


NOTHING = {
    "empty": "{folder} is not a sweep: neither it nor a subdirectory has a run.json",
    "gone": "{folder} does not exist",
    "broken": "{folder}/0/run.json cannot be read, so the run is left out: ",
    "running": "still running or killed, left out: {folder}/0",
}


@pytest.mark.parametrize("is_absolute", [True, False])
def test_nothing_to_report_is_an_error_with_the_path_as_it_was_given(tmp_path, monkeypatch, is_absolute):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (save_run(tmp_path / "broken" / "0") / "run.json").write_text("{")
    save_run(tmp_path / "running" / "0", status="running")
    folders = {tmp_path / name if is_absolute else Path(name): text for name, text in NOTHING.items()}
    for folder, text in folders.items():
        for given in ([folder], [*folders]):
            with pytest.raises(ValueError, match=re.escape(text.format(folder=folder))):
                read_runs(given)


def test_more_steps_than_can_be_read_are_left_out(sweep, monkeypatch):
    monkeypatch.setattr("lightning_commopt.report.runs._MAX_STEPS_BYTES", 30_000)
    with rank_file(sweep / "1", 0).open("a") as file:
        file.write("\n" * 30_000)
    found = read_runs([sweep])
    assert found.problems == ("no timeline, as there are more than 0 MB of steps in comm_time: 1",)
    assert [run.has_steps for run in found.finished] == [True, False, True, True]


def test_many_runs_are_not_all_checked(sweep, monkeypatch):
    """If it fails, a report of a hundred runs parses all of their steps, though it shows eight."""
    most = sum(path.stat().st_size for number in "01" for path in (sweep / number).glob("comm_time/*"))
    monkeypatch.setattr("lightning_commopt.report.runs._MAX_STEPS_BYTES", most)
    found = read_runs([sweep])
    assert found.problems == ("steps in comm_time not checked for broken lines, as there are many: 2, 3",)
    assert all(run.has_steps for run in found.finished)
