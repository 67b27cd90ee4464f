import csv
import json
import math
import re
import resource

import pytest

from lightning_commopt.report.build import build_report
from lightning_commopt.report.outputs import to_plain, write_csv, write_files
from support.known import known
from support.sample_runs import save_rates, save_run
from support.sample_tuning import INT8, SMALL, sample_tuning


def test_json_has_the_numbers_of_the_report(report):
    plain = json.loads(json.dumps(to_plain(report), allow_nan=False))
    assert plain["format"] == 1
    assert plain["conditions"] == dict(report.conditions)
    assert [group["answer"] for group in plain["groups"]] == [list(group.answer) for group in report.groups]
    for group, expected in zip(plain["groups"], report.groups, strict=True):
        assert group["fastest"] == expected.fastest.name
        for setting, wanted in zip(group["settings"], expected.settings, strict=True):
            assert setting["samples_per_s"]["median"] == known(wanted.samples_per_s).median
            assert [run["samples_per_s"] for run in setting["runs"]] == [
                run.record.samples_per_s for run in wanted.runs
            ]
            assert setting["config_lines"] == list(wanted.config_lines)
            assert len(setting["published"]) == len(wanted.published)
        assert len(group["scalings"]) == len(expected.scalings)
    assert [run["error"] for run in plain["failed"]] == [run.record.error for run in report.failed]


def test_what_is_no_number_is_null(tmp_path):
    save_rates(tmp_path, {"none": [1.0, 2.0]}, {"none": [math.nan, 2.0]})
    plain = to_plain(build_report([tmp_path]))
    json.dumps(plain, allow_nan=False)
    assert [run["val_loss"] for run in plain["groups"][0]["settings"][0]["runs"]] == [None, 2.0]
    assert plain["groups"][0]["settings"][0]["num_diverged"] == 1


def test_a_run_with_an_impossible_throughput_is_left_out(tmp_path):
    """If it fails, one damaged record makes a report of NaN, or none at all."""
    save_rates(tmp_path, {"none": [1.0, math.nan], "bf16": [math.inf]})
    report = build_report([tmp_path])
    json.dumps(to_plain(report), allow_nan=False)
    assert [len(setting.runs) for group in report.groups for setting in group.settings] == [1]
    assert re.findall("samples_per_s is (nan|inf)", " ".join(report.problems)) == ["inf", "nan"]


def _rows(report, folder):
    write_csv(report, folder / "report.csv")
    with (folder / "report.csv").open(newline="") as file:
        return {row["setting"]: row for row in csv.DictReader(file)}


def test_csv_has_a_row_for_each_setting(ladder, tmp_path):
    rows, settings = _rows(ladder, tmp_path), {setting.name: setting for setting in ladder.groups[0].settings}
    assert list(rows) == list(settings)
    bf16, expected = rows["bf16"], settings["bf16"]
    speedup = known(expected.speedup)
    assert (float(bf16["speedup"]), float(bf16["speedup_low"])) == (speedup.median, speedup.low)
    assert bf16["variant"] == "bf16"
    assert bf16["difference"] == "faster"
    assert "+65 % on 8x L40S (PCIe) (write-up" in bf16["published"]
    assert (rows["one bucket"]["difference"], rows["one bucket"]["speedup"]) == ("baseline", "")


def test_json_and_csv_have_the_search_of_each_repetition(tmp_path):
    """If it fails, only the page shows which plan plan="auto" has found, and what that cost."""
    found = [sample_tuning({INT8: 0.4, SMALL: 1.4}), sample_tuning({INT8: 1.4})]
    for repetition, tuning in enumerate(found):
        overrides = ("strategy.plan=auto", f"repetition={repetition}")
        save_run(tmp_path / "auto" / str(repetition), *overrides, sync_method="auto", tuning=tuning)
    save_run(tmp_path / "none", "strategy.plan=null")
    report = build_report([tmp_path])
    (auto, plain) = json.loads(json.dumps(to_plain(report), allow_nan=False))["groups"][0]["settings"]
    assert [run["tuning"] for run in auto["runs"]] == found
    assert [run["tuning"] for run in plain["runs"]] == [None]
    lost_steps = [f"{tuning['lost_steps']:g}" for tuning in found]
    assert [(row["chosen"], row["lost_steps"]) for row in _rows(report, tmp_path).values()] == [
        ("int8; uncompressed", "; ".join(lost_steps)),
        ("", ""),
    ]


def test_a_full_disk_leaves_the_earlier_report(sweep, tmp_path):
    """If it fails, half a page replaces the earlier one, and nothing says which file could not be written."""
    page, table = write_files(sweep, tmp_path)
    before = page.read_bytes(), table.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError, match=f"{re.escape(repr(str(page)))}$"):
            write_files(sweep, tmp_path)
        with pytest.raises(OSError, match=f"{re.escape(repr(str(table)))}$"):
            write_csv(sweep, table)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (page.read_bytes(), table.read_bytes()) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [page.name, table.name][::-1]
