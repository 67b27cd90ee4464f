"""What run.json says a run was set to."""

from pathlib import Path

import pytest

from lightning_commopt.measure.runs.settings import flat, settings_of, text_of


def test_settings_are_flat_and_chosen_ones_are_named():
    config = {"trainer": {"strategy": {"bucket_cap_mb": 25, "static_graph": None}}, "seed": 3}
    overrides = ["trainer.strategy.bucket_cap_mb=25", "+commopt@engine.fit=bf16", "optim@gen='a b'", "~callbacks.x"]
    choices = {"commopt@engine.fit": "bf16", "optim@gen": "a b", "model": "tiny", "hydra/launcher": "basic"}
    found = settings_of(Path("run"), config, overrides, choices)
    assert found["overrides"] == tuple(overrides)
    assert found["chosen"] == ("trainer.strategy.bucket_cap_mb", "commopt", "optim@gen", "callbacks.x")
    assert found["settings"] == {
        "commopt": "bf16",
        "optim@gen": "a b",
        "model": "tiny",
        **flat(config),
        "callbacks.x": None,
    }


def test_an_override_of_what_the_configuration_lacks_keeps_its_value():
    found = settings_of(Path("run"), {}, ["ranks=4", "a=[1,2]", "b=null", "c=1.5", "d='x y'", "e=true"])
    assert found["settings"] == {"ranks": 4, "a": "[1,2]", "b": None, "c": 1.5, "d": "x y", "e": True}


def test_places_of_a_run_are_not_what_it_was_set_to(tmp_path):
    """If it fails, every job of a sweep is another setting, and a shared page tells where its author keeps files."""
    found = settings_of(tmp_path / "3", {"dirs": [f"{tmp_path}/3/logs"], "other": str(tmp_path)}, [])
    assert found["settings"] == {"dirs": ["./logs"], "other": str(tmp_path)}


@pytest.mark.parametrize(
    ("value", "text"), [(25, "25"), (25.0, "25"), (0.5, "0.5"), (False, "false"), ((1, 2), "[1,2]")]
)
def test_values_read_as_on_a_command_line(value, text):
    assert text_of(value) == text
