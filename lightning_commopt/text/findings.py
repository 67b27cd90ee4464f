"""Findings of commands: one type, printed and written as JSON."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from rich.console import Console

# The worst first: ``error``: training fails, hangs or is wrong; ``warning``: it may; ``slow``; ``differs``: ranks
# differ; ``note``
Severity = Literal["error", "warning", "slow", "differs", "note"]

_STYLES = {"error": "bold red", "warning": "yellow", "slow": "yellow", "differs": "magenta", "note": "cyan"}


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a file that the user named: its number from 1, and its text without colour codes, perhaps cut."""

    file: str
    number: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A problem, a difference between ranks, or a note."""

    severity: Severity  # see `Severity`
    what: str  # the fact, with devices or ranks
    advice: str  # what to do
    why: str = ""  # the setting or hardware that causes it, or its cost; may be empty
    code: str = ""  # identifies the kind of finding for scripts; may be empty
    where: str = ""  # host, ranks or communicator; empty if there is only one
    evidence: tuple[Line, ...] = ()  # lines of logs

    def to_plain(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Returns findings by severity without duplicates, otherwise in the order given."""
    return sorted(dict.fromkeys(findings), key=lambda finding: get_args(Severity).index(finding.severity))


@cache
def read_texts(path: Path) -> dict[str, dict[str, str]]:
    """Reads a table of texts: by the word in brackets, its values by their names."""
    text = re.sub(r"^#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    blocks = [block.partition("]\n") for block in re.split(r"^\[", text, flags=re.MULTILINE)[1:]]
    return {code: dict(line.split(": ", 1) for line in rest.splitlines() if line) for code, _, rest in blocks}


def print_findings(findings: Iterable[Finding], console: Console) -> None:
    """Prints each finding with its reason, advice and evidence."""
    from rich.text import Text  # strategies import this module too

    from lightning_commopt.text.terminal import print_text

    for finding in findings:
        severity = (f"{finding.severity}: ", _STYLES[finding.severity])
        where = f"{finding.where}: " if finding.where else ""
        print_text(Text.assemble(severity, where, finding.what), console)
        details = [("why", finding.why), ("try", finding.advice)]
        lines = [Text(f"  {name}: {text}") for name, text in details if text]
        lines += [Text(f"  {line.file}:{line.number}: {line.text}", style="dim") for line in finding.evidence]
        for line in lines:
            print_text(line, console)
