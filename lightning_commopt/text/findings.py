"""The findings of commands, which are printed or written as JSON."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

if TYPE_CHECKING:
    from rich.console import Console

# These are ordered from the worst. With an "error" training fails, hangs or is wrong; with a "warning" it may. The
# others are a loss of speed, a difference between ranks, and a note.
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

    severity: Severity
    what: str  # the fact, with devices or ranks
    advice: str  # a remedy for the user
    why: str = ""  # the setting or hardware that causes it, or its cost; may be empty
    code: str = ""  # identifies the kind of finding for scripts; may be empty
    where: str = ""  # host, ranks or communicator; empty if there is only one
    evidence: tuple[Line, ...] = ()  # lines of logs

    def to_plain(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Returns findings without duplicates, the worst first, and otherwise in the given order."""
    return sorted(dict.fromkeys(findings), key=lambda finding: get_args(Severity).index(finding.severity))


@cache
def read_texts(path: Path) -> dict[str, dict[str, str]]:
    """Reads texts by code and name from a file with codes in brackets, each followed by lines of a name and a text."""
    text = re.sub(r"^#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    blocks = [block.partition("]\n") for block in re.split(r"^\[", text, flags=re.MULTILINE)[1:]]
    return {code: dict(line.split(": ", 1) for line in rest.splitlines() if line) for code, _, rest in blocks}


class Reason(NamedTuple):
    """The reason of a finding, a remedy, and the evidence: lines of a log, or facts that have a ``line``."""

    why: str
    advice: str
    evidence: tuple[Any, ...] = ()  # None is left out


class FindingTexts:
    """The texts ``what``, ``why`` and ``try`` of findings, by code, with fields in braces for values."""

    def __init__(self, path: Path) -> None:
        self._texts = read_texts(path)

    def reason(self, code: str, /, *evidence: Any, **values: object) -> Reason:
        """Returns the reason for a code, with its fields filled in."""
        why, advice = (self._texts[code].get(part, "").format(**values) for part in ("why", "try"))
        return Reason(why, advice, evidence)

    def finding(
        self,
        severity: Severity,
        code: str,
        /,
        *evidence: Any,
        what: str = "",
        why: Reason | None = None,
        where: str = "",
        **values: object,
    ) -> Finding:
        """Returns a finding with the texts of its code, unless others are given, and each line of evidence once."""
        what, why = what or self._texts[code]["what"].format(**values), why or self.reason(code, **values)
        facts = [fact for fact in (*evidence, *why.evidence) if fact is not None]
        lines = tuple(dict.fromkeys(fact if isinstance(fact, Line) else fact.line for fact in facts))
        return Finding(
            severity=severity, what=what, advice=why.advice, why=why.why, code=code, where=where, evidence=lines
        )


def print_findings(findings: Iterable[Finding], console: Console) -> None:
    """Prints each finding with its reason, advice and evidence."""
    from rich.text import Text  # strategies import this module too, and do not need rich

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
