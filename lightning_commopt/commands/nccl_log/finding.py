"""Findings with the texts of ``findings.txt``, and what the finders share."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

from lightning_commopt.commands.nccl_log.facts import Member
from lightning_commopt.text.findings import Finding, Line, Severity, read_texts
from lightning_commopt.text.formatting import ranks_text

_TEXTS = read_texts(Path(__file__).with_name("findings.txt"))


class HasLine(Protocol):
    """What stands somewhere in a log."""

    @property
    def line(self) -> Line: ...


Evidence: TypeAlias = Line | HasLine | None


class Reason(NamedTuple):
    """Why something is so."""

    why: str  # the setting or the fact about the hardware
    advice: str  # what to try
    evidence: tuple[Evidence, ...] = ()


def reason(code: str, /, *evidence: Evidence, **values: object) -> Reason:
    """Returns the reason of a code, with its words in braces filled in."""
    return Reason(_TEXTS[code]["why"].format(**values), _TEXTS[code]["try"].format(**values), evidence)


def finding(
    severity: Severity, code: str, /, *evidence: Evidence, what: str = "", why: Reason | None = None, **values: object
) -> Finding:
    """Returns a finding, with the texts of its code where none are given, and each line of evidence once."""
    what, why = what or _TEXTS[code]["what"].format(**values), why or reason(code, **values)
    lines = [each if isinstance(each, Line) else each.line for each in (*evidence, *why.evidence) if each is not None]
    given = tuple(dict.fromkeys(lines))
    return Finding(severity=severity, code=code, what=what, why=why.why, advice=why.advice, evidence=given)


def ranks_of(members: Iterable[Member]) -> str:
    """Returns the ranks of members, as text."""
    known = {member.rank for member in members if member.rank is not None}
    return ranks_text(known) if known else "a rank"
