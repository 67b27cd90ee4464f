"""Commands find the newest run below the directory that a user names."""

import os
from pathlib import Path

import pytest

from lightning_commopt.commands.run_dirs import newest_run
from support.commopt import commopt
from support.sample_runs import SampleRun, write_run


def test_the_newest_run_below_a_directory_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If it fails, a command reads another run than the last one, or does not name the one that it has read."""
    for name, written_unix_s in (("second", 2e9), ("deeper/first", 3e9), ("third", 1e9)):
        folder = tmp_path / name / "comm_time"
        folder.mkdir(parents=True)
        for number in range(2):
            (folder / f"rank_{number}.jsonl").touch()
            os.utime(folder / f"rank_{number}.jsonl", (written_unix_s - number, written_unix_s - number))
    (tmp_path / "third/comm_time/trace.json").touch()  # a command wrote it, not the run
    os.utime(tmp_path / "third/comm_time", (4e9, 4e9))
    (tmp_path / "empty/comm_time").mkdir(parents=True)
    rank_files = "comm_time/rank_*.jsonl"
    assert newest_run(tmp_path, rank_files) == tmp_path / "deeper/first"
    assert f"commopt: {tmp_path}/deeper/first, the newest of 3 runs below {tmp_path}" in capsys.readouterr().err
    assert newest_run(tmp_path / "deeper/first", rank_files) == tmp_path / "deeper/first"
    assert newest_run(tmp_path / "nowhere", rank_files) == tmp_path / "nowhere"
    assert capsys.readouterr().err == ""


def test_a_traced_run_is_no_newer_than_before(tmp_path: Path) -> None:
    """If it fails, whoever has traced an earlier run reads that one when asking for the newest."""
    for name in ("earlier", "later"):
        write_run(tmp_path / name, SampleRun(num_buckets=4))
    commopt("trace", tmp_path / "earlier")
    summary = commopt("summary", tmp_path, "--num-warmup-steps=0", columns=500)
    assert f"commopt: {tmp_path / 'later'}, " in summary.output


@pytest.mark.usefixtures("quick_costs")
@pytest.mark.parametrize("command", ["summary", "trace", "predict"])
def test_commands_take_a_directory_above_the_run(command: str, tmp_path: Path) -> None:
    """If it fails, whoever names the directory of a sweep or of all logs reads that there are no steps."""
    write_run(tmp_path / "logs" / "version_3", SampleRun(num_buckets=4))
    options = ["--num-warmup-steps=0"] if command == "summary" else []
    assert f"commopt: {tmp_path / 'logs' / 'version_3'}\n" in commopt(command, tmp_path, *options, columns=500).output
