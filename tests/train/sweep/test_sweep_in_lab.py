"""commopt-train as a user runs it, on two hosts with a link of 1 Gbit/s."""

import json
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from lightning_commopt.measure.files import read_run
from lightning_commopt.measure.runs.record import RunRecord
from support.lab_traces import machine_traces
from support.process_groups import is_group_gone
from support.tiny_runs import TINY, Ended, commopt_train, interrupt_sweep

pytestmark = [pytest.mark.usefixtures("lab_machine"), pytest.mark.exhaustive]

IN_LAB = (*TINY, "callbacks.comm_time.print_summary=false", "link=1gbit")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[tuple[Path, Ended]]]]:
    """One run that finishes and one that fails, side by side, each in a folder of its own."""

    def run(name: str, *arguments: str) -> tuple[Path, Ended]:
        folder = tmp_path_factory.mktemp(name)
        (folder / "sources").mkdir()  # too few of them
        return folder, commopt_train("hydra.run.dir=run", *arguments, *IN_LAB, cwd=folder)

    with ThreadPoolExecutor() as pool:
        yield {"finished": pool.submit(run, "finished"), "failed": pool.submit(run, "failed", "data.folder=sources")}


def test_two_ranks_are_two_hosts(runs):
    folder, run = runs["finished"].result()
    assert run.returncode == 0, run.stdout + run.stderr
    record = RunRecord.load(folder / "run")
    assert (record.status, record.world_size, record.strategy) == ("finished", 2, "CommOptDDP")
    assert record.val_loss is not None
    assert "link=1gbit" in record.settings.overrides
    config = (folder / "run" / "config.yaml").read_text()
    assert "devices: 1\n" in config
    assert "num_nodes: 2\n" in config
    ranks = read_run(folder / "run")
    assert [records.rank for records in ranks] == [0, 1]
    assert [len(records.steps) for records in ranks] == [4, 4]
    assert run.stdout.count("final") == 1, "the table, as rank 0 prints it"
    assert sorted(path.name for path in folder.iterdir()) == ["run", "sources"]


def test_a_rank_that_fails_is_shown_and_recorded(runs):
    folder, run = runs["failed"].result()
    assert run.returncode == 1
    assert "sources has too few Python sources" in run.stdout + run.stderr
    assert "ended with status 1" in run.stderr
    record = RunRecord.load(folder / "run")
    assert record.status == "failed"
    assert "FileNotFoundError: sources has too few" in str(record.error)


def test_a_sweep_that_was_interrupted_goes_on(tmp_path):
    """If it fails, an interrupted sweep leaves ranks behind, or what ran before the interrupt is lost."""
    before = machine_traces()
    sweep = ("-m", "strategy/comm_hook=bf16,none", "ranks=1", "hydra.sweep.dir=sweep")
    texts = ["job 1 (2 of 2)", "GPU available"]
    job, _, ended = interrupt_sweep(signal.SIGINT, *sweep, *IN_LAB, cwd=tmp_path, after=texts)
    assert ended.returncode == 128 + signal.SIGINT, ended.stdout
    assert is_group_gone(job)
    assert machine_traces() == before
    assert (
        f"commopt-train -m strategy/comm_hook=bf16,none ranks=1 {' '.join(IN_LAB)} hydra.sweep.dir=sweep\n"
        in ended.stdout
    )
    assert RunRecord.load(tmp_path / "sweep" / "1").error == "interrupted by SIGINT"
    kept = (tmp_path / "sweep" / "0" / "run.json").read_bytes()

    again = commopt_train(*sweep, *IN_LAB, cwd=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "job 0 is not run again" in again.stdout
    assert (tmp_path / "sweep" / "0" / "run.json").read_bytes() == kept
    summary = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert [(job["run"]["status"], job["run"]["world_size"]) for job in summary] == [("finished", 1)] * 2
