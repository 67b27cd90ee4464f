import dataclasses
import json
import math
import subprocess

import pytest

from lightning_commopt.measure.plain import write_json
from lightning_commopt.measure.runs.files import RUN_FILE
from lightning_commopt.measure.runs.record import RunRecord, fail_rank, fail_record, git_state
from lightning_commopt.measure.runs.settings import Settings

FULL = RunRecord(
    status="finished",
    sync_method="bf16",
    strategy="CommOptDDP",
    settings=Settings(
        values={"a": 1, "b": (1, None)},
        overrides=("a=1", "b=[1,null]"),
        plan={"comm_hook.name": "bf16"},
        plan_type="CommPlan",
    ),
    world_size=2,
    steps_per_s=1.5,
    metrics={"val_loss": 0.1},
    versions={"torch": "2"},
    hardware=({"kind": "cpu"},),
    git={"commit": "0", "has_changes": False},
)

PLAIN = dataclasses.asdict(FULL) | FULL.settings.to_record()


def test_a_record_comes_back_as_it_was(tmp_path):
    FULL.save(tmp_path)
    assert RunRecord.load(tmp_path) == FULL
    assert [file.name for file in tmp_path.iterdir()] == [RUN_FILE]


def test_a_field_of_a_later_version_is_left_out(tmp_path):
    (tmp_path / RUN_FILE).write_text(json.dumps({**PLAIN, "from_the_future": 1}))
    assert RunRecord.load(tmp_path) == FULL


def test_a_loss_that_is_not_a_number_stays_so(tmp_path):
    dataclasses.replace(FULL, metrics={"val_loss": math.nan}).save(tmp_path)
    assert math.isnan(RunRecord.load(tmp_path).val_loss or 0)


def test_what_cannot_be_written_leaves_the_old_file(tmp_path):
    write_json(tmp_path / "a.json", {"a": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"a": object()})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": 1}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("status", "done"),
        ("sync_method", None),
        ("overrides", "a=1"),
        ("overrides", [1]),
        ("plan", "bf16"),
        ("world_size", 2.0),
        ("world_size", True),
        ("metrics", {"loss": None}),
        ("metrics", {"val_loss": "low"}),
        ("hardware", ["cpu"]),
    ],
)
def test_what_no_run_has_written_is_refused(tmp_path, name, value):
    write_json(tmp_path / RUN_FILE, {**PLAIN, name: value})
    with pytest.raises(ValueError, match=f"{RUN_FILE} is damaged: {name} is .*, which is not "):
        RunRecord.load(tmp_path)


def test_the_words_that_a_field_may_have_are_named(tmp_path):
    write_json(tmp_path / RUN_FILE, {**PLAIN, "status": "finnished"})
    with pytest.raises(ValueError, match="status is 'finnished', which is not one of 'running', 'finished', 'failed'"):
        RunRecord.load(tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"sync_method": "none"}', "not a record of a run: it has no 'status'"),
        (b'{"status": "finished"}', "not a record of a run: it has no 'sync_method'"),
        (b"[1]", "not a record of a run: it holds a JSON list, not an object"),
        (b'{\n"status": "finished",\n', "not a record of a run, or was cut: Expecting .* in line 3"),
        (b"\xff\xfe", "not a record of a run, or was cut: it is binary"),
        (b"[" * 100_000, "not a record of a run, or was cut: it is nested too deeply"),
        (b'{"status": "finished", "sync_method": "none", "plan": {}, "settings": 3}', "damaged: "),
    ],
)
def test_what_is_no_record_says_why(tmp_path, content, reason):
    """If it fails, who has edited a file looks for the key that is missing, or gets a traceback."""
    (tmp_path / RUN_FILE).write_bytes(content)
    with pytest.raises(ValueError, match=f"{tmp_path / RUN_FILE} is {reason}"):
        RunRecord.load(tmp_path)


def test_a_whole_number_is_a_number(tmp_path):
    write_json(tmp_path / RUN_FILE, {**PLAIN, "metrics": {"val_loss": 1}})
    assert RunRecord.load(tmp_path).val_loss == 1


def test_the_first_reason_of_a_failure_is_kept_unless_a_later_one_is_final(tmp_path):
    """If it fails, a run has failed by a lost connection, or a rank's own error is hidden by one of its record."""
    fail_rank(tmp_path, ValueError("broken"), rank=1, seconds=2.0)  # there is no record
    assert not [*tmp_path.iterdir()]
    running = dataclasses.replace(FULL, status="running")
    assert fail_record(tmp_path, "lost", unfinished=running) == RunRecord.load(tmp_path)
    running.save(tmp_path)
    fail_rank(tmp_path, KeyboardInterrupt(), rank=0, seconds=2.0)
    fail_rank(tmp_path, ValueError("broken"), rank=1, seconds=3.0)
    failed = RunRecord.load(tmp_path)
    assert (failed.status, failed.error, failed.seconds) == ("failed", "KeyboardInterrupt", 2.0)
    assert fail_record(tmp_path, "killed", is_final=True) == dataclasses.replace(failed, error="killed")
    running.save(tmp_path)
    fail_rank(tmp_path, ValueError("broken"), rank=1, seconds=3.0)
    assert RunRecord.load(tmp_path).error == "rank 1: ValueError: broken"


def test_the_code_of_a_run_is_a_commit_and_whether_files_differ(tmp_path):
    """A tag must not take the place of the commit, nor a new file count as a change."""

    def git(*arguments):
        settings = "user.name=a", "user.email=a@b.c", "tag.gpgsign=false", "commit.gpgsign=false"
        options = [part for setting in settings for part in ("-c", setting)]
        done = subprocess.run(["git", "-C", tmp_path, *options, *arguments], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    assert git_state(tmp_path) is None
    git("init")
    (tmp_path / "code.py").write_text("a = 1")
    git("add", "code.py")
    assert git_state(tmp_path) is None, "without a commit"
    git("commit", "-m", "first")
    git("tag", "-a", "v1", "-m", "first")
    commit = git("rev-parse", "HEAD")
    (tmp_path / "run.json").write_text("{}")
    assert git_state(tmp_path) == {"commit": commit, "has_changes": False}
    (tmp_path / "code.py").write_text("a = 2")
    assert git_state(tmp_path) == {"commit": commit, "has_changes": True}
