"""What a command cannot read: status 2 and one line that names it, whatever the command and whatever is wrong."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.commopt import commopt, refusal
from support.cross_section import sampled
from support.sample_runs import SampleRun, write_run
from support.unreadable import check_refusals, damage_line_6

_COMMANDS: dict[str, Callable[[Path], tuple[object, ...]]] = {
    "trace": lambda path: ("trace", path),
    "summary": lambda path: ("summary", path),
    "report": lambda path: ("report", path),
    "predict": lambda path: ("predict", path),
}


@pytest.mark.parametrize("command", _COMMANDS)
def test_what_cannot_be_read_is_status_2_and_a_line(command: str, tmp_path: Path) -> None:
    """If it fails, a script that looks at the status takes a mistake for a finding, or a user sees a traceback."""
    check_refusals(_COMMANDS[command], tmp_path)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Returns where numbers are in JSON; of a list the first and the last element only."""
    if isinstance(value, dict):
        return [place for key, item in value.items() for place in _places(item, (*path, key))]
    if isinstance(value, list):
        ends = {0, len(value) - 1} if value and isinstance(value[0], (list, dict)) else range(len(value))
        return [place for index in sorted(ends) for place in _places(value[index], (*path, index))]
    return [path] if isinstance(value, (int, float)) and not isinstance(value, bool) else []


@pytest.mark.parametrize("wrong", sampled([math.nan, math.inf, "3", [3], -1.0], by_default=["3"]), ids=str)
def test_a_number_that_is_none_in_a_prediction_is_named(predicted: Path, wrong: Any) -> None:
    """If it fails, a table of predictions is made of what a damaged file says."""
    path = predicted / "prediction.json"
    whole = path.read_bytes()
    try:
        for place in _places(json.loads(whole)):
            if place[0] not in ("workload", "link", "costs", "step_s") or (wrong == -1.0 and not _is_amount(place)):
                continue
            plain = json.loads(whole)
            inner = plain
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = wrong
            path.write_text(json.dumps(plain))
            line = refusal("predict", predicted)
            assert f"{path} is damaged: " in line, place
            assert str(wrong) in line, place
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize(
    "forecasts",
    [[["bf16", True, 0.01, math.nan, 0.1, 0.3, 0.2]], [["bf16", True, 0.01, -0.2, -0.3, 0.3, 0.2]], [["bf16"]], 3],
)
def test_a_forecast_that_is_none_is_named(predicted: Path, forecasts: Any) -> None:
    """If it fails, a summary recommends what a damaged file says."""
    path = predicted / "prediction.json"
    whole = path.read_bytes()
    path.write_text(json.dumps({**json.loads(whole), "forecasts": forecasts}))
    try:
        assert f"{path} is damaged: " in refusal("summary", predicted, "--num-warmup-steps=0")
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize("plan", ["int8", 3, [1], {"a": 1}, {"bucket_cap_mb": [None]}], ids=str)
def test_a_plan_that_is_none_in_records_is_refused(plan: Any, tmp_path: Path) -> None:
    """If it fails, who reads a damaged run without a prediction sees a traceback."""
    write_run(tmp_path, SampleRun(num_buckets=4))
    path = tmp_path / "comm_time" / "rank_0.jsonl"
    path.write_text(path.read_text() + json.dumps({"type": "change", "plan": plan}) + "\n")
    assert refusal("predict", tmp_path).startswith("commopt: ")


@pytest.mark.parametrize(
    "arguments",
    [
        ("summary", "--num-warmup-steps=0"),
        ("trace",),
        ("predict",),
    ],
    ids=lambda arguments: arguments[0],
)
def test_lines_that_are_left_out_are_named(arguments: tuple[str, ...], predicted: Path, tmp_path: Path) -> None:
    """If it fails, a command reads a damaged run as if it were whole."""
    folder = tmp_path / "run"
    shutil.copytree(predicted, folder)
    path = damage_line_6(folder)
    command, *options = arguments
    output = " ".join(commopt(command, folder, *options).output.split())
    assert f"commopt: {path} is damaged, and this is ignored: line 6: " in output


def _is_amount(place: tuple[Any, ...]) -> bool:
    return str(place[-1]).endswith(("_s", "_per_byte"))
