import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from process_groups import is_group_gone, living_members
from tiny_runs import TINY

from lightning_commopt.measure.files import read_run
from lightning_commopt.run_record import RunRecord
from lightning_commopt.train import flags_first

LIMIT_S = 120
# Embeddings 256 x 16 and 64 x 16, one block, one norm: elements of the tiny model.
TINY_NUMEL = 256 * 16 + 64 * 16 + (2 * 32 + 16 * 48 + 48 + 16 * 16 + 16 + 16 * 64 + 64 + 64 * 16 + 16) + 32


def commopt_train(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lightning_commopt.train", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=LIMIT_S)


def test_a_run_of_two_ranks_is_recorded(tmp_path):
    # Overrides before a flag: Lightning appends more of them for the second rank.
    (tmp_path / "more" / "model").mkdir(parents=True)
    (tmp_path / "more" / "model" / "own.yaml").write_text("defaults: [gpt]\nwidth: 16\n")
    run = commopt_train(
        "model=own", *TINY, "strategy/comm_hook=bf16", "--config-dir", "more", "hydra.run.dir=run", cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr
    assert "bf16" in run.stdout
    assert "finished" not in run.stdout
    record = RunRecord.load(tmp_path / "run")
    assert (record.status, record.world_size, record.strategy) == ("finished", 2, "CommOptDDP")
    assert record.plan == {"comm_hook": {"name": "bf16", "accumulate": None}}
    assert record.num_timed_steps == 3
    assert record.wire_bytes_per_step == 2 * TINY_NUMEL
    assert record.steps_per_s is not None
    assert record.samples_per_s == pytest.approx(4 * record.steps_per_s)
    assert record.exposed_share is not None
    assert 0 < record.exposed_share < 1
    assert [len(records.steps) for records in read_run(tmp_path / "run")] == [4, 4]
    assert "exposed" in run.stdout
    assert record.val_loss is not None
    assert 0 < record.val_loss < 10
    assert set(record.versions) >= {"python", "torch", "lightning", "hydra", "lightning_commopt"}
    assert record.hardware[0]["num_cores"] >= 1
    assert "width: 16" in (tmp_path / "run" / "config.yaml").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["more", "run"]


@pytest.mark.parametrize(
    "overrides",
    [
        ("experiment=digits", "trainer.max_epochs=2", "trainer.limit_train_batches=3"),
        (
            "experiment=vit_l_32",
            "model.name=vit_b_32",
            "+model.options.image_size=32",
            "data.image_size=32",
            "data.batch_size=1",
            "trainer.max_steps=2",
            "callbacks.throughput.num_warmup_steps=1",
        ),
        (
            "experiment=sharding",
            "model=gpt",
            "model.width=16",
            "data.context=64",
            "trainer.max_steps=3",
            "trainer.limit_val_batches=1",
            "num_warmup_steps=1",
        ),
    ],
    ids=["digits", "vit", "sharding"],
)
def test_experiments_train_on_two_ranks(tmp_path, overrides):
    run = commopt_train(*overrides, "strategy/comm_hook=powersgd", "hydra.run.dir=run", cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    record = RunRecord.load(tmp_path / "run")
    assert (record.status, record.world_size) == ("finished", 2)
    assert record.val_loss is not None


@pytest.mark.parametrize("devices", ["1,2", "2,1"])
def test_a_sweep_over_devices_trains_with_as_many_ranks(tmp_path, devices):
    sweep = commopt_train("-m", *TINY, f"trainer.devices={devices}", "hydra.sweep.dir=sweep", cwd=tmp_path)
    assert sweep.returncode == 0, sweep.stdout + sweep.stderr
    expected = [int(number) for number in devices.split(",")]
    records = [RunRecord.load(tmp_path / "sweep" / str(number)) for number in range(2)]
    assert [record.world_size for record in records] == expected
    for number, (record, world_size) in enumerate(zip(records, expected, strict=True)):
        assert record.wire_bytes_per_step == (4 * TINY_NUMEL if world_size == 2 else 0)
        assert f"devices: {world_size}\n" in (tmp_path / "sweep" / str(number) / "config.yaml").read_text()
    summary = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert [job["run"]["world_size"] for job in summary] == expected
    assert [path.name for path in tmp_path.iterdir()] == ["sweep"]


def test_a_job_that_fails_does_not_stop_the_others(tmp_path):
    (tmp_path / "sources").mkdir()  # too few of them
    sweep = commopt_train(
        "-m", *TINY, "trainer.devices=1", "data.folder=sources,null", "hydra.sweep.dir=sweep", cwd=tmp_path
    )
    assert sweep.returncode == 1
    records = [RunRecord.load(tmp_path / "sweep" / str(number)) for number in range(2)]
    assert [record.status for record in records] == ["failed", "finished"]
    assert "sources has too few Python sources" in str(records[0].error)
    said = " ".join(sweep.stdout.split())
    assert "failed: FileNotFoundError: sources has too few" in said
    assert str(tmp_path / "sweep" / "0" / "job.log") in said
    assert "FileNotFoundError" in (tmp_path / "sweep" / "0" / "job.log").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_a_job_leaves_no_process(tmp_path, number):
    many = [argument.replace("max_steps=4", "max_steps=1000000") for argument in TINY]
    command = [sys.executable, "-u", "-m", "lightning_commopt.train", "-m", *many, "seed=1,2", "hydra.sweep.dir=sweep"]
    sweep = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        assert sweep.stdout is not None
        for line in sweep.stdout:
            if "All distributed processes registered" in line:
                break
        children = Path(f"/proc/{sweep.pid}/task/{sweep.pid}/children").read_text().split()
        job = next(int(child) for child in children if os.getpgid(int(child)) == int(child))
        assert len(living_members(job)) >= 2
        sweep.send_signal(number)
        rest = sweep.communicate(timeout=LIMIT_S)[0]
    finally:
        sweep.kill()
        sweep.wait()
    assert sweep.returncode == 128 + number, rest
    assert is_group_gone(job)
    assert is_group_gone(sweep.pid)
    record = RunRecord.load(tmp_path / "sweep" / "0")
    assert record.status == "failed"
    assert not (tmp_path / "sweep" / "1").exists()


@pytest.mark.parametrize("mode", [[], ["-m"]])
def test_a_wrong_value_is_a_short_error_before_anything_starts(tmp_path, mode):
    run = commopt_train(*mode, "strategy.bucket_cap_mb=-1", "hydra.run.dir=run", "hydra.sweep.dir=run", cwd=tmp_path)
    assert run.returncode == 1
    assert "bucket_cap_mb must be a number of MiB above 0" in run.stderr
    assert "Traceback" not in run.stderr
    assert len(run.stderr.splitlines()) < 8
    assert not list((tmp_path / "run").glob("**/run.json"))


def test_flags_come_first_in_their_order():
    arguments = ["a=1", "--config-dir", "x", "b=2", "-m", "--config-name=x", "x"]
    assert flags_first(arguments) == ["--config-dir", "x", "-m", "--config-name=x", "a=1", "b=2", "x"]
