"""What NCCL's warnings mean: reads the table in ``warn_texts.txt``."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple, cast

from lightning_commopt.text.findings import Severity


class WarnText(NamedTuple):
    """A kind of warning."""

    code: str
    place: re.Pattern[str]  # of NCCL's file and line
    pattern: re.Pattern[str]  # of the text
    why: str
    advice: str
    severity: Severity
    follows: bool  # whether it is only the consequence of another warning, where there is one


@cache
def _table() -> list[WarnText]:
    found = []
    text = Path(__file__).with_suffix(".txt").read_text()
    for block in re.split(r"^\[", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE), flags=re.MULTILINE)[1:]:
        code, _, rest = block.partition("]\n")
        values = dict(line.split(": ", 1) for line in rest.splitlines() if line)
        place, pattern = re.compile(values.get("in", "")), re.compile(values["text"], re.IGNORECASE)
        kinds = values.get("as", "error").split(", ")
        severity = cast(Severity, "error" if kinds[0] == "follows" else kinds[0])
        found.append(WarnText(code, place, pattern, values["why"], values["try"], severity, "follows" in kinds))
    return found


def explain(text: str, place: str) -> WarnText | None:
    """Returns the first entry of the table that matches a warning; None for an unknown one.

    >>> explain("Cuda failure 217 'peer access is not supported'", "transport/shm.cc:590").code
    'shared_memory_refused'
    >>> explain("The moon is in the wrong place", "") is None
    True
    """
    return next((each for each in _table() if each.place.search(place) and each.pattern.search(text)), None)
