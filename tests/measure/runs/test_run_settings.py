"""What run.json says a run was set to."""

import json
from pathlib import Path

import pytest
from hydra.core.hydra_config import HydraConfig

from lightning_commopt.measure.runs.record import RunRecord
from lightning_commopt.measure.runs.settings import Settings, flat, hydra_settings, settings_of, text_of
from support.composed import composed


def test_settings_are_flat_and_chosen_ones_are_named():
    config = {"trainer": {"strategy": {"bucket_cap_mb": 25, "static_graph": None}}, "seed": 3}
    overrides = ["trainer.strategy.bucket_cap_mb=25", "+commopt@engine.fit=bf16", "optim@gen='a b'", "~callbacks.x"]
    choices = {"commopt@engine.fit": "bf16", "optim@gen": "a b", "model": "tiny", "hydra/launcher": "basic"}
    found = settings_of(Path("run"), config, overrides, choices)
    assert found.overrides == tuple(overrides)
    assert found.chosen == {
        "trainer.strategy.bucket_cap_mb": 25,
        "commopt": "bf16",
        "optim@gen": "a b",
        "callbacks.x": None,
    }
    assert found.values == {
        "commopt": "bf16",
        "optim@gen": "a b",
        "model": "tiny",
        **flat(config),
        "callbacks.x": None,
    }


def test_an_override_of_what_the_configuration_lacks_keeps_its_value():
    overrides = ["ranks=4", "a=[1,b]", "b=null", "c=1.5", "d='x y'", "e=true", "f='4'"]
    found = settings_of(Path("run"), {}, overrides)
    assert found.values == {"ranks": 4, "a": (1, "b"), "b": None, "c": 1.5, "d": "x y", "e": True, "f": "4"}


def test_places_of_a_run_are_not_what_it_was_set_to(tmp_path):
    """If it fails, every job of a sweep is another setting, and a shared page tells where its author keeps files."""
    found = settings_of(tmp_path / "3", {"dirs": [f"{tmp_path}/3/logs"], "other": str(tmp_path)}, [])
    assert found.values == {"dirs": ("./logs",), "other": str(tmp_path)}


def test_what_the_plan_has_stands_once_and_is_found_by_every_name(tmp_path):
    """If it fails, one number stands in run.json twice, and the two can differ."""
    config = {"strategy": {"bucket_cap_mb": 25, "lossy": "never", "comm_hook": {"name": "powersgd", "matrix_rank": 1}}}
    settings = settings_of(Path("run"), config, ["strategy.bucket_cap_mb=25"])
    plan, defaults = {"bucket_cap_mb": 25, "comm_hook.name": "powersgd"}, {"comm_hook.matrix_rank": 1}
    settings = settings.with_plan(plan, defaults, "CommPlan")
    assert settings.values == {"strategy.lossy": "never"}
    RunRecord(status="finished", sync_method="powersgd", settings=settings).save(tmp_path)
    plain = json.loads((tmp_path / "run.json").read_text())
    assert plain["plan"] == {"bucket_cap_mb": 25, "comm_hook": {"name": "powersgd"}}
    found = RunRecord.load(tmp_path).settings
    assert found == settings
    assert found.chosen == {"strategy.bucket_cap_mb": 25}
    assert (found.get("trainer.strategy.comm_hook.matrix_rank"), found.get("strategy.lossy")) == (1, "never")
    assert "strategy.comm_hook.matrix_rank" in found
    assert "strategy.static_graph" not in found


def test_a_plan_that_differs_from_the_configuration_leaves_it_as_it_is():
    """A plan from a file, or one that was found, is not what the configuration says."""
    settings = Settings(values={"strategy.bucket_cap_mb": None, "strategy.static_graph": True})
    known = settings.with_plan({"bucket_cap_mb": 5, "static_graph": False}, {}, "CommPlan")
    assert known.values == settings.values


@pytest.mark.parametrize(
    ("value", "text"), [(25, "25"), (25.0, "25"), (0.5, "0.5"), (False, "false"), ((1, 2), "[1,2]")]
)
def test_values_read_as_on_a_command_line(value, text):
    assert text_of(value) == text


@pytest.mark.parametrize("last", ["seed: 3", "seed: 3\nname: ${only.in.the.application:}"], ids=["all", "some"])
def test_a_job_of_hydra_has_what_hydra_saved_of_it(last, tmp_path):
    """If it fails, a run of somebody's Hydra project is recorded without its settings, or ends with an error."""
    composed("seed=3", output_dir=tmp_path)
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text(f"again: ${{seed}}\n{last}\n")
    settings = hydra_settings(tmp_path)
    assert settings.overrides == ("seed=3",)
    assert settings.values["seed"] == 3
    assert settings.values["again"] == (3 if last == "seed: 3" else "${seed}")
    assert settings.values["data"] == HydraConfig.get().runtime.choices["data"]
    for cut in ("a: [", "a: ${", "[1]"):
        (tmp_path / ".hydra" / "config.yaml").write_text(cut)
        assert hydra_settings(tmp_path).values["seed"] == 3  # from the override
    (tmp_path / ".hydra" / "config.yaml").unlink()
    assert hydra_settings(tmp_path).values["seed"] == 3
