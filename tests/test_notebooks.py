"""The notebooks of ``examples/notebooks`` run from top to bottom, and say what they promise.

uv run pytest --all tests/test_notebooks.py --update-golden    # keeps what their cells print
"""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from lightning_commopt.launch.environment import RANK_VARIABLES

pytestmark = pytest.mark.timeout(1600)
REPOSITORY = Path(__file__).parents[1]
FOLDER = REPOSITORY / "examples" / "notebooks"
LIMIT_S = 1500  # only against waiting for ever
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def execute(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a notebook in a folder; a command behind ``!`` that fails fails the test too.

    Returns:
        The notebook with what its cells have printed, without colours, the folder, and what went to the log.
    """
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for variable in RANK_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    cells = notebook.cells
    notebook.cells = [part for cell in cells for part in (cell, *_checks(cell))]
    where = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=LIMIT_S, resources=where, record_timing=False).execute()
    notebook.cells = cells
    for cell in cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = _text_of(cell.outputs, folder), None
    return notebook


def _checks(cell: Any) -> list[Any]:
    is_command = cell.cell_type == "code" and re.search(r"^!", cell.source, re.M)
    return [nbformat.v4.new_code_cell("assert _exit_code == 0, _exit_code")] if is_command else []


def _text_of(outputs: Any, folder: Path) -> list[Any]:
    shown = [
        output.text if output.output_type == "stream" else output.data["text/plain"]
        for output in outputs
        if output.get("name") != "stderr" and not output.get("metadata", {}).get("isolated")
    ]
    whole = _COLOURS.sub("", "".join(shown)).replace(f"{folder}{os.sep}", "")
    lines = [line.rstrip() for line in whole.splitlines()]
    text = "\n".join(lines).strip("\n")
    return [nbformat.v4.new_output("stream", name="stdout", text=f"{text}\n")] if text else []


def printed(notebook: Any) -> list[str]:
    """Returns what each code cell has printed."""
    return ["".join(output.text for output in cell.outputs) for cell in notebook.cells if cell.cell_type == "code"]


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that runs a notebook and returns what its cells have printed."""

    def run(name: str) -> list[str]:
        is_kept = request.config.getoption("--update-golden")
        # A reader's kernel sets no width, so commands print 80 columns; what the site shows has more room.
        monkeypatch.setenv("COLUMNS", "110") if is_kept else monkeypatch.delenv("COLUMNS", raising=False)
        notebook = execute(name, tmp_path, monkeypatch)
        if is_kept:
            nbformat.write(notebook, FOLDER / f"{name}.ipynb")
        return printed(notebook)

    return run


def test_all_are_run() -> None:
    """If it fails, a notebook is run by no test."""
    text = Path(__file__).read_text(encoding="utf-8")
    names = [path.stem for path in FOLDER.glob("*.ipynb")]
    assert len(names) == 5
    assert all(f'run("{name}")' in text for name in names)


@pytest.mark.exhaustive
def test_measure_and_decide(run: Any) -> None:
    _, table, metrics, here, elsewhere = run("1_measure_and_decide")
    assert "of step" in table
    assert "comm_time/exposed_share" in metrics
    assert "(as it ran)" in here
    assert "8 ranks, a link of 100mbit" in elsewhere


@pytest.mark.exhaustive
def test_compress_and_check_the_loss(run: Any) -> None:
    *_, losses, differences = run("2_compress_and_check_the_loss")
    rows = {name: [float(value) for value in values] for name, *values in map(_numbers, losses.splitlines())}
    assert rows["none"][0] > 3 * rows["int8"][0] > 3 * rows["powersgd"][0]
    assert all(0 < loss < 1 for _, *of_seeds in rows.values() for loss in of_seeds)
    assert "int8: " in differences


def _numbers(line: str) -> list[str]:
    return line.replace("MB", "").split()


@pytest.mark.exhaustive
def test_sweep_and_report(run: Any, tmp_path: Path) -> None:
    table, _ = run("3_sweep_and_report")
    assert "int8" in table
    assert (tmp_path / "sweep" / "report.html").is_file()
    assert len(list((tmp_path / "sweep").glob("*/run.json"))) == 4


@pytest.mark.exhaustive
def test_fsdp2(run: Any) -> None:
    _, plain, compressed, travels, travels_compressed = run("4_fsdp2")
    assert plain.startswith("none: validation loss")
    assert compressed.startswith("int8: validation loss")
    assert "int8 reduce-scatter" in travels_compressed
    assert "int8" not in travels


@pytest.mark.exhaustive
def test_gpu_results(run: Any, tmp_path: Path) -> None:
    """If it fails, whoever lends us a GPU for a quarter of an hour has nothing to send back."""
    (tmp_path / "lightning-commopt").symlink_to(REPOSITORY)
    *_, end = run("5_gpu_results")
    assert end.startswith("commopt_results.json: selftest, gpu_dry_run_")
    selftest, gpu = json.loads((tmp_path / "commopt_results.json").read_text()).values()
    assert {outcome["status"] for outcome in selftest["outcomes"]} == {"passed", "not checked"}
    assert "measured" in {row["verdict"] for row in gpu["parts"]["ladder"]["rows"]}
