import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from lightning_commopt.measure.runs.files import CONFIG_FILE
from lightning_commopt.measure.runs.record import RunRecord
from lightning_commopt.train.sweep.composing import continue_command, find_changed_keys, find_finished_run, set_aside
from lightning_commopt.train.sweep.job import Job


def job(folder, config_yaml="a: 1\n"):
    return Job(
        number=0, sync_method="p", overrides=(), command=(), folder=folder, config_yaml=config_yaml, content=config_yaml
    )


def leave(folder, config_yaml="a: 1\n", status="finished"):
    folder.mkdir(parents=True, exist_ok=True)
    record = RunRecord(status=status, sync_method="p", metrics={"val_loss": 1.0})
    record.save(folder)
    (folder / CONFIG_FILE).write_text(config_yaml, errors="surrogateescape")
    return record


@pytest.mark.parametrize(
    ("before", "now", "changed"),
    [
        ("a: 1\n", "a: 1\n", []),
        ("b: 2\na: {c: [1, 2.0], d: {}}\n", "a:\n  c:\n  - 1\n  - 2.0\n  d: {}\nb: 2\n", []),
        ("a: {c: 1, d: 2}\n", "a: {c: 1, d: 3}\n", ["a.d"]),
        ("a: {c: 1, d: 2}\n", "a: {c: 1}\n", ["a.d"]),
        ("a: {c: 1}\n", "a: {c: 1, d: null}\n", ["a.d"]),
        ("a: 1\n", "a: '1'\n", ["a"]),
        ("a: {}\n", "a: {c: 1}\n", ["a.c"]),
        ("a: [1, 2]\n", "a: [2, 1]\n", ["a"]),
        *((cut, "a: 1\n", [CONFIG_FILE]) for cut in ("a: {", "a: ${", "a: ${oc.env:HO", "[1]", "\udcff")),
    ],
)
def test_what_changed_is_named_and_then_nothing_is_kept(tmp_path, before, now, changed):
    record = leave(tmp_path, before)
    assert find_changed_keys(job(tmp_path, now)) == changed
    assert find_finished_run(job(tmp_path, now)) == (None if changed else record)


@pytest.mark.parametrize("status", ["running", "failed"])
def test_a_run_that_did_not_finish_is_not_kept(tmp_path, status):
    leave(tmp_path, status=status)
    assert find_finished_run(job(tmp_path)) is None
    assert find_changed_keys(job(tmp_path)) == []


def test_a_record_without_a_configuration_is_not_kept(tmp_path):
    """If it fails, the record of a run that nobody can name counts as this one."""
    leave(tmp_path)
    (tmp_path / CONFIG_FILE).unlink()
    assert find_finished_run(job(tmp_path)) is None


def test_runs_are_set_aside_one_beside_another(tmp_path):
    assert set_aside(tmp_path / "0", tmp_path) is None
    for attempt in (1, 2):
        leave(tmp_path / "0", f"a: {attempt}\n")
        assert set_aside(tmp_path / "0", tmp_path) == tmp_path / "earlier" / f"0.{attempt}"
        assert not (tmp_path / "0").exists()
        assert (tmp_path / "earlier" / f"0.{attempt}" / CONFIG_FILE).read_text() == f"a: {attempt}\n"
    leave(tmp_path / "model=a" / "seed=1")
    assert set_aside(tmp_path / "model=a" / "seed=1", tmp_path) == tmp_path / "earlier" / "model=a" / "seed=1.1"


def test_a_folder_that_is_not_within_the_sweeps_stays(tmp_path):
    leave(tmp_path)
    assert set_aside(tmp_path, tmp_path) is None
    assert set_aside(tmp_path, tmp_path / "sweep") is None
    assert (tmp_path / CONFIG_FILE).exists()


@pytest.mark.parametrize("name", ["sweep", "my sweep", "it's", "a=b,c", "x/${y}", "2026-01-02/03-04-05"])
def test_the_line_that_continues_a_sweep_says_its_directory(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    arguments = ["-m", "--config-dir", "more", "a=[1, 2]", "hydra.sweep.dir=old", "b=c,d"]
    program, *rest, last = shlex.split(continue_command(arguments, tmp_path / name))
    assert (program, rest) == ("commopt-train", ["-m", "--config-dir", "more", "a=[1, 2]", "b=c,d"])
    override = OverridesParser.create().parse_override(last)
    assert override.key_or_group == "hydra.sweep.dir"
    assert str(override.value()).replace("\\$", "$") == name
    assert continue_command([], tmp_path.parent).endswith(str(tmp_path.parent))
