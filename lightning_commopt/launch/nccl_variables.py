"""The environment variables of NCCL: which there are, what they accept, since when; from its sources."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

PREFIX = "NCCL_"
_TABLE = Path(__file__).with_suffix(".json")  # docs/nccl_variables.py writes it


@dataclass(frozen=True, kw_only=True)
class Variable:
    """How NCCL's sources read a variable.

    Attributes:
        name: with its prefix.
        kind: how NCCL reads it. "switch" and "integer": as a number; "choice": one of ``choices`` in any case, "exact"
            as written; "level": "exact", or a number; "list": several of ``choices``; "algorithms": also for each
            collective; "names": of interfaces or adapters, "file": a path, "text": anything.
        choices: the words that it accepts.
        low: the smallest integer; None for no limit.
        high: the largest one; likewise.
        since: the first NCCL that has it; None if all have.
        removed_in: the first NCCL that does not have it any more.
        former_name: by which NCCL knew it earlier.
    """

    name: str
    kind: Literal["switch", "integer", "choice", "exact", "level", "list", "algorithms", "names", "file", "text"]
    choices: tuple[str, ...] = ()
    low: int | None = None
    high: int | None = None
    since: str | None = None
    removed_in: str | None = None
    former_name: str | None = None

    @property
    def allowed(self) -> str:
        """What it accepts, in words."""
        return self._grammar()[1]

    def accepts(self, value: str, version: tuple[int, ...] | None = None) -> bool:
        """Returns whether NCCL takes a value as it is meant; an empty one counts as unset.

        Args:
            value: of the variable.
            version: of the NCCL that reads it; None if unknown.
        """
        if self.kind == "list" and version is not None and version >= (2, 30):
            value = value.replace(" ", "")  # NCCL strips the words since then
        if value == "" or (self.kind == "algorithms" and "MSCCL" in value.upper()):
            return True  # MSCCL is a fork, with algorithms of its own
        if re.fullmatch(self._grammar()[0], value) is None:
            return False
        return self.high is None or (self.low or 0) <= int(value, 16 if "x" in value.lower() else 10) <= self.high

    def _grammar(self) -> tuple[str, str]:
        """Returns what it accepts, as a pattern and in words."""
        shown = ", ".join(self.choices)
        word = f"(?:{'|'.join(self.choices)})"
        words = rf"\^?,*{word}(?:,+{word})*,*"
        collective = "(?:broadcast|reduce|allgather|reducescatter|allreduce):"
        functions = f"(?i:(?:{collective})?{words}(?:;{collective}{words})*;*)"
        number = r"\s*[+-]?(?:0[xX][0-9a-fA-F]+|\d+)\s*"
        all_but = "without spaces (^ before the first: all but these"
        return {
            "switch": (number, "0 or 1"),
            "integer": (number, "an integer" if self.high is None else f"from {self.low} to {self.high}"),
            "choice": (f"(?i:{word})", f"one of {shown}"),
            "exact": (word, f"one of {shown}, in capitals"),
            "level": (rf"{word}|\d.*", f"one of {shown}, in capitals, or a number"),
            "list": (f"(?i:{words})", f"a list of {shown}, {all_but})"),
            "algorithms": (functions, f"a list of {shown}, {all_but}; COLLECTIVE:LIST;COLLECTIVE:LIST for some)"),
            "names": (r"\^?=?[^\s~!*^=;'\"()\[\]{}]+", f"a list of names {all_but}, = whole names only)"),
            "file": ("[^~].*", "a path without ~"),
            "text": ("(?s:.*)", "a text"),
        }[self.kind]


@cache
def nccl_variables() -> dict[str, Variable]:
    """Returns the variables of all versions of NCCL, by name."""
    entries = json.loads(_TABLE.read_text(encoding="utf-8"))["nccl"]
    variables = [Variable(**{**entry, "choices": tuple(entry.get("choices", ()))}) for entry in entries]
    return {variable.name: variable for variable in variables}


@cache
def other_variables() -> frozenset[str]:
    """Returns names that plugins, tests and forks of NCCL read."""
    return frozenset(json.loads(_TABLE.read_text(encoding="utf-8"))["others"])


def parse_version(text: str) -> tuple[int, ...]:
    """Returns a version as numbers.

    >>> parse_version("2.29U1")
    (2, 29)
    """
    return tuple(int(part) for part in re.findall(r"\d+", text)[: text.count(".") + 1])
