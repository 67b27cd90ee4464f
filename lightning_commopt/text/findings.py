"""What commands find wrong, slow or worth knowing: one type, printed and written as JSON in one way."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from rich.console import Console

Severity = Literal["error", "warning", "slow", "differs", "note"]
"""The worst first: ``error``: training fails, hangs or is wrong; ``warning``: it may; ``slow``; ``differs``: ranks are
not alike; ``note``."""

_STYLES = {"error": "bold red", "warning": "yellow", "slow": "yellow", "differs": "magenta", "note": "cyan"}


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a file.

    Attributes:
        file: as the user named it.
        number: from 1.
        text: of the line, without colour codes; the beginning, if it is long.
    """

    file: str
    number: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong, slow, unequal or worth knowing.

    Attributes:
        severity: how bad it is.
        what: the fact, with devices or ranks.
        advice: what to do.
        why: which setting or hardware is behind it, or what it costs; empty where `what` says so.
        code: our name for this kind of finding, for scripts; empty where it has none.
        where: host, ranks or communicator; empty where there is only one.
        evidence: lines of logs.
    """

    severity: Severity
    what: str
    advice: str
    why: str = ""
    code: str = ""
    where: str = ""
    evidence: tuple[Line, ...] = ()

    def to_plain(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Finding:
        return cls(**{**plain, "evidence": tuple(Line(**line) for line in plain["evidence"])})


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Returns findings by severity, each once, and otherwise in the order given."""
    return sorted(dict.fromkeys(findings), key=lambda finding: get_args(Severity).index(finding.severity))


def print_findings(findings: Iterable[Finding], console: Console) -> None:
    """Prints each finding with its reason, what to try, and the lines that show it."""
    from rich.text import Text  # strategies import this module too

    from lightning_commopt.text.terminal import print_text

    for finding in findings:
        severity = (f"{finding.severity}: ", _STYLES[finding.severity])
        place = f"{finding.where}: " if finding.where else ""
        print_text(Text.assemble(severity, place, finding.what), console)
        details = [("why", finding.why), ("try", finding.advice)]
        lines = [Text(f"  {name}: {text}") for name, text in details if text]
        lines += [Text(f"  {line.file}:{line.number}: {line.text}", style="dim") for line in finding.evidence]
        for line in lines:
            print_text(line, console)
