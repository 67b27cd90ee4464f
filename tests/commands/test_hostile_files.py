"""Text in the files that commands read reaches no terminal as control characters, no spreadsheet as a formula."""

import csv
import json
import re
import time
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import lightning_commopt
from lightning_commopt import CommOptDDP
from lightning_commopt.commands.app import app
from lightning_commopt.cost import compressor_cost
from lightning_commopt.cost.basis import basis_of_run
from lightning_commopt.cost.candidates import forecasts
from lightning_commopt.measure.link.model import LinkModel
from lightning_commopt.plan import OptionError
from lightning_commopt.watch.hangs import marks as kinds
from lightning_commopt.watch.hangs.diagnosis import diagnose
from lightning_commopt.watch.hangs.marks import Mark
from lightning_commopt.watch.hangs.records import Records
from lightning_commopt.watch.hangs.snapshot import RankSnapshot
from support.nccl_sample_logs import SLOW
from support.sample_bench import result_of, sample
from support.sample_runs import SampleRun, write_run
from support.topology_samples import DOCUMENTED

HOSTILE = "\x1b]0;PWNED\x07\x1b[2J\x9b31m\u202e\u2066\r\x7f\ud800é中"
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_Place = tuple[str | int, ...]


@pytest.fixture(autouse=True)
def quick_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressor_cost, "LARGE_BYTES", 2**20)


def run(*arguments: object) -> tuple[int, str]:
    """Runs a command, which may refuse a file; returns its exit status, and what reaches a terminal."""
    result = CliRunner(env={"COLUMNS": "100"}).invoke(app, [*map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result.exit_code, result.output


def check(*arguments: object) -> tuple[int, str]:
    status, printed = run(*arguments)
    found = _CONTROLS.search(printed)
    assert found is None, printed[max(0, found.start() - 80) : found.end() + 80]
    return status, printed


def places(value: Any, above: _Place = ()) -> Iterator[_Place]:
    """Yields where a JSON value holds text, or an object whose keys could be any; once for all elements of a list."""
    if isinstance(value, str):
        yield above
    elif isinstance(value, dict):
        yield above
        for key, inner in value.items():
            yield from places(inner, (*above, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*above, 0))


def changed(value: Any, place: _Place) -> Any:
    """Returns a JSON value with hostile text at a place, or with a copy of an entry under a hostile key."""
    if not place:
        if isinstance(value, str):
            return HOSTILE + value
        return value | {HOSTILE + key: inner for key, inner in [*value.items()][:1]}
    return (
        [changed(inner, place[1:]) if index == place[0] else inner for index, inner in enumerate(value)]
        if isinstance(value, list)
        else {key: changed(inner, place[1:]) if key == place[0] else inner for key, inner in value.items()}
    )


def plant_everywhere(path: Path, show: Callable[[], tuple[int, str]]) -> None:
    """Writes hostile text into one place of a JSON file after another, and leaves it where the file is still read."""
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    for number in range(min(2, len(lines))):
        for place in places(json.loads(lines[number])):
            before = lines[number]
            lines[number] = json.dumps(changed(json.loads(before), place))
            path.write_text("\n".join(lines) + "\n")
            status, _ = show()
            if status:
                lines[number] = before
    path.write_text("\n".join(lines) + "\n")


def hung_run(folder: Path) -> None:
    now_s = time.monotonic()
    marks = [Mark(now_s, number, kinds.PHASE, code, 3) for number, code in enumerate((kinds.DATA, kinds.BACKWARD))]
    snapshots = [
        RankSnapshot(
            rank=0, host="a", phase=kinds.BACKWARD, called="all_reduce", place="a.py:1 in f", hook="Callback.f"
        ),
        RankSnapshot(rank=1, host="b", state="failed", detail="ValueError: x", place="b.py:2 in step", stop_reason="y"),
        RankSnapshot(rank=2, host="c", bucket=1, bucket_names=["a.b", "a.c"], all_ready=True, phase=kinds.BACKWARD),
    ]
    for snapshot in snapshots:
        Records(folder / "hangs", snapshot.rank).keep(snapshot, marks)
    Records(folder / "hangs", 0).report(diagnose(snapshots), snapshots, 30.0)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    error = {"error": "RuntimeError: x", "status": "finished"}
    write_run(folder, SampleRun(num_buckets=2, overrides=("strategy/comm_hook=bf16", "+extra=1"), changed=error))
    hung_run(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("comm_time/rank_0.jsonl", "summary"),
        ("run.json", "report"),
        ("comm_time/rank_0.jsonl", "trace"),
        ("hangs/report.json", "doctor"),
        ("hangs/rank_1.json", "doctor"),
        ("prediction.json", "predict"),
        ("prediction.json", "summary"),
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


@pytest.mark.exhaustive
def test_other_files(tmp_path: Path) -> None:
    """If it fails, logs, topologies and results of benches that somebody sent do that."""
    rows = [*sample(lambda size: 1e-3 + size / 1e9), *sample(lambda size: 1e-3 + size / 2e9, place="out")]
    result_of(rows).save(tmp_path / "bench.json")
    LinkModel.fit(result_of(rows)).save(tmp_path / "model.json")
    for name in ("bench.json", "model.json"):
        plant_everywhere(tmp_path / name, lambda name=name: check("bench", "--load", tmp_path / name))  # type: ignore[misc]
    log = tmp_path / "log.txt"
    lines = SLOW.text().splitlines()
    log.write_text("".join(f"{line}{HOSTILE}\n" for line in lines), errors="replace")
    check("nccl-log", log)
    matrix = tmp_path / "topology.txt"
    for text in (next(iter(DOCUMENTED.values())).tabbed(),):
        for sent in (text.replace("GPU0", f"GPU0{HOSTILE}"), HOSTILE + text, text.replace("\t", f"{HOSTILE}\t")):
            matrix.write_text(sent, errors="replace")
            check("topo", "--from", matrix)


def test_a_plan(tmp_path: Path) -> None:
    """If it fails, an error about a plan writes to the terminal what the plan wants."""
    for plan in ({"comm_hook": HOSTILE}, {HOSTILE: 1}, {"comm_hook": {"name": "int8", HOSTILE: 1}}, HOSTILE):
        (tmp_path / "plan.json").write_text(json.dumps(plan))
        with pytest.raises(OptionError) as raised:
            CommOptDDP(plan=str(tmp_path / "plan.json"))
        assert not _CONTROLS.search(str(raised.value))


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
        assert not _CONTROLS.search(cell)
        assert not cell.lstrip().startswith(("=", "+", "-", "@")) or float(cell) < 0


def test_output_has_no_other_way() -> None:
    """If it fails, a command prints text from files without escapes."""
    package = Path(lightning_commopt.__file__).parent
    for path in package.rglob("*.py"):
        text, name = path.read_text(), path.relative_to(package).as_posix()
        assert name == "text/terminal.py" or not re.search(r"(?<!\w)Console\(", text), name
        others = len(re.findall(r"typer\.echo\(", text))
        assert others == {"commands/errors.py": 2, "commands/machines.py": 1}.get(name, 0), name
