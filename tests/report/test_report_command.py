"""``commopt report``: files, output and exit status."""

import json
import os
import subprocess
import sys

import pytest

from lightning_commopt.report import page
from lightning_commopt.report.terminal import report_sweep
from support.commopt import Printed, commopt, refusal
from support.narrow import printed
from support.sample_runs import save_rates, save_run

RATES = {"none": [100, 101, 99], "bf16": [150, 152, 148]}
SLOWER = {"none": [100, 101, 99], "bf16": [120, 121, 119]}


def _run(*arguments: object, status: int = 0) -> Printed:
    return commopt("report", *arguments, status=status, columns=100)


def test_the_page_and_the_table_lie_in_the_sweep(tmp_path):
    sweep = save_rates(tmp_path / "sweep", RATES)
    result = _run(sweep)
    assert '"bf16" is the fastest' in result.stdout
    assert f"report: {sweep}/report.html and {sweep}/report.csv" in result.stdout
    assert (sweep / "report.csv").read_text().startswith("group,setting,")
    assert "</html>" in (sweep / "report.html").read_text()


@pytest.mark.parametrize("json", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_files_are_written_whoever_reads_the_output(tmp_path, json):
    """If it fails, ``commopt report DIR | head -1`` leaves no page, or ends in an error message."""
    sweep = save_rates(tmp_path / "sweep", RATES)
    read, write = os.pipe()
    os.close(read)
    code = "from lightning_commopt.commands.app import app; app()"
    command = [sys.executable, "-c", code, "report", str(sweep), *["--json"] * json]
    ended = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert json or "</html>" in (sweep / "report.html").read_text()
    assert (ended.returncode, ended.stderr) == (1, b"")


def test_a_second_report_reads_the_same_runs(tmp_path):
    """Its own files are no runs and no problems."""
    sweep = save_rates(tmp_path / "sweep", RATES)
    first, second = _run(sweep), _run(sweep)
    assert first.stdout == second.stdout


FILES: dict[str, tuple[list[str], set[str]]] = {
    "a folder": (["--output=new/folder"], {"new/folder/report.html", "new/folder/report.csv"}),
    "a page": (["--output=new/x.HTM"], {"new/x.HTM", "new/x.csv"}),
    "a table": (["--csv=x.csv"], {"sweep/report.html", "x.csv"}),
    "json alone": (["--json"], set()),
    "json and a folder": (["--json", "--output=."], {"report.html", "report.csv"}),
    "a slip before the sweep": (["sweeep"], {"sweep/report.html", "sweep/report.csv"}),
}


@pytest.mark.parametrize(("options", "files"), FILES.values(), ids=FILES.keys())
def test_files_lie_where_they_are_asked_for(tmp_path, monkeypatch, options, files):
    monkeypatch.chdir(tmp_path)
    save_rates(tmp_path / "sweep", RATES)
    result = _run(*options, "sweep")
    found = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*") if path.name != "run.json"}
    assert found == files
    assert not (tmp_path / "sweeep").exists()
    if "--json" in options:
        assert json.loads(result.stdout)["groups"][0]["fastest"] == "bf16"
        assert ("report.html" in result.stderr) == bool(files)


def test_a_file_is_no_folder_for_the_page(tmp_path):
    sweep = save_rates(tmp_path / "sweep", RATES)
    (tmp_path / "notes.txt").write_text("mine")
    result = _run(sweep, "--output", tmp_path / "notes.txt", status=2)
    assert "notes.txt is a file: name a folder, or a page with the suffix .html" in result.stderr
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_several_sweeps_are_one_report(tmp_path):
    a, b = save_rates(tmp_path / "a", RATES), save_rates(tmp_path / "b", {"int8": [200.0]})
    plain = json.loads(_run(a, b, "--json").stdout)
    assert [setting["name"] for setting in plain["groups"][0]["settings"]] == ["bf16", "uncompressed", "int8"]


def test_baseline_is_a_setting(tmp_path):
    sweep = save_rates(tmp_path / "sweep", RATES)
    assert json.loads(_run(sweep, "--json", "--baseline", "bf16").stdout)["groups"][0]["baseline"] == "bf16"
    refused = refusal("report", sweep, "--baseline", "fp16")
    assert refused == "commopt: no setting is called 'fp16'; there are: bf16; uncompressed"


@pytest.mark.parametrize(("now", "status", "as_file"), [(RATES, 0, False), (SLOWER, 1, True)])
def test_earlier_is_a_gate(tmp_path, now, status, as_file):
    before, after = save_rates(tmp_path / "before", RATES), save_rates(tmp_path / "after", now)
    other = before
    if as_file:
        other = tmp_path / "before.json"
        other.write_text(_run(before, "--json").stdout)
    shown = _run(after, "--earlier", other, "--tolerance", 0.1, status=status).stdout
    assert "with a tolerance of 10 %:" in shown
    assert ("slower (1)\n  bf16: 120 samples/s, before 150, ratio 0.800 (0.783 to 0.818)" in shown) is bool(status)
    as_json = _run(after, "--json", "--earlier", other, status=status)
    assert json.loads(as_json.stdout)["regressions"]["is_worse"] is bool(status)


def test_no_file_says_where_it_was_made(tmp_path, monkeypatch):
    """If it fails, a page that is shared tells a user's name and folders."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in "ab":
        sweep = tmp_path / name / "sweep"
        error = f"OSError: {sweep}/x/log, {sweep}/y and {tmp_path}/home/.cache"
        save_rates(sweep, RATES)
        save_run(sweep / "x", status="failed", error=error)
    (tmp_path / "none").mkdir()
    folders = [tmp_path / name for name in ("a/sweep", "b/sweep", "gone", "none")]
    result = _run(*folders, "--json", "--output", tmp_path, "--earlier", tmp_path / "a" / "sweep")
    assert json.loads(result.stdout)["failed"][0]["error"] == "OSError: …/log, …/y and …/.cache"
    assert str(tmp_path) not in result.stdout + (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sweep", "--earlier", "gone"], "--earlier gone does not exist: give the directory of a sweep, or a file"),
        (["sweep", "--earlier", "sweep", "--tolerance", "5"], "tolerance must be a share"),
        (["sweep", "--tolerance", "0.1"], "--tolerance 0.1 is for a comparison: add --earlier, or leave it out"),
        ([], "Missing argument"),
    ],
)
def test_mistakes_have_a_status_of_their_own(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    save_rates(tmp_path / "sweep", RATES)
    output = _run(*arguments, status=2).output
    assert "Traceback" not in output
    assert message in output


def test_what_cannot_be_read_is_said_and_the_rest_is_reported(tmp_path):
    sweep = save_rates(tmp_path / "sweep", RATES)
    (sweep / "bf16_0" / "run.json").write_text("{")
    result = _run(sweep, tmp_path / "gone")
    assert "warning: gone does not exist" in result.stdout
    assert "warning: sweep/bf16_0/run.json cannot be read" in result.stdout
    assert "is the fastest" in result.stdout


def _reported(folder) -> str:  # type: ignore[no-untyped-def]
    return printed(lambda console: report_sweep(folder, console), 60, is_terminal=False)


def test_a_sweep_ends_with_its_answer_and_where_the_page_is(tmp_path):
    printed = _reported(save_rates(tmp_path / "sweep", RATES))
    assert "is the fastest" in printed
    assert printed.endswith(f"report: {tmp_path}/sweep/report.html\n")
    assert (tmp_path / "sweep" / "report.csv").is_file()


def test_a_report_that_fails_does_not_fail_the_sweep(tmp_path, monkeypatch):
    assert _reported(tmp_path).startswith("warning: no report was written: ")
    save_rates(tmp_path, RATES)

    def broken(*arguments: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr(page, "write_page", broken)
    assert _reported(tmp_path).endswith("warning: no report was written: 'x'\n")
