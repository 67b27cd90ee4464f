"""What these commands print fits the terminal: no number is cut in a narrow one, and no encoding ends a command."""

import os
from pathlib import Path

import pytest
from rich.console import Console

from commopt_diagnose.bench.result import Row
from commopt_diagnose.bench.terminal import print_bench
from commopt_diagnose.doctor.terminal import print_findings, print_hang_report
from commopt_diagnose.nccl_log.findings import find_all
from commopt_diagnose.nccl_log.reader import read_log
from commopt_diagnose.nccl_log.terminal import print_log
from commopt_diagnose.topology.findings import find_all as find_in_topology
from commopt_diagnose.topology.sources import read_content
from commopt_diagnose.topology.terminal import print_topology
from diagnose_support.nccl_sample_logs import BROKEN, SLOW, SampleJob
from diagnose_support.sample_bench import result_of, sample
from diagnose_support.topology_samples import PRINTED, SAMPLES, Sample
from lightning_commopt.text.findings import Finding
from lightning_commopt.watch.hangs.diagnosis import diagnose
from lightning_commopt.watch.hangs.records import HangReport, Records
from lightning_commopt.watch.hangs.snapshot import RankSnapshot
from support.narrow import ASCII, check_numbers_are_whole, printed, printed_in_ascii

SNAPSHOTS = [
    RankSnapshot(rank=0, host="gpu-node-0001", step=123456, idle_s=1234, called="all_reduce", place="src/fit.py:1234"),
    RankSnapshot(rank=1, host="gpu-node-0002", step=123456, idle_s=1235, place="experiments/training_loop.py:98765"),
]


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


@pytest.mark.parametrize("sample", [*PRINTED.values(), SAMPLES["nvswitch_16"]], ids=[*PRINTED, "nvswitch_16"])
def test_topologies(sample: Sample) -> None:
    machine = read_content(sample.tabbed().encode(), "input")
    found = find_in_topology(machine)
    check_numbers_are_whole(lambda console: print_topology(machine, found, console))


def test_links_of_a_matrix_wider_than_the_terminal_stand_beside_their_device() -> None:
    machine = read_content(SAMPLES["nvswitch_8"].tabbed().encode(), "input")
    shown = printed(lambda console: print_topology(machine, [], console), 40)
    assert "NIC7 SYS" in " ".join(shown.split())


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


def test_findings() -> None:
    what, advice = "port 29511 of 10.123.45.67 is closed", "open ports 1024-65535"
    finding = Finding(severity="error", where="gpu-node-0001", what=what, advice=advice)
    check_numbers_are_whole(lambda console: print_findings([finding], [], console))


@pytest.mark.exhaustive
@pytest.mark.parametrize("variables", ASCII)
def test_commands_print_in_ascii(variables: dict[str, str], tmp_path: Path) -> None:
    """If it fails, a command dies half way where a terminal or a cron job has no UTF-8."""
    logs = SLOW.write(tmp_path / "log")
    (tmp_path / "topo.txt").write_text(next(iter(PRINTED.values())).tabbed(), encoding="utf-8")
    result_of(sample(lambda size: 1e-3 + size / 1e9)).save(tmp_path / "bench.json")
    for snapshot in SNAPSHOTS:
        Records(tmp_path / "hangs", snapshot.rank).keep(snapshot, [])
    commands = [
        ["nccl-log", *map(str, logs)],
        ["topo", "--from", str(tmp_path / "topo.txt")],
        ["bench", "--load", str(tmp_path / "bench.json"), "--predict", "1M"],
        ["doctor", str(tmp_path)],
        ["bench", "--help"],
    ]
    shown = printed_in_ascii(commands, variables)
    assert "GB/s" in shown
    assert " +- " in shown
