"""Files and folders of which no command can make anything, and records of a run that are damaged."""

from collections.abc import Callable, Iterator
from pathlib import Path

from support.commopt import refusal


def write_unreadable(folder: Path) -> Iterator[Path]:
    """Writes, one after another, what is no input of any command; yields its path, whose name says what is wrong."""
    for make in (empty_folder, missing, binary, empty_file, other_json, deep_json, empty_run, binary_run):
        path = folder / make.__name__
        make(path)
        yield path


def check_refusals(arguments_for: Callable[[Path], tuple[object, ...]], folder: Path) -> None:
    """Fails unless a command, whose arguments are made of a path, ends with status 2 and a line that names the path."""
    for path in write_unreadable(folder):
        line = refusal(*arguments_for(path))
        assert line.startswith("commopt: "), path.name
        assert str(path) in line, path.name
        assert f"{path} does not exist" not in line or not path.exists(), line


def damage_line_6(run_dir: Path) -> Path:
    """Puts half a line into the records of rank 1; returns their path."""
    path = run_dir / "comm_time" / "rank_1.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:5], b'{"type": "st\n', *lines[5:]]))
    return path


def empty_folder(path: Path) -> None:
    path.mkdir()


def missing(path: Path) -> None:
    """Leaves nothing there."""


def binary(path: Path) -> None:
    path.write_bytes(b"\xff\x00\x81" * 99)


def empty_file(path: Path) -> None:
    path.touch()


def other_json(path: Path) -> None:
    path.write_text('{"kind": "something else", "format": 1}')


def deep_json(path: Path) -> None:
    path.write_text("[" * 100_000)


def empty_run(path: Path) -> None:
    for name in ("comm_time/rank_0.jsonl", "run.json", "prediction.json", "hangs/report.json", "hangs/rank_0.json"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).touch()


def binary_run(path: Path) -> None:
    empty_run(path)
    for file in path.rglob("*.json*"):
        binary(file)
