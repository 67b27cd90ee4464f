"""Findings of these commands: their texts, their order, and how they are printed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, get_args

from rich.console import Console
from rich.text import Text

from lightning_commopt.text.findings import Confidence, Finding, Line, Severity, read_texts
from lightning_commopt.text.terminal import print_text

_STYLES = {"error": "bold red", "warning": "yellow", "slow": "yellow", "differs": "magenta", "note": "cyan"}


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Returns findings by severity without duplicates, otherwise in the order given."""
    return sorted(dict.fromkeys(findings), key=lambda finding: get_args(Severity).index(finding.severity))


class Reason(NamedTuple):
    """The cause of a finding, what to try, and its evidence: lines of a log, or facts that have a ``line``."""

    why: str
    advice: str
    evidence: tuple[Any, ...] = ()  # None is left out
    confidence: Confidence = "certain"


class FindingTexts:
    """The texts of findings, by code: ``what``, ``why`` and ``try``, whose words in braces a finder fills in."""

    def __init__(self, path: Path) -> None:
        self._texts = read_texts(path)

    def reason(self, code: str, /, *evidence: Any, **values: object) -> Reason:
        """Returns the reason of a code."""
        why, advice = (self._texts[code].get(part, "").format(**values) for part in ("why", "try"))
        confidence: Any = self._texts[code].get("is", "certain")
        return Reason(why, advice, evidence, confidence)

    def finding(
        self,
        severity: Severity,
        code: str,
        /,
        *evidence: Any,
        what: str = "",
        why: Reason | None = None,
        where: str = "",
        confidence: Confidence | None = None,
        **values: object,
    ) -> Finding:
        """Returns a finding, with the texts of its code unless others are given, and each line of evidence once.

        Its confidence is that of its reason unless another is given.
        """
        what, why = what or self._texts[code]["what"].format(**values), why or self.reason(code, **values)
        facts = [fact for fact in (*evidence, *why.evidence) if fact is not None]
        lines = tuple(dict.fromkeys(fact if isinstance(fact, Line) else fact.line for fact in facts))
        return Finding(
            severity=severity,
            what=what,
            advice=why.advice,
            why=why.why,
            code=code,
            where=where,
            confidence=confidence or why.confidence,
            evidence=lines,
        )


def print_findings(findings: Iterable[Finding], console: Console) -> None:
    """Prints each finding with its reason, advice and evidence."""
    for finding in findings:
        doubt = " (possible)" if finding.confidence == "possible" else ""
        severity = (f"{finding.severity}{doubt}: ", _STYLES[finding.severity])
        where = f"{finding.where}: " if finding.where else ""
        print_text(Text.assemble(severity, where, finding.what), console)
        details = [("why", finding.why), ("try", finding.advice)]
        lines = [Text(f"  {name}: {text}") for name, text in details if text]
        lines += [Text(f"  {line.file}:{line.number}: {line.text}", style="dim") for line in finding.evidence]
        for line in lines:
            print_text(line, console)
