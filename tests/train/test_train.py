import json
import os
import signal
import sys

import pytest

from lightning_commopt.measure.files import read_run
from lightning_commopt.measure.runs.record import RunRecord
from lightning_commopt.train.train import flags_first, main
from support.process_groups import is_group_gone
from support.ranks import run_ranks
from support.tiny_runs import TINY, commopt_train, interrupt_sweep

# Embeddings 256 x 16 and 64 x 16, one block, one norm: elements of the tiny model.
TINY_NUMEL = 256 * 16 + 64 * 16 + (2 * 32 + 16 * 48 + 48 + 16 * 16 + 16 + 16 * 64 + 64 + 64 * 16 + 16) + 32


def test_a_run_of_two_ranks_is_recorded(tmp_path):
    (tmp_path / "more" / "model").mkdir(parents=True)
    (tmp_path / "more" / "model" / "own.yaml").write_text("defaults: [gpt]\nwidth: 16\n")
    options = ("strategy/comm_hook=bf16", "--config-dir", str(tmp_path / "more"), f"hydra.run.dir={tmp_path}/run")
    # The group of callbacks has a progress bar, which the Trainer refuses if this option turns it off.
    assert run_ranks(train_as_rank, ["model=own", "trainer.enable_progress_bar=false", *TINY, *options]) == [0, 0]
    record = RunRecord.load(tmp_path / "run")
    assert (record.status, record.world_size, record.strategy) == ("finished", 2, "CommOptDDP")
    assert record.settings.plan == {"comm_hook.name": "bf16"}
    assert record.settings.chosen["strategy/comm_hook"] == "bf16"
    assert record.settings.get("model.width") == 16
    assert record.num_timed_steps == 3
    assert record.wire_bytes_per_step == 2 * TINY_NUMEL
    assert record.steps_per_s is not None
    assert record.samples_per_s == pytest.approx(4 * record.steps_per_s)
    assert record.exposed_share is not None
    assert 0 < record.exposed_share < 1
    assert [len(records.steps) for records in read_run(tmp_path / "run")] == [4, 4]
    assert record.val_loss is not None
    assert 0 < record.val_loss < 10
    assert set(record.versions) >= {"python", "torch", "lightning", "hydra", "lightning_commopt"}
    assert record.hardware[0]["num_cores"] >= 1
    assert "width: 16" in (tmp_path / "run" / "config.yaml").read_text()


def train_as_rank(overrides: list[str]) -> int | str | None:
    """Runs ``commopt-train`` in this rank; gives its exit status."""
    os.environ["HYDRA_FULL_ERROR"] = "1"
    sys.argv = ["commopt-train", *overrides, "hydra.output_subdir=null"]
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "overrides",
    [
        ("experiment=digits", "trainer.max_epochs=2", "trainer.limit_train_batches=3"),
        (
            *("experiment=vit_l_32", "model.name=squeezenet1_1", "+model.options.dropout=0.1"),
            *("data.image_size=32", "data.batch_size=1", "trainer.max_steps=2"),
            "callbacks.speed.num_warmup_steps=1",
        ),
        (
            *("experiment=sharding", "model=gpt", "model.width=16", "data.context=64"),
            *("trainer.max_steps=3", "trainer.limit_val_batches=1", "num_warmup_steps=1"),
        ),
    ],
    ids=["digits", "vision", "sharding"],
)
def test_experiments_train_on_two_ranks(tmp_path, overrides):
    of_both = ("strategy/comm_hook=powersgd", "trainer.accelerator=cpu", f"hydra.run.dir={tmp_path}")
    assert run_ranks(train_as_rank, [*overrides, *of_both]) == [0, 0]
    record = RunRecord.load(tmp_path)
    assert (record.status, record.world_size, record.sync_method) == ("finished", 2, "powersgd")
    assert record.val_loss is not None


@pytest.mark.exhaustive
def test_a_sweep_trains_with_as_many_ranks_as_each_job_says_and_goes_on_after_a_failure(tmp_path):
    (tmp_path / "sources").mkdir()  # too few of them
    (tmp_path / "more" / "job").mkdir(parents=True)
    jobs = {"two": "devices: 2", "broken": "devices: 1}\ndata: {folder: sources", "one": "devices: 1"}
    for name, values in jobs.items():
        (tmp_path / "more" / "job" / f"{name}.yaml").write_text(f"# @package _global_\ntrainer: {{{values}}}\n")
    sweep = commopt_train(
        "-m", *TINY, f"+job={','.join(jobs)}", "--config-dir", "more", "hydra.sweep.dir=sweep", cwd=tmp_path
    )
    assert sweep.returncode == 1, sweep.stdout + sweep.stderr
    folders = [tmp_path / "sweep" / str(number) for number in range(3)]
    records = [RunRecord.load(folder) for folder in folders]
    assert [record.status for record in records] == ["finished", "failed", "finished"], sweep.stdout
    for record, folder, world_size in ((records[0], folders[0], 2), (records[2], folders[2], 1)):
        assert record.world_size == world_size
        assert record.wire_bytes_per_step == (4 * TINY_NUMEL if world_size == 2 else 0)
        assert f"devices: {world_size}\n" in (folder / "config.yaml").read_text()
    assert "sources has too few Python sources" in str(records[1].error)
    output = " ".join(sweep.stdout.split())
    assert "failed: FileNotFoundError: sources has too few" in output
    assert str(folders[1] / "job.log") in output
    assert "FileNotFoundError" in (folders[1] / "job.log").read_text()
    summary = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert [job["run"]["world_size"] for job in summary if job["run"]["status"] == "finished"] == [2, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["more", "sources", "sweep"]


@pytest.mark.exhaustive
def test_a_signal_in_a_job_leaves_no_process(tmp_path):
    """SIGINT is tested where sweeps go on, in ``test_sweep_in_lab``."""
    many = [argument.replace("max_steps=4", "max_steps=1000000") for argument in TINY]
    sweep = ("-m", *many, "seed=1,2", "hydra.sweep.dir=sweep")
    registered = ["All distributed processes registered"]
    job, num_processes, end = interrupt_sweep(signal.SIGTERM, *sweep, cwd=tmp_path, after=registered)
    assert num_processes >= 2
    assert end.returncode == 128 + signal.SIGTERM, end.stdout
    assert is_group_gone(job)
    assert RunRecord.load(tmp_path / "sweep" / "0").status == "failed"
    assert not (tmp_path / "sweep" / "1").exists()


@pytest.mark.exhaustive
def test_a_wrong_value_is_a_short_error_before_anything_starts(tmp_path):
    wrong = ("strategy.bucket_cap_mb=-1", "hydra.sweep.dir=run")
    run = commopt_train("-m", *wrong, cwd=tmp_path)
    assert run.returncode == 1
    assert "bucket_cap_mb must be a number of MiB above 0" in run.stderr
    assert "Traceback" not in run.stderr
    assert len(run.stderr.splitlines()) < 8
    assert not list((tmp_path / "run").glob("**/run.json"))


def test_what_the_trainer_refuses_is_a_short_error(tmp_path):
    run = commopt_train("trainer.limit_train_batches=-2", cwd=tmp_path)
    assert run.returncode == 1
    last = run.stderr.splitlines()[-1]
    assert last.startswith("trainer: ")
    assert "limit_train_batches" in last
    assert "Traceback" not in run.stderr


def test_flags_come_first_in_their_order():
    arguments = ["a=1", "--config-dir", "x", "b=2", "-m", "--config-name=x", "x"]
    assert flags_first(arguments) == ["--config-dir", "x", "-m", "--config-name=x", "a=1", "b=2", "x"]
