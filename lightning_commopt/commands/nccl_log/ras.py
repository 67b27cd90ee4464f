"""The report of NCCL's RAS (``ncclras``): ranks that are missing, failed, or called other collectives than the rest."""

from __future__ import annotations

import re
from collections.abc import Iterator

from lightning_commopt.commands.nccl_log.events import RasReport
from lightning_commopt.commands.nccl_log.finding import finding, reason
from lightning_commopt.commands.nccl_log.lines import Message
from lightning_commopt.text.findings import Finding, Severity
from lightning_commopt.text.formatting import list_some

_HEAD = re.compile(r"(?:#\d+-\d+ \(([0-9a-f]{8,16})\) )?(INCOMPLETE|DEAD|ERROR|MISMATCH|TIMEOUT)$")
_DETAIL = re.compile(
    r"(?:Missing|Communicator|Initialization error|Asynchronous error|Process \d+ on|The |Dead |\[could not find"
    r"|\d+ (?:ranks?|job process|process)|Rank \d+ )"
)
_PLACE = re.compile(r" -- GPUs? \S+ managed by process (\d+) on node (\S+)")


def read_ras(message: Message, reports: list[RasReport]) -> bool:
    """Adds a line to the reports; returns whether it is one of RAS."""
    text = message.text
    if found := _HEAD.match(text):
        reports.append(RasReport(comm_id=found[1] or "", status=found[2], line=message.line))
        return True
    if reports and _DETAIL.match(text) and message.number == reports[-1].line.number + len(reports[-1].details) + 1:
        reports[-1].details.append(_PLACE.sub(r" (process \1 on \2)", text))
        return True
    return False


def find_ras(reports: list[RasReport]) -> Iterator[Finding]:
    """Finds what RAS reports; what differs may differ only for the moment."""
    for report in reports:
        whose = f"communicator 0x{report.comm_id}" if report.comm_id else "the job"
        if report.details:
            what = f"RAS reports {report.status} for {whose}: {list_some(report.details, 8)}"
            severity: Severity = "warning" if report.status in ("MISMATCH", "TIMEOUT") else "error"
            yield finding(severity, "ras", what, reason(f"ras_{report.status.lower()}"), report.line)
