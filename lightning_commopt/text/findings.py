"""Findings: problems of an environment, a machine or a log, one type for all who look for them; and tables of texts."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

# These are ordered from the worst. With an "error" training fails, hangs or is wrong; with a "warning" it may. The
# others are a loss of speed, a difference between ranks, and a note.
Severity = Literal["error", "warning", "slow", "differs", "note"]
# How sure a finding is: "certain" if what was read says so itself, "likely" if it is the usual reason of what was read,
# and "possible" if it may as well be otherwise, as where lines are damaged.
Confidence = Literal["certain", "likely", "possible"]


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a file that the user named: its number from 1, and its text without color codes, perhaps cut."""

    file: str
    number: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A problem, a difference between ranks, or a note."""

    severity: Severity
    what: str  # the fact, with devices or ranks
    advice: str  # a remedy for the user
    why: str = ""  # the setting or hardware that causes it, or its cost; may be empty
    code: str = ""  # identifies the kind of finding for scripts; may be empty
    where: str = ""  # host, ranks or communicator; empty if there is only one
    confidence: Confidence = "certain"
    evidence: tuple[Line, ...] = ()  # lines of logs

    def to_plain(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@cache
def read_texts(path: Path) -> dict[str, dict[str, str]]:
    """Reads texts by code and name from a file with codes in brackets, each followed by lines of a name and a text."""
    text = re.sub(r"^#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    blocks = [block.partition("]\n") for block in re.split(r"^\[", text, flags=re.MULTILINE)[1:]]
    return {code: dict(line.split(": ", 1) for line in rest.splitlines() if line) for code, _, rest in blocks}
