"""What a finding is."""

from __future__ import annotations

from typing import Literal, NamedTuple

Severity = Literal["error", "warning"]


class Finding(NamedTuple):
    """Something that keeps ranks from training together, or slows them down.

    Attributes:
        severity: "error" where training will fail, hang, or be wrong; "warning" where it may, or will be slow.
        where: hosts or ranks.
        message: what it is.
        remedy: what to do.
    """

    severity: Severity
    where: str
    message: str
    remedy: str
