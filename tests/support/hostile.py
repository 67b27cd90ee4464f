"""Plants text that a terminal must not get into files that commands read, and checks what they print."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from lightning_commopt.commands.app import app

HOSTILE = "\x1b]0;PWNED\x07\x1b[2J\x9b31m\u202e\u2066\r\x7f\ud800é中"
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_Place = tuple[str | int, ...]


def run(*arguments: object) -> tuple[int, str]:
    """Runs a command, which may refuse a file; returns its exit status, and what reaches a terminal."""
    result = CliRunner(env={"COLUMNS": "100"}).invoke(app, [*map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result.exit_code, result.output


def check(*arguments: object) -> tuple[int, str]:
    status, printed = run(*arguments)
    found = CONTROLS.search(printed)
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
