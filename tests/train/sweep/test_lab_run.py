"""One run on hosts of the lab; the ranks are shells that train nothing."""

import json
import os
import signal
import sys
import threading
from dataclasses import replace

import pytest

from lightning_commopt.launch.environment import LAB_RANK_VARIABLE
from lightning_commopt.launch.process import InterruptedRun
from lightning_commopt.measure.runs.files import RUN_FILE
from lightning_commopt.measure.runs.record import RunRecord
from lightning_commopt.measure.runs.settings import Settings
from lightning_commopt.train.sweep.config import LabShape
from lightning_commopt.train.sweep.lab_run import RankFailed, run_in_lab
from support.cross_section import sampled
from support.lab_traces import SAY_NAMESPACES, are_empty, machine_traces, namespaces_in

pytestmark = pytest.mark.usefixtures("lab_machine")

UNFINISHED = RunRecord(status="running", sync_method="p", settings=Settings(overrides=("link=1gbit",)))
TWO_HOSTS = LabShape(num_hosts=2, ranks_per_host=1)


def run(code, folder, shape=TWO_HOSTS):
    """Runs Python code as every rank; it finds ``rank`` and ``record(status, **values)``."""
    head = f"""
import json, os, sys, time
rank = int(os.environ["RANK"])
def record(status, **values):
    with open({str(folder / RUN_FILE)!r}, "w") as file:
        json.dump(dict(status=status, sync_method="own", **values), file)
"""
    return run_in_lab((sys.executable, "-S", "-c", head + code), "1gbit", shape, UNFINISHED, folder)


def test_ranks_find_their_places_and_rank_0_is_heard(tmp_path, capfd, monkeypatch):
    code = f"""
names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", {LAB_RANK_VARIABLE!r}, "OMP_NUM_THREADS"
with open(f"rank_{{rank}}", "w") as file:
    json.dump([*(int(os.environ[name]) for name in names), len(os.sched_getaffinity(0))], file)
print("from", rank)
if rank == 0:
    record("finished", metrics=dict(val_loss=1.5))
"""
    monkeypatch.chdir(tmp_path)
    shape = LabShape(num_hosts=2, ranks_per_host=2)
    assert run(code, tmp_path, shape) == RunRecord(status="finished", sync_method="own", metrics={"val_loss": 1.5})
    places = [json.loads((tmp_path / f"rank_{rank}").read_text()) for rank in range(4)]
    assert places == [[rank, 4, rank % 2, rank // 2, 1, 1, 1] for rank in range(4)]
    assert capfd.readouterr().out == "from 0\n"


def test_one_rank_is_pinned_too(tmp_path):
    code = "record('finished', metrics=dict(val_loss=len(os.sched_getaffinity(0))))"
    assert run(code, tmp_path, LabShape(num_hosts=1, ranks_per_host=1)).val_loss == 1


def test_the_record_of_an_earlier_run_in_the_folder_does_not_count(tmp_path):
    RunRecord(status="finished", sync_method="old").save(tmp_path)
    with pytest.raises(FileNotFoundError):
        run("", tmp_path)


def test_the_first_rank_that_fails_is_named_with_its_last_lines(tmp_path):
    """If it fails, the user reads of a lost connection and not of the mistake that caused it."""
    code = """
if rank == 1:
    print("loading\\n" * 50 + "almost there")
    time.sleep(1)
    raise ValueError("no such token")
record("failed", error="RuntimeError: Connection closed by peer")
time.sleep(600)
"""
    message = r"(?s)rank 1 ended with status 1; its last lines:.*almost there.*no such"
    with pytest.raises(RankFailed, match=message) as caught:
        run(code, tmp_path)
    assert len(str(caught.value).splitlines()) == 41
    record = RunRecord.load(tmp_path)
    assert (record.status, record.error) == ("failed", "rank 1 ended with status 1: ValueError: no such token")


_RAISED_AS_RECORDED = ("record('failed', error='E: own'); raise ValueError('this value')", "E: own")
_ENDED_AFTER_ITS_FIT = (
    "record('finished', metrics=dict(val_loss='low')); raise SystemExit(3)",
    "rank 0 ended with status 3",
)


@pytest.mark.parametrize(
    ("code", "error"),
    sampled(
        [
            ("record('running'); raise ValueError('this value')", "rank 0 ended with status 1: ValueError: this value"),
            _RAISED_AS_RECORDED,
            ("record('finished'); os.kill(os.getpid(), 9)", "rank 0 ended with status -9"),
            ("raise SystemExit(3)", "rank 0 ended with status 3"),
            _ENDED_AFTER_ITS_FIT,
        ],
        by_default=[_RAISED_AS_RECORDED, _ENDED_AFTER_ITS_FIT],
    ),
)
def test_rank_0_is_recorded_with_its_reason(tmp_path, capfd, code, error):
    with pytest.raises(RankFailed, match=r"rank 0 ended with status .*; its output is above"):
        run(f"if rank == 0:\n    {code}\ntime.sleep(600)", tmp_path)
    record = RunRecord.load(tmp_path)
    assert (record.status, record.error) == ("failed", error)
    assert ("this value" in capfd.readouterr().out) == ("this value" in code)
    if "record" not in code:
        assert record == replace(UNFINISHED, status="failed", error=error)


@pytest.mark.parametrize("number", sampled([signal.SIGINT, signal.SIGTERM, signal.SIGHUP], by_default=[signal.SIGTERM]))
def test_a_signal_removes_everything(tmp_path, number):
    before, handler = machine_traces(), signal.getsignal(number)
    files = [tmp_path / f"rank_{rank}" for rank in range(2)]
    own = f"{tmp_path}/rank_$RANK"  # what is printed may be lost with the process that prints it
    command = ("sh", "-c", f"{{ {SAY_NAMESPACES}; }} > {own}.partial; mv {own}.partial {own}; sleep 600")

    def interrupt() -> None:
        while not all(file.exists() for file in files):
            pass
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(InterruptedRun) as caught:
        run_in_lab(command, "1gbit", TWO_HOSTS, UNFINISHED, tmp_path)
    thread.join(60)
    assert caught.value.signal == number
    assert all(are_empty(namespaces_in(file.read_text())) for file in files)
    assert machine_traces() == before
    assert signal.getsignal(number) == handler
    assert RunRecord.load(tmp_path) == replace(
        UNFINISHED, status="failed", error=f"interrupted by {signal.Signals(number).name}"
    )
