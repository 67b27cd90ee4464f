"""Choices of earlier fits that this user's cache keeps."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_commopt import CommPlan
from lightning_commopt.tune import auto_plan, training
from lightning_commopt.tune.auto_plan import FitPlan
from lightning_commopt.tune.options import TuneOptions
from lightning_commopt.tune.training import load_choice, save_choice

_BASE, _CHOSEN = CommPlan(), CommPlan(bucket_cap_mb=2.0)
_OPTIONS = TuneOptions(lossy=())
_FIT = {"format": 1, "host": "a"}


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "lightning_commopt" / "plans"


def test_a_choice_is_kept(folder: Path) -> None:
    """If it fails, every fit searches from the beginning."""
    assert load_choice(_FIT, _OPTIONS, _BASE) is None
    save_choice(_FIT, _CHOSEN)
    assert load_choice(_FIT, _OPTIONS, _BASE) == _CHOSEN
    assert load_choice({**_FIT, "host": "b"}, _OPTIONS, _BASE) is None
    (file,) = folder.iterdir()
    file.write_text("{")
    assert load_choice(_FIT, _OPTIONS, _BASE) is None


@pytest.mark.parametrize("place", ["file", "folder", "link"])
def test_what_others_may_have_planted_is_not_tried(place: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, whoever can write to the cache chooses how this user trains."""
    save_choice(_FIT, _CHOSEN)
    (file,) = folder.iterdir()
    if place == "link":
        file.symlink_to(file.rename(folder / "other"))
    else:
        (file if place == "file" else folder).chmod(0o777)
    warned: list[str] = []
    monkeypatch.setattr(training, "warn_once", warned.append)
    assert load_choice(_FIT, _OPTIONS, _BASE) is None
    assert str(folder) in warned[0]


@pytest.mark.parametrize(
    "text", ['{"comm_hook": "planted.Hook"}', '{"comm_hook": {"name": "planted.Hook"}}', "[]", "{", 3]
)
def test_a_checkpoint_imports_nothing(text: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a checkpoint that somebody sent decides what code runs, or a damaged one ends training."""
    (tmp_path / "planted.py").write_text("from lightning_commopt import Int8 as Hook\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    warned: list[str] = []
    monkeypatch.setattr(auto_plan, "warn", warned.append)
    plan = FitPlan(SimpleNamespace(), _OPTIONS)
    plan._base = _BASE
    plan.resume_choice({auto_plan._KEY: text})
    assert "planted" not in sys.modules
    assert warned[0].startswith("plan='auto': the plan in the checkpoint cannot be used: ")


def test_choices_do_not_grow_for_ever(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a home fills up with plans of models that nobody trains any more."""
    monkeypatch.setattr(training, "_MAX_CHOICES", 3)
    for number in range(5):
        save_choice({"number": number}, _CHOSEN)
        newest = max(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        os.utime(newest, (0, newest.stat().st_mtime - 1000 + number))
    kept = [number for number in range(5) if load_choice({"number": number}, _OPTIONS, _BASE) is not None]
    assert kept == [2, 3, 4]
    for path in folder.iterdir():
        os.utime(path, (0, 1e9))
    save_choice({"number": 5}, _CHOSEN)
    assert len([*folder.iterdir()]) == 1
