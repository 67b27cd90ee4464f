"""The command lines with which jobs, and further ranks of them, start."""

import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from lightning_commopt.launch.hydra_command import quote

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


_JOB = """
import hydra

from lightning_commopt.launch.hydra_command import single_run_command


@hydra.main(version_base=None)
def main(config):
    print(single_run_command(1)[0][1:3])


main()
"""


@pytest.mark.parametrize(
    ("folder", "file", "error"),
    [
        ("", "train.py", None),
        ("joblib", "__main__.py", "a worker of joblib"),
        ("ray", "default_worker.py", "a worker of ray"),
    ],
)
def test_a_worker_of_a_launcher_is_not_taken_for_the_program(
    folder: str, file: str, error: str | None, tmp_path: Path
) -> None:
    """If it fails, further ranks run the worker, and end with an error about its arguments."""
    path = tmp_path / folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_JOB)
    (path.parent / "__init__.py").touch()
    program = ["-m", folder] if file == "__main__.py" else [str(path)]
    ran = subprocess.run([sys.executable, *program], cwd=tmp_path, capture_output=True, text=True, check=False)
    if error is None:
        assert ran.stdout.startswith(f"['{path}', "), ran.stderr
    else:
        assert f"no further ranks can be started in {error}" in ran.stderr
