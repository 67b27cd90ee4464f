"""commopt predict: a table or JSON from the records of a run, and clear errors."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_commopt.cost.basis import basis_of_run
from lightning_commopt.measure.files import StepWriter, rank_file
from lightning_commopt.measure.record import Collective, Phase, StepRecord
from support import sharded_samples
from support.commopt import commopt, refusal
from support.sample_runs import SampleRun, write_run

pytestmark = pytest.mark.usefixtures("quick_costs")
_INT8_DEFAULTS = {"block_size": 128, "error_feedback": False, "stochastic_rounding": False}


def plans(folder: Path, *options: str) -> list[dict[str, Any]]:
    return json.loads(commopt("predict", folder, "--json", *options).stdout)["plans"]


def test_a_table_of_plans(predicted: Path) -> None:
    """If it fails, the first thing that a user sees is an error."""
    output = commopt("predict", predicted, columns=160).output
    assert "with 2 ranks" in output
    assert "uncompressed (as it ran)" in output
    assert "int8" in output
    assert "Assumes: link: 12 times of 10 MB on the wire in the run." in output
    assert "Assumes: gradients are assumed to become ready evenly" in output


def test_a_run_that_put_nothing_on_the_wire_is_not_told_to_train_for_longer(tmp_path: Path) -> None:
    """If it fails, a user of ``hierarchical`` on one node repeats a run that can never be predicted from."""
    write_run(tmp_path / "run", SampleRun(num_buckets=4, wire_bytes=0))
    message = refusal("predict", tmp_path / "run")
    assert "its comm hook put nothing on the wire, as 'hierarchical' does within one node" in message
    assert "more steps" not in message


@pytest.mark.parametrize("name", ["run.json", "prediction.json"])
def test_a_run_imports_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, whoever sends a run decides what code its reader runs; a user can still name the compressor."""
    (tmp_path / "planted.py").write_text("from lightning_commopt.compressors import Int8\n\nclass Hook(Int8): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "run"
    write_run(folder, SampleRun(num_buckets=4))
    basis_of_run(folder).save(folder)
    plain = json.loads((folder / name).read_text())
    if name == "run.json":
        (folder / "prediction.json").unlink()
    plain["plan"] = {"comm_hook": {"name": "planted.Hook"}}
    (folder / name).write_text(json.dumps(plain))
    assert "'planted.Hook' is in a module that has not been imported" in refusal("predict", folder)
    assert "planted" not in sys.modules


@pytest.mark.parametrize(
    ("operation", "source"), [("reduce_scatter", ""), ("send", "int8 reduce-scatter"), ("all_reduce", "")]
)
def test_a_run_of_fsdp2_without_a_prediction_is_refused_with_the_reason(
    operation: str, source: str, tmp_path: Path
) -> None:
    """If it fails, who shards a model is told that a strategy is an unknown comm hook."""
    header = {"rank": 0, "world_size": 1, "origin_unix_s": 0.0, "comm_hook": "ModelParallelStrategy"}
    collective = Collective(operation, "backward", source, 4096, 0.5, 0.6)
    record = StepRecord(step=0, num_samples=1, phases=(Phase("backward", 0, 1),), buckets=(), collectives=(collective,))
    StepWriter(rank_file(tmp_path, 0), header).write([record])
    message = refusal("predict", tmp_path)
    assert ("FSDP2's reduce-scatters, so a prediction needs prediction.json" in message) == (operation != "all_reduce")
    assert ("is not from lightning_commopt" in message) == (operation == "all_reduce")


@pytest.fixture(scope="module")
def sharded_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    sharded_samples.basis().save(folder)
    return folder


def test_a_run_of_fsdp2(sharded_dir: Path) -> None:
    """If it fails, who shards a model is told of buckets, or not of what compressed parameters save."""
    output = commopt("predict", sharded_dir, columns=160).output
    assert "uncompressed (as it ran)" in output
    assert "int8, int8 parameters" in output
    assert "Assumes: link: a sample." in output
    (present, *others) = plans(sharded_dir)
    assert present["step_s"] == pytest.approx(sharded_samples.basis().workload.step_s)
    assert present["plan"] == {}
    names = {other["name"] for other in others}
    assert {"bf16", "int8 error feedback", "int4, int8 parameters", "uncompressed, int8 parameters"} <= names
    plan = next(other["plan"] for other in others if other["name"] == "int8, int8 parameters")
    assert plan == {"comm_hook": {"name": "int8", **_INT8_DEFAULTS}, "param_hook": "int8"}
    assert all(other["low_s"] < other["step_s"] < other["high_s"] for other in others)


def test_a_run_of_fsdp2_elsewhere(sharded_dir: Path) -> None:
    (present, *others) = plans(sharded_dir, "--comm-hook=int8", "--ranks=8", "--link=1gbit", "--accumulate=2")
    assert {other["name"] for other in others} == {
        "int8",
        "int8, int8 parameters",
        "uncompressed, accumulate unsharded",
    }
    assert present["step_s"] > 2 * sharded_samples.basis().workload.step_s - 0.4
    options = ("--ranks=8", "--link=1gbit", "--accumulate=2")
    output = commopt("predict", sharded_dir, *options, columns=160).output
    assert "with 8 ranks, a link of 1gbit, 2 batches per step" in " ".join(output.split())


@pytest.mark.parametrize(
    ("hook", "message"),
    [("powersgd", "powersgd"), ("int9", "int9"), ("hierarchical", "--comm-hook: 'hierarchical' is not predicted")],
)
def test_mistakes_in_compressors_of_shards(sharded_dir: Path, hook: str, message: str) -> None:
    assert message in commopt("predict", sharded_dir, f"--comm-hook={hook}", status=2).output


def test_the_runs_own_plan_is_what_was_measured(predicted: Path) -> None:
    """It computes for 0.06 s, is on the wire for 0.32 s, and backward hides a bucket's part of that."""
    (present, *others) = plans(predicted)
    assert present["step_s"] == pytest.approx(0.36, rel=0.05)
    assert {one["plan"].get("comm_hook", {}).get("name") for one in others} >= {None, "bf16", "int8"}
    assert all(other["low_s"] < other["step_s"] < other["high_s"] for other in others)


@pytest.mark.exhaustive
def test_other_worlds(predicted: Path) -> None:
    """If it fails, an option has no effect, or the wrong one."""
    (usual, *_) = plans(predicted, "--comm-hook=bf16")
    (ranks, *_) = plans(predicted, "--comm-hook=bf16", "--ranks=64")
    (link, *_) = plans(predicted, "--comm-hook=bf16", "--link=100gbit")
    (batches, *_) = plans(predicted, "--comm-hook=bf16", "--accumulate=4")
    assert ranks["exposed_s"] / usual["exposed_s"] > 1.8
    assert link["exposed_s"] < usual["exposed_s"] / 10
    assert batches["step_s"] == pytest.approx(usual["step_s"] + 3 * 0.06, rel=0.05)
    output = commopt("predict", predicted, "--comm-hook=bf16", "--ranks=64", "--link=25gbit", "--accumulate=4").output
    assert "with 64 ranks, a link of 25gbit, 4 batches per step" in " ".join(output.split())


def test_named_compressors_only(predicted: Path) -> None:
    hooks = [one["plan"].get("comm_hook", {}).get("name") for one in plans(predicted, "--comm-hook=fp16")]
    assert hooks == [None, "fp16"]
    assert plans(predicted, "--comm-hook=fp16", "--link=400gbit")[0]["reasons"][0] == "link: a rate of 400 Gbit/s"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--link=fast"], "--link must be a number with kbit, mbit or gbit"),
        (["--link=unlimited"], "from 100kbit to 1000gbit, got 'unlimited'"),
        (["--comm-hook=int9"], "int9"),
        (["--comm-hook=Hierarchical"], "--comm-hook: 'hierarchical' is not predicted"),
        (["--comm-hook=by_size"], "'by_size' needs the option 'inner', 'min_numel', and only a name can be given here"),
        (["--ranks=0"], "--ranks"),
        (["--accumulate=0"], "--accumulate"),
    ],
)
def test_mistakes_in_arguments(predicted: Path, options: list[str], message: str) -> None:
    assert message in commopt("predict", predicted, *options, status=2).output


def test_names_in_the_message_can_be_given(predicted: Path, sharded_dir: Path) -> None:
    """If it fails, who mistypes a compressor's name is told names that are refused next."""
    for folder in (predicted, sharded_dir):
        message = " ".join(commopt("predict", folder, "--comm-hook=nonsense", status=2).output.split())
        names = re.search(r"names that can be given here: ([a-z0-9_, ]+)", message)
        assert names is not None, message
        plans(folder, *(f"--comm-hook={name}" for name in names[1].split(", ")))


def test_runs_that_show_nothing(tmp_path: Path) -> None:
    write_run(tmp_path / "alone", SampleRun(world_size=1))
    write_run(tmp_path / "other", SampleRun(strategy="FSDPStrategy", sync_method="FSDPStrategy", plan=None))
    for name, message in (("alone", "no step has buckets"), ("nothing", "does not exist")):
        assert message in refusal("predict", tmp_path / name)
