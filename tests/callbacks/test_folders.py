"""Where callbacks write if a Trainer's folder is a URL, and what "~" means."""

import os
import warnings
from pathlib import Path

import pytest

from lightning_commopt.callbacks import CommTimeMonitor, RunRecorder
from lightning_commopt.callbacks.folders import check_dirpath, local_folder
from lightning_commopt.measure.runs.record import RunRecord
from support.strategy_models import Tiny, loader, trainer


def test_a_trainer_whose_folder_is_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a training that writes to s3://bucket leaves a folder "s3:", where nobody looks for files."""
    monkeypatch.chdir(tmp_path)
    callbacks = [CommTimeMonitor(print_summary=False), RunRecorder()]
    run = trainer("auto", devices=1, callbacks=callbacks, default_root_dir="memory://runs/first", max_epochs=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(Tiny(), loader())
    told = [str(warning.message) for warning in caught if "local files" in str(warning.message)]
    assert [message.partition(" ")[0] for message in told] == ["RunRecorder", "CommTimeMonitor"]
    assert all(f"they are written to {tmp_path} and not to memory://runs/first. Set" in message for message in told)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["comm_time", "loss.jsonl", "run.json"]


class Moving(Tiny):
    def on_train_start(self) -> None:
        os.chdir("elsewhere")


def test_a_program_that_changes_its_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a run is recorded as running for ever in one place, and as finished in another."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    callbacks = [CommTimeMonitor(print_summary=False), RunRecorder()]
    run = trainer("auto", devices=1, callbacks=callbacks, default_root_dir="run", max_epochs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's and torch's own
        run.fit(Moving(), loader(), loader())
    assert RunRecord.load(tmp_path / "run").status == "finished"
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["comm_time", "loss.jsonl", "run.json"]
    assert not list((tmp_path / "elsewhere").iterdir())


def test_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, dirpath: ~/runs in a YAML file makes a folder "~" in the working directory."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert check_dirpath("~/runs") == tmp_path / "runs"
    assert check_dirpath(None) is None
    assert local_folder("file:///runs", RunRecorder()) == Path("/runs")
