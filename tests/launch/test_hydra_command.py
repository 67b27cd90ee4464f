"""The command lines with which jobs, and further ranks of them, start."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from lightning_commopt.launch.hydra_command import _worker_of, quote

PLAIN = ["plain", "with space", "a=b,c", 'a "b"', "it's", "ends in \\", 'x\\"y', "a\\b", "12_0", "0", "", "é", "$x", 3]


@pytest.mark.parametrize("value", [*PLAIN, "${other}", "a\\${other}", "a\\\\${other}", "\\a\\${b}\\", "x${y"])
def test_values_survive_hydras_grammar(value: object) -> None:
    """If it fails, a job whose directory or name has such characters cannot start its further ranks."""
    assert _read(f"key={quote(value)}") == value


def test_an_interpolation_is_followed_where_it_is_none_of_the_text() -> None:
    assert _read(f"key={quote('rank_${other}', is_literal=False)}") == "rank_7"


def _read(override: str) -> object:
    """Returns what a configuration says with an override."""
    parsed = OverridesParser.create().parse_override(override)
    assert not parsed.is_sweep_override()
    return OmegaConf.create({"key": parsed.value(), "other": 7}).key


@pytest.mark.parametrize(
    ("module", "script", "package"),
    [
        (None, "train.py", None),
        ("train", "train.py", None),
        ("joblib.externals.loky.backend.popen_loky_posix", "loky.py", "joblib"),
        ("submitit.core._submit", "_submit.py", "submitit"),
        (None, "/x/ray/default_worker.py", "ray"),
    ],
)
def test_a_worker_of_a_launcher_is_not_taken_for_the_program(
    module: str | None, script: str, package: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it fails, further ranks run the worker, and end with an error about its arguments."""
    main = ModuleType("__main__")
    main.__spec__ = None if module is None else ModuleSpec(module, None)
    monkeypatch.setattr(sys, "argv", [script])
    assert _worker_of(main) == package
