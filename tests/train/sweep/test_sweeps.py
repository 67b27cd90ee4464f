"""What a sweep runs, in which order, and what of an earlier one it keeps; the jobs are fakes."""

import json
import math

import pytest
from fake_sweeps import JOB, fake_sweep

from lightning_commopt.measure.runs.files import SUMMARY_FILE
from lightning_commopt.measure.runs.record import RunRecord
from lightning_commopt.train.sweep.config import ConfigError
from support.cross_section import sampled


def numbers_in(folder):
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


@pytest.mark.exhaustive
def test_repetitions_run_in_rounds_with_folders_of_their_own(tmp_path):
    """If it fails, a machine that slows down makes the last setting look slow."""
    losses, notes = fake_sweep(tmp_path, "seed=1,2", "repeat=3")
    assert [job.overrides for job in notes.started_jobs] == [
        (f"seed={seed}", f"repetition={repetition}") for repetition in range(3) for seed in (1, 2)
    ]
    assert notes.numbers == numbers_in(tmp_path) == list(range(6))
    assert [RunRecord.load(tmp_path / str(number)).val_loss for number in range(6)] == [1, 2, 101, 102, 201, 202]
    assert losses == [101, 102], "means over the repetitions"


@pytest.mark.exhaustive
def test_numbers_stay_unique_when_the_sweeper_asks_in_batches(tmp_path):
    losses, notes = fake_sweep(tmp_path, "seed=1,2,3", "repeat=2", "hydra.sweeper.max_batch_size=2")
    of_jobs = [(job.number, RunRecord.load(job.folder).val_loss) for job in notes.started_jobs]
    assert of_jobs == [(0, 1), (1, 2), (2, 101), (3, 102), (4, 3), (5, 103)]
    assert losses == [51, 52, 53]
    assert notes.num_jobs == [4, 6]


@pytest.mark.exhaustive
def test_a_repetition_that_fails_leaves_no_value_for_its_job(tmp_path):
    losses, notes = fake_sweep(tmp_path, "seed=1,13", "repeat=2")
    assert losses[0] == 51
    assert math.isnan(losses[1])
    assert [result.record.status for result in notes.results] == ["finished", "failed"] * 2


@pytest.mark.exhaustive
def test_repeat_may_come_from_a_file(tmp_path):
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "often.yaml").write_text("# @package _global_\nrepeat: 2\n")
    search = f"hydra.searchpath=[file://{tmp_path / 'conf'}]"
    losses, notes = fake_sweep(tmp_path / "sweep", "experiment=often", "seed=3", search)
    assert losses == [53]
    assert notes.numbers == [0, 1]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["repeat=0"], "repeat must be an integer of at least 1, got 0"),
        pytest.param(["repeat=1,2"], r"repeat is for the whole .* got \[1, 2\]", marks=pytest.mark.exhaustive),
        pytest.param(
            ["repeat=2", "repetition=4"], "repeat=2 sets repetition: .* got repetition=4", marks=pytest.mark.exhaustive
        ),
        pytest.param(["repetition=-1"], "repetition must be .* got -1", marks=pytest.mark.exhaustive),
        (["strategy.bucket_cap_mb=25,-1"], "bucket_cap_mb must be"),
        pytest.param(["link=null,fast"], r"link: rate must be .* got 'fast'", marks=pytest.mark.exhaustive),
    ],
)
def test_what_cannot_be_run_in_any_job_starts_none(tmp_path, overrides, message):
    with pytest.raises(ConfigError, match=message):
        fake_sweep(tmp_path, *overrides)
    assert numbers_in(tmp_path) == []


@pytest.fixture
def alone(tmp_path):
    """The override that finds ``experiment=alone``, one process whatever ``ranks`` says, and ``together``."""
    folder = tmp_path / "conf" / "experiment"
    folder.mkdir(parents=True)
    (folder / "alone.yaml").write_text(
        "# @package _global_\ndefaults: [{override /strategy: single}]\ntrainer: {devices: 1}\n"
    )
    (folder / "together.yaml").write_text("# @package _global_\ntrainer: {max_steps: 50}\n")
    return f"hydra.searchpath=[file://{tmp_path / 'conf'}]"


@pytest.mark.exhaustive
def test_jobs_that_train_the_same_run_once(tmp_path, alone):
    """If it fails, the run on one process is repeated for every number of ranks that the others have."""
    losses, notes = fake_sweep(tmp_path / "s", "experiment=alone,together", "ranks=2,4", "seed=6", "repeat=2", alone)
    # 0 and 1 are alone, on 2 and 4 ranks; 4 more are the next round.
    assert notes.numbers == numbers_in(tmp_path / "s") == [0, 2, 3, 4, 6, 7]
    assert losses == [56] * 4
    assert notes.num_jobs == [6]
    assert "skipped, as they train the same as another job: 1 as 0, 5 as 4" in notes.notes
    summary = {job["number"]: job["stands_for"] for job in json.loads((tmp_path / "s" / SUMMARY_FILE).read_text())}
    assert [job["number"] for job in summary[0]] == [1]
    assert {"ranks=4", "seed=6"} <= set(summary[0][0]["overrides"])
    assert summary[2] == []


@pytest.mark.exhaustive
def test_jobs_that_train_the_same_run_once_over_batches(tmp_path, alone):
    batches = ["experiment=alone", "ranks=2,4", "hydra.sweeper.max_batch_size=1"]
    losses, notes = fake_sweep(tmp_path / "s", *batches, "seed=6", alone)
    assert notes.numbers == [0]
    assert losses == [6, 6]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "overrides",
    [["seed=1,2"], ["link=1gbit", "hosts=1,2"], ["ranks=1,2"]],
)
@pytest.mark.usefixtures("lab_machine")
def test_jobs_that_differ_in_anything_else_all_run(tmp_path, overrides):
    assert fake_sweep(tmp_path, "trainer.accelerator=cpu", *overrides)[1].numbers == [0, 1]


@pytest.mark.usefixtures("lab_machine")
@pytest.mark.exhaustive
def test_hosts_that_are_the_default_are_the_same(tmp_path):
    assert fake_sweep(tmp_path, "trainer.accelerator=cpu", "link=1gbit", "hosts=null,2")[1].numbers == [0]


def test_a_sweep_goes_on_where_it_was_stopped(tmp_path):
    """If it fails, an interrupted night is lost."""
    asked = ("seed=1,2", "repeat=2")
    first, notes = fake_sweep(tmp_path, *asked)
    assert notes.numbers == list(range(4))
    RunRecord(status="running", sync_method="fake").save(tmp_path / "0")
    RunRecord(status="failed", sync_method="fake").save(tmp_path / "2")
    (tmp_path / "3" / "run.json").write_text("{")
    (tmp_path / "2" / "of_the_failed_run").touch()
    again, notes = fake_sweep(tmp_path, *asked)
    assert notes.numbers == [0, 2, 3]
    assert notes.notes == []
    assert again == first == [51, 52]
    assert [(result.job.number, result.is_kept) for result in notes.results] == [
        (1, True), (0, False), (2, False), (3, False)
    ]  # fmt: skip
    assert [job["number"] for job in json.loads((tmp_path / SUMMARY_FILE).read_text())] == list(range(4))
    assert not (tmp_path / "2" / "of_the_failed_run").exists()
    assert (tmp_path / "earlier" / "2.1" / "of_the_failed_run").exists()


@pytest.mark.exhaustive
def test_more_repetitions_go_on_too(tmp_path):
    fake_sweep(tmp_path, "seed=1,2", "repeat=2")
    losses, notes = fake_sweep(tmp_path, "seed=1,2", "repeat=3")
    assert notes.numbers == [4, 5]
    assert losses == [101, 102]


@pytest.mark.exhaustive
def test_a_job_with_other_settings_is_run_again_and_said(tmp_path):
    """If it fails, a table mixes runs of two configurations."""
    fake_sweep(tmp_path, "seed=1,2", "trainer.max_steps=20")
    losses, notes = fake_sweep(tmp_path, "seed=1,4", "trainer.max_steps=30")
    assert notes.numbers == [0, 1]
    assert losses == [1, 4]
    moved = [f"; the earlier run is in {tmp_path}/earlier/{number}.1" for number in notes.numbers]
    assert [note.removesuffix(where) for note, where in zip(notes.notes, moved, strict=True)] == [
        "job 0 runs again, as its settings changed: trainer.max_steps",
        "job 1 runs again, as its settings changed: trainer.max_steps, seed",
    ]
    assert RunRecord.load(tmp_path / "earlier" / "1.1").val_loss == 2


@pytest.mark.parametrize(
    "variables",
    sampled(
        [{"LOCAL_RANK": "0"}, {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, {"SLURM_PROCID": "1"}],
        by_default=[{"LOCAL_RANK": "0"}],
    ),
)
def test_a_sweep_within_a_job_of_several_ranks_is_refused(tmp_path, monkeypatch, variables):
    """If it fails, several sweeps at once write into the same directories."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"without torchrun, .* without srun, or with srun --ntasks=1"):
        fake_sweep(tmp_path, "seed=1,2")
    assert numbers_in(tmp_path) == []


@pytest.mark.exhaustive
def test_jobs_do_not_know_of_the_allocation_that_they_run_in(tmp_path, monkeypatch):
    """If it fails, Lightning waits in every job for as many ranks as the allocation has tasks."""
    allocation = {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "7"}
    for name, value in allocation.items():
        monkeypatch.setenv(name, value)
    save = "import os; (Path(values['hydra.run.dir'].strip('\"')) / 'env').write_text(json.dumps(dict(os.environ)))"
    monkeypatch.setattr("fake_sweeps.JOB", JOB + save)
    assert fake_sweep(tmp_path, "strategy=single,commopt", "ranks=1", "seed=2")[0] == [2, 2]
    found = json.loads((tmp_path / "0" / "env").read_text())
    assert [name for name in found if name.startswith("SLURM_")] == ["SLURM_JOB_ID"]


@pytest.mark.exhaustive
def test_repetitions_have_folders_of_their_own_under_any_name(tmp_path):
    """If it fails, each repetition sets the one before it aside."""
    named = "hydra.sweep.subdir=${hydra.job.override_dirname}"
    losses, notes = fake_sweep(tmp_path, "seed=1,2", "repeat=2", named)
    names = [job.folder.name for job in notes.started_jobs]
    assert names == [f"repetition={repetition},seed={seed}" for repetition in range(2) for seed in (1, 2)]
    assert losses == [51, 52]
    assert fake_sweep(tmp_path, "seed=1,2", "repeat=2", named)[1].numbers == []


@pytest.mark.parametrize(
    "overrides",
    sampled([["seed=1,2"], ["repeat=2"], ["seed=1,2", "hydra.sweeper.max_batch_size=1"]], by_default=[["repeat=2"]]),
)
def test_jobs_that_would_share_a_folder_are_refused(tmp_path, overrides):
    """If it fails, each job sets the one before it aside."""
    with pytest.raises(ConfigError, match=r"jobs 0 and 1 have the same directory .*/one: use \$\{hydra.job.num\}"):
        fake_sweep(tmp_path, *overrides, "hydra.sweep.subdir=one")
    assert (tmp_path / "one").exists() == ("max_batch_size" in overrides[-1])


@pytest.mark.exhaustive
def test_jobs_that_train_the_same_may_share_a_folder(tmp_path):
    assert fake_sweep(tmp_path, "ranks=2,2", "hydra.sweep.subdir=one")[1].numbers == [0]
