"""Explains NCCL's warnings and PyTorch's errors one by one, from a table of what their texts mean."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from commopt_diagnose.findings import Reason
from lightning_commopt.text.findings import Severity, read_texts


class WarnText(NamedTuple):
    """A kind of warning."""

    code: str
    place: re.Pattern[str]  # pattern for the file and line in NCCL's source
    pattern: re.Pattern[str]  # pattern for the text
    reason: Reason
    severity: Severity | Literal["follows"]  # "follows": if there is another warning, only a consequence of it


@cache
def _table() -> list[WarnText]:
    table = []
    for code, values in read_texts(Path(__file__).with_name("warn_texts.txt")).items():
        place, pattern = re.compile(values.get("in", "")), re.compile(values["text"], re.IGNORECASE)
        severity: Any = values.get("as", "error")
        confidence: Any = values.get("is", "likely")
        table.append(WarnText(code, place, pattern, Reason(values["why"], values["try"], (), confidence), severity))
    return table


def explain(text: str, place: str) -> WarnText | None:
    """Returns the first entry of the table that matches a warning; None for an unknown one.

    >>> explain("Cuda failure 217 'peer access is not supported'", "transport/shm.cc:590").code
    'shared_memory_refused'
    >>> explain("The moon is in the wrong place", "") is None
    True
    """
    return next((entry for entry in _table() if entry.place.search(place) and entry.pattern.search(text)), None)
