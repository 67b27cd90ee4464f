"""What commands print fits the terminal: no number is cut in a narrow one, and no encoding ends a command."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from lightning_commopt.commands.doctor.terminal import print_findings, print_hang_report
from lightning_commopt.commands.info.info import collect, print_info
from lightning_commopt.commands.nccl_log.findings import find_all
from lightning_commopt.commands.nccl_log.reader import read_log
from lightning_commopt.commands.nccl_log.terminal import print_log
from lightning_commopt.commands.selftest.run import Outcome, print_outcome, progress_lines
from lightning_commopt.commands.topology.findings import find_all as find_in_topology
from lightning_commopt.commands.topology.sources import read_content
from lightning_commopt.commands.topology.terminal import print_topology
from lightning_commopt.measure.link.bench_result import Row
from lightning_commopt.measure.runs.record import RunRecord
from lightning_commopt.report.bench_terminal import print_bench
from lightning_commopt.report.model import Report
from lightning_commopt.report.terminal import print_report
from lightning_commopt.text.findings import Finding
from lightning_commopt.text.terminal import TextTable
from lightning_commopt.train.train import run_table
from lightning_commopt.watch.hangs.diagnosis import diagnose
from lightning_commopt.watch.hangs.records import HangReport, Records
from lightning_commopt.watch.hangs.snapshot import RankSnapshot
from support.narrow import check_numbers_are_whole, printed
from support.nccl_sample_logs import BROKEN, SLOW, SampleJob
from support.sample_bench import result_of, sample
from support.sample_runs import SampleRun, four_methods_report, sample_report, write_run
from support.topology_samples import DOCUMENTED

SNAPSHOTS = [
    RankSnapshot(rank=0, host="gpu-node-0001", step=123456, idle_s=1234, called="all_reduce", place="src/fit.py:1234"),
    RankSnapshot(rank=1, host="gpu-node-0002", step=123456, idle_s=1235, place="experiments/training_loop.py:98765"),
]


def table() -> TextTable:
    found = TextTable("name", "value\n(ms)", "what it is", numbers=["value\n(ms)"], title="title 7", caption="below 8")
    found.add_row("first name", "12345678.25", "several words with 1234567890 in them")
    found.add_row("[red]second[/red]", "12.5 %", Text("more"), style="bold")
    return found


def test_a_table_keeps_words_whole() -> None:
    """If it fails, every table of ours cuts or breaks numbers in a narrow terminal."""
    check_numbers_are_whole(lambda console: console.print(table()), 14, 20)
    for width in (14, 20, 40):
        assert "[red]second[/red]" in printed(lambda console: console.print(table()), width).replace("\n", "")


def test_a_table_becomes_a_list_where_it_does_not_fit() -> None:
    lines = [line.rstrip() for line in printed(lambda console: console.print(table()), 30).splitlines()]
    assert lines[:4] == ["title 7, name", "first name", "  value (ms) 12345678.25, what", "  it is several words with"]


def test_what_a_run_was() -> None:
    record = RunRecord(
        status="finished",
        sync_method="alternating_powersgd",
        world_size=128,
        steps_per_s=1234.5,
        samples_per_s=98765.4,
        wire_bytes_per_step=123.4e6,
        comm_time={"exposed_share": 0.1234},
        metrics={"val_loss": 2.3456},
    )
    check_numbers_are_whole(lambda console: console.print(run_table(record)))


@pytest.mark.parametrize("make", [sample_report, four_methods_report])
def test_reports(make: Callable[[Path], Report], tmp_path: Path) -> None:
    report = make(tmp_path)
    for group in report.groups:
        object.__setattr__(group.recommended or group.fastest, "config_lines", [])  # to paste: never wrapped
    check_numbers_are_whole(lambda console: print_report(report, console))


def test_benches() -> None:
    rows = [*sample(lambda size: 1e-3 + size / 1e9), *sample(lambda size: 1e-3 + size / 2e9, place="out")]
    rows.append(Row(case=rows[0].case, error="RuntimeError: 1234567 of 7654321"))
    result = result_of(rows)
    object.__setattr__(result, "peer_copies", [[1e11 + one + other for other in range(8)] for one in range(8)])
    check_numbers_are_whole(lambda console: print_bench(result, console))


def test_a_bench_in_a_pipe_keeps_nccl_tests_columns() -> None:
    """If it fails, scripts that read nccl-tests' table break where COLUMNS is small."""
    result = result_of(sample(lambda size: 1e-3 + size / 1e9))
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(file=nowhere, width=40, record=True)
        print_bench(result, console)
    assert any(len(line.split()) == 9 for line in console.export_text().splitlines() if line.startswith(" "))


@pytest.mark.parametrize("name", DOCUMENTED)
def test_topologies(name: str) -> None:
    machine = read_content(DOCUMENTED[name].tabbed().encode(), "input")
    found = find_in_topology(machine)
    check_numbers_are_whole(lambda console: print_topology(machine, found, console))


@pytest.mark.parametrize("job", [SLOW, BROKEN])
def test_nccl_logs(job: SampleJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job.write(tmp_path)
    log = read_log(sorted(path.relative_to(tmp_path) for path in tmp_path.iterdir()))
    check_numbers_are_whole(lambda console: print_log(log, find_all(log), console))


def test_hangs() -> None:
    """If it fails, `commopt doctor DIR` does not show where a rank is."""
    found = HangReport(diagnose(SNAPSHOTS), was_reported=True, at_unix_s=0.0, snapshots=SNAPSHOTS, marks={})
    check_numbers_are_whole(lambda console: print_hang_report(found, console))
    words = printed(lambda console: print_hang_report(found, console), 40).split()
    assert {"src/fit.py:1234", "experiments/training_loop.py:98765"} <= set(words)


def test_other_commands() -> None:
    """`commopt info`, `doctor` and `selftest`."""
    versions = collect() | {"platform": "Linux"}  # a word that is longer than 40 letters breaks
    check_numbers_are_whole(lambda console: print_info(versions, console))
    outcome = Outcome(name="a check of 16 compressors", status="passed", detail="8 steps, 1234567.5 us", seconds=1.0)
    check_numbers_are_whole(lambda console: print_outcome(outcome, console))
    what, advice = "port 29511 of 10.123.45.67 is closed", "open ports 1024-65535"
    finding = Finding(severity="error", where="gpu-node-0001", what=what, advice=advice)
    check_numbers_are_whole(lambda console: print_findings([finding], [], console))


def test_progress_in_a_file_is_there_at_once(tmp_path: Path) -> None:
    """If it fails, `commopt selftest > file` shows nothing for minutes."""
    path = tmp_path / "output"
    with path.open("w", encoding="utf-8") as file, progress_lines(Console(file=file)) as on_progress:
        for number in range(2):
            on_progress(f"check {number}")
            assert path.read_text(encoding="utf-8").splitlines()[-1] == f"running: check {number}"


_IN_ASCII = """
import json, sys
from lightning_commopt.commands.app import app
for arguments in json.loads(sys.argv[1]):
    try:
        app(arguments)
    except SystemExit as end:
        assert not end.code, (arguments, end.code)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "variables",
    [
        {"PYTHONIOENCODING": "ascii"},
        pytest.param({"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}, id="C locale"),
    ],
)
def test_commands_print_in_ascii(variables: dict[str, str], tmp_path: Path) -> None:
    """If it fails, a command dies half way where a terminal or a cron job has no UTF-8."""
    runs = tmp_path / "runs"
    sample_report(runs)
    write_run(tmp_path / "run", SampleRun())
    logs = SLOW.write(tmp_path / "log")
    (tmp_path / "topo.txt").write_text(next(iter(DOCUMENTED.values())).tabbed(), encoding="utf-8")
    result_of(sample(lambda size: 1e-3 + size / 1e9)).save(tmp_path / "bench.json")
    for snapshot in SNAPSHOTS:
        Records(tmp_path / "hangs", snapshot.rank).keep(snapshot, [])
    commands = [
        ["report", str(runs)],
        ["summary", str(tmp_path / "run"), "--num-warmup-steps=0"],
        ["trace", str(tmp_path / "run")],
        ["nccl-log", *map(str, logs)],
        ["topo", "--from", str(tmp_path / "topo.txt")],
        ["bench", "--load", str(tmp_path / "bench.json"), "--predict", "1M"],
        ["doctor", str(tmp_path)],
        ["info"],
        ["bench", "--help"],
    ]
    ran = subprocess.run(
        [sys.executable, "-c", _IN_ASCII, json.dumps(commands)],
        env=os.environ | variables | {"COLUMNS": "100"},
        capture_output=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr.decode()
    shown = ran.stdout.decode()
    assert re.search(r"\d\.\d\dx faster", shown)
    assert " +- " in shown
