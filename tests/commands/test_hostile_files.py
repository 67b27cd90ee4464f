"""Text in the files that commands read reaches no terminal as control characters, no spreadsheet as a formula."""

import csv
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import lightning_commopt
from lightning_commopt import CommOptDDP
from lightning_commopt.cost.basis import basis_of_run
from lightning_commopt.cost.candidates import forecasts
from lightning_commopt.cost.fsdp2.basis import sharded_forecasts
from lightning_commopt.plan import OptionError
from support import sharded_samples
from support.hostile import CONTROLS, HOSTILE, check, plant_everywhere
from support.sample_runs import SampleRun, write_run

pytestmark = pytest.mark.usefixtures("quick_costs")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    error = {"error": "RuntimeError: x", "status": "finished"}
    write_run(folder, SampleRun(num_buckets=2, overrides=("strategy/comm_hook=bf16", "+extra=1"), changed=error))
    return folder


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("comm_time/rank_0.jsonl", "summary"),
        ("run.json", "report"),
        ("comm_time/rank_0.jsonl", "trace"),
        ("prediction.json", "summary"),
        pytest.param("prediction.json", "predict", marks=pytest.mark.exhaustive),
        pytest.param("comm_time/rank_0.jsonl", "predict", marks=pytest.mark.exhaustive),
        pytest.param("run.json", "summary", marks=pytest.mark.exhaustive),
        pytest.param("comm_time/rank_0.jsonl", "report", marks=pytest.mark.exhaustive),
    ],
)
def test_files_of_a_run(name: str, command: str, run_dir: Path) -> None:
    """If it fails, a run that somebody sent writes to the reader's terminal what it wants."""
    arguments = [command, run_dir] + (["--num-warmup-steps=0"] if command == "summary" else [])
    quick = ["--json"] if command == "report" else []  # without the page
    if name == "prediction.json":
        basis = basis_of_run(run_dir)
        basis.save(run_dir, forecasts(basis))
    plant_everywhere(run_dir / name, lambda: check(*arguments, *quick))
    assert check(*arguments)[0] == 0


def test_a_prediction_of_fsdp2(tmp_path: Path) -> None:
    """If it fails, a run of FSDP2 that somebody sent writes to the reader's terminal, or ends in a traceback."""
    run = sharded_samples.basis()
    run.save(tmp_path, sharded_forecasts(run, [None]))
    path = tmp_path / "prediction.json"
    arguments = ("predict", tmp_path, "--comm-hook=int8")
    plant_everywhere(path, lambda: check(*arguments))
    assert check(*arguments)[0] == 0
    plain = json.loads(path.read_text())
    for name, value in (("forward", [2]), ("num_ranks", 0), ("backward", [["send", 0, 0.1]]), ("units", [])):
        path.write_text(json.dumps({**plain, "workload": {**plain["workload"], name: value}}))
        status, printed = check(*arguments)
        assert (status, "is damaged" in printed) == (2, True), name


def test_a_plan(tmp_path: Path) -> None:
    """If it fails, an error about a plan writes to the terminal what the plan wants."""
    for plan in ({"comm_hook": HOSTILE}, {HOSTILE: 1}, {"comm_hook": {"name": "int8", HOSTILE: 1}}, HOSTILE):
        (tmp_path / "plan.json").write_text(json.dumps(plan))
        with pytest.raises(OptionError) as raised:
            CommOptDDP(plan=str(tmp_path / "plan.json"))
        assert not CONTROLS.search(str(raised.value))


def with_text(value: Any, old: str, new: str) -> Any:
    """Returns a JSON value with another text in place of one."""
    if isinstance(value, dict):
        return {key: with_text(inner, old, new) for key, inner in value.items()}
    if isinstance(value, list):
        return [with_text(inner, old, new) for inner in value]
    return value.replace(old, new) if isinstance(value, str) else value


class Elements(HTMLParser):
    """Collects the elements of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += [name for name, _ in attrs]


def test_a_page_and_a_table(tmp_path: Path) -> None:
    """If it fails, a report runs what a run's files hold: scripts in a browser, formulas in a spreadsheet."""
    script = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    for number, start in enumerate(("=", "+", "-", "@", "\t=", "\r=")):
        folder, text = tmp_path / "sweep" / str(number), f"{start}cmd|' /C calc'!A0{script}"
        write_run(folder, SampleRun(overrides=("model.name=name",), sync_method=text))
        plain = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps(with_text(plain, "name", text) | {"metrics": {"val_loss": -2.0}}))
    check("report", tmp_path / "sweep")
    page = Elements()
    page.feed((tmp_path / "sweep" / "report.html").read_text())
    assert "img" not in page.names
    assert "onerror" not in page.attributes
    assert "alert(1)</script>" not in (tmp_path / "sweep" / "report.html").read_text()
    with (tmp_path / "sweep" / "report.csv").open(newline="") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    assert any("cmd|" in cell for cell in cells)
    for cell in cells:
        assert not CONTROLS.search(cell)
        assert not cell.lstrip().startswith(("=", "+", "-", "@")) or float(cell) < 0


def test_output_has_no_other_way() -> None:
    """If it fails, a command prints text from files without escapes."""
    package = Path(lightning_commopt.__file__).parent
    for path in package.rglob("*.py"):
        text, name = path.read_text(), path.relative_to(package).as_posix()
        assert name == "text/terminal.py" or not re.search(r"(?<!\w)Console\(", text), name
        others = len(re.findall(r"typer\.echo\(", text))
        assert others == {"commands/errors.py": 2}.get(name, 0), name
