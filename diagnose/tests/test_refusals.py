"""What a command cannot read: status 2 and one line that names it, whatever the command and whatever is wrong."""

from collections.abc import Callable
from pathlib import Path

import pytest

from support.commopt import commopt, refusal
from support.sample_runs import SampleRun, write_run
from support.unreadable import check_refusals, damage_line_6

_COMMANDS: dict[str, Callable[[Path], tuple[object, ...]]] = {
    "doctor": lambda path: ("doctor", path),
    "nccl-log": lambda path: ("nccl-log", path),
    "topo": lambda path: ("topo", "--from", path),
    "bench --load": lambda path: ("bench", "--load", path),
    "bench --from-run": lambda path: ("bench", "--from-run", path),
    "bench --plan": lambda path: ("bench", "--plan", path),
}


@pytest.mark.parametrize("command", _COMMANDS)
def test_what_cannot_be_read_is_status_2_and_a_line(command: str, tmp_path: Path) -> None:
    """If it fails, a script that looks at the status takes a mistake for a finding, or a user sees a traceback."""
    check_refusals(_COMMANDS[command], tmp_path)


@pytest.mark.parametrize(
    "arguments",
    [
        ("nsys", "--output-dir", "/dev/null/x", "srun", "a.py"),
        ("bench", "--output", "/nowhere/x.json"),
        ("doctor", "--port=29500"),
    ],
)
def test_wrong_options_are_status_2_and_a_line(arguments: tuple[str, ...]) -> None:
    assert refusal(*arguments).startswith("commopt: ")


@pytest.mark.parametrize("command", ["bench", "nccl-log"])
def test_lines_that_are_left_out_are_named(command: str, tmp_path: Path) -> None:
    """If it fails, a command reads a damaged run as if it were whole."""
    write_run(tmp_path, SampleRun(num_buckets=4))
    path, log = damage_line_6(tmp_path), tmp_path / "nccl.log"
    log.write_text("node1:71:71 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.5<0>\n")
    words = {"bench": ("--from-run", tmp_path), "nccl-log": (log, "--run", tmp_path)}[command]
    output = " ".join(commopt(command, *words).output.split())
    assert f"commopt: {path} is damaged, and this is ignored: line 6: " in output
