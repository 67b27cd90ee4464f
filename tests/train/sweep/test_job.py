import json
import os
import signal
import sys

import pytest
from rich.console import Console

from lightning_commopt.launch.process import InterruptedRun
from lightning_commopt.measure.runs.files import SUMMARY_FILE
from lightning_commopt.measure.runs.record import RunRecord
from lightning_commopt.train.sweep.display import SweepDisplay
from lightning_commopt.train.sweep.job import Job, run_job, save_summary

# Written by hand, as the package takes seconds to import.
WRITE = "import json; from pathlib import Path; Path('{folder}/run.json').write_text(json.dumps(dict(sync_method='p', "
FINISHED = WRITE + "status='finished', metrics=dict(val_loss=1.0))));"
RUNNING = WRITE + "status='running', world_size=2)));"
FAILED = WRITE + "status='failed', error='E: own')));"
BROKEN = WRITE + "status='finished', metrics=dict(val_loss='low'))));"
LOST = "RuntimeError: [pair.cc] Connection closed by peer"


def quiet_display():
    return SweepDisplay(Console(quiet=True))


def job(folder, code):
    command = (sys.executable, "-c", code.replace("{folder}", str(folder)))
    return Job(
        number=0, sync_method="p", overrides=("a=1",), command=command, folder=folder, config_yaml="", content="a"
    )


def test_the_record_of_a_run_that_finished_is_its_own(tmp_path):
    result = run_job(job(tmp_path, FINISHED + "print('said')"), os.environ, quiet_display())
    assert result.record == RunRecord(status="finished", sync_method="p", metrics={"val_loss": 1.0})
    assert result.job.log.read_text() == "said\n"


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("", "ended without a result"),
        ("raise SystemExit(3)", "exit status 3"),
        ("raise ValueError('this value')", "ValueError: this value; exit status 1"),
        (RUNNING + "import os; os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        (RUNNING + "import os; os.kill(os.getpid(), 40)", "killed by signal 40"),
        (FAILED + "raise SystemExit(1)", "E: own"),
        (FINISHED + "raise SystemExit(1)", "exit status 1"),
        (BROKEN, "ended without a result"),
        ("open('{folder}/run.json', 'w').write('{'); raise SystemExit(3)", "exit status 3"),
        # another rank explains a lost connection
        (
            f"print('ValueError: no such token\\n{LOST}')\n{FAILED.replace('E: own', LOST)}raise SystemExit(1)",
            f"{LOST}; another rank: ValueError: no such token",
        ),
        (
            f"{RUNNING}print('[rank1]: ValueError: no such token\\n{LOST}')\nimport os; os.kill(os.getpid(), 9)",
            f"{LOST}; killed by SIGKILL; rank 1: ValueError: no such token",
        ),
        (FAILED + "print('[rank1]: ValueError: no such token')\nraise SystemExit(1)", "E: own"),
    ],
)
def test_a_run_that_did_not_finish_is_recorded_with_the_reason(tmp_path, code, error):
    """If it fails, a sweep's table has no reason, or names a lost connection, and not what caused it."""
    result = run_job(job(tmp_path, code), os.environ, quiet_display())
    assert (result.record.status, result.record.error) == ("failed", error)
    assert RunRecord.load(tmp_path) == result.record


def test_an_interrupted_run_is_recorded_so(tmp_path):
    """If it fails, a job that was stopped looks as if it had a mistake: SystemExit."""

    class Interrupts(SweepDisplay):
        def on_output(self, text, is_final):
            if "ready" in text and is_final:
                os.kill(os.getpid(), signal.SIGINT)

    code = (
        "import time\nprint('ready', flush=True)\ntry:\n    time.sleep(600)\nexcept KeyboardInterrupt:\n    "
        + FAILED.replace("E: own", "SystemExit: 1")
        + "raise SystemExit(1)"
    )
    with pytest.raises(InterruptedRun):
        run_job(job(tmp_path, code), os.environ, Interrupts(Console(quiet=True)))
    record = RunRecord.load(tmp_path)
    assert (record.status, record.error) == ("failed", "interrupted by SIGINT")


def test_the_record_of_an_earlier_run_in_the_folder_does_not_count(tmp_path):
    RunRecord(status="finished", sync_method="old").save(tmp_path)
    assert run_job(job(tmp_path, ""), os.environ, quiet_display()).record.status == "failed"


def test_the_summary_has_all_jobs(tmp_path):
    result = run_job(job(tmp_path / "0", FINISHED), os.environ, quiet_display())
    save_summary(tmp_path, [result, result])
    first, second = json.loads((tmp_path / SUMMARY_FILE).read_text())
    assert first == second
    assert (first["number"], first["overrides"], first["folder"]) == (0, ["a=1"], str(tmp_path / "0"))
    assert first["run"]["metrics"]["val_loss"] == 1.0
