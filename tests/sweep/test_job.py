import json
import os
import sys

import pytest

from lightning_commopt.run_record import RunRecord
from lightning_commopt.sweep.job import SUMMARY_FILE, Job, SweepObserver, run_job, save_summary

# Written by hand, as the package takes seconds to import.
WRITE = "import json; from pathlib import Path; Path('{folder}/run.json').write_text(json.dumps(dict(plan_name='p', "
FINISHED = WRITE + "status='finished', val_loss=1.0)));"
RUNNING = WRITE + "status='running', world_size=2)));"
FAILED = WRITE + "status='failed', error='E: own')));"


def job(folder, code):
    command = (sys.executable, "-c", code.replace("{folder}", str(folder)))
    return Job(number=0, plan_name="p", overrides=("a=1",), command=command, folder=folder, config_yaml="", content="a")


def test_the_record_of_a_run_that_finished_is_its_own(tmp_path):
    result = run_job(job(tmp_path, FINISHED + "print('said')"), os.environ, SweepObserver())
    assert result.record == RunRecord(status="finished", plan_name="p", val_loss=1.0)
    assert result.job.log.read_text() == "said\n"


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("", "ended without a result"),
        ("raise SystemExit(3)", "exit status 3"),
        ("raise ValueError('this value')", "ValueError: this value; exit status 1"),
        (RUNNING + "import os; os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        (FAILED + "raise SystemExit(1)", "E: own"),
        (FINISHED + "raise SystemExit(1)", "exit status 1"),
    ],
)
def test_a_run_that_did_not_finish_is_recorded_with_the_reason(tmp_path, code, error):
    result = run_job(job(tmp_path, code), os.environ, SweepObserver())
    assert (result.record.status, result.record.error) == ("failed", error)
    assert RunRecord.load(tmp_path) == result.record


def test_the_record_of_an_earlier_run_in_the_folder_does_not_count(tmp_path):
    RunRecord(status="finished", plan_name="old").save(tmp_path)
    assert run_job(job(tmp_path, ""), os.environ, SweepObserver()).record.status == "failed"


def test_the_summary_has_all_jobs(tmp_path):
    result = run_job(job(tmp_path / "0", FINISHED), os.environ, SweepObserver())
    save_summary(tmp_path, [result, result])
    first, second = json.loads((tmp_path / SUMMARY_FILE).read_text())
    assert first == second
    assert (first["number"], first["overrides"], first["folder"]) == (0, ["a=1"], str(tmp_path / "0"))
    assert first["run"]["val_loss"] == 1.0
