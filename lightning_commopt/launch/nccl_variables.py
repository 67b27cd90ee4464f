"""The environment variables of NCCL: which there are, what they accept, since when. From NCCL's own user guide."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

PREFIX = "NCCL_"
_TABLE = Path(__file__).with_suffix(".json")  # docs/nccl_variables.py writes it
_NAME = re.compile(rb"NCCL_[A-Z][A-Z0-9_]+(?=\x00)")


@dataclass(frozen=True, kw_only=True)
class Variable:
    """What NCCL's user guide says of a variable.

    Attributes:
        name: with its prefix.
        kind: "switch" is 0 or 1; "choice" one of ``choices``, "list" several of them; case does not matter.
        choices: the words that it accepts.
        low: the smallest integer.
        high: the largest one.
        default: as text; None where it depends on the machine, or the guide does not say.
        since: the first NCCL that has it; None if all have.
        removed_in: the first NCCL that does not have it any more.
        deprecated_in: the first NCCL that advises against it.
        former_name: by which NCCL knew it earlier.
        is_for_debugging: NCCL advises against keeping it in production.
    """

    name: str
    kind: Literal["switch", "integer", "choice", "list", "text"]
    choices: tuple[str, ...] = ()
    low: int = 0
    high: int | None = None
    default: str | None = None
    since: str | None = None
    removed_in: str | None = None
    deprecated_in: str | None = None
    former_name: str | None = None
    is_for_debugging: bool = False

    @property
    def allowed(self) -> str:
        """What it accepts, in words."""
        if self.kind == "switch":
            return "0 or 1"
        if self.kind in ("choice", "list"):
            words = ", ".join(self.choices)
            return f"one of {words}" if self.kind == "choice" else f"a list of {words}"
        if self.kind == "integer":
            return f"an integer of at least {self.low}" if self.high is None else f"from {self.low} to {self.high}"
        return "not empty"

    def accepts(self, value: str) -> bool:
        """Returns whether NCCL takes a value."""
        value = value.strip()
        if self.kind == "switch":
            return value in ("0", "1")
        if self.kind == "choice":
            return value.upper() in map(str.upper, self.choices)
        if self.kind == "list":
            # NCCL_ALGO=ring,tree;allreduce:^tree and NCCL_DEBUG_SUBSYS=^COLL,NET: words, functions, exclusions.
            words = [word.rpartition(":")[2].lstrip("^") for word in re.split("[;,]", value)]
            return all(word.strip().upper() in map(str.upper, self.choices) for word in words)
        if self.kind == "integer":
            low = -1 if self.default == "-1" else self.low
            try:
                number = int(value, 0)
            except ValueError:
                return False
            return number >= low and (self.high is None or number <= self.high)
        return value != ""


@cache
def nccl_variables() -> dict[str, Variable]:
    """Returns the variables of NCCL's user guide, by name."""
    entries = json.loads(_TABLE.read_text(encoding="utf-8"))
    variables = [Variable(**{**entry, "choices": tuple(entry.get("choices", ()))}) for entry in entries]
    return {variable.name: variable for variable in variables}


@cache
def names_in_library() -> frozenset[str]:
    """Returns the words in the NCCL that torch uses that look like variables: those that no guide has are among them.

    Empty where that library is part of torch's own, or is not found.
    """
    nvidia = find_spec("nvidia")
    folders = list(nvidia.submodule_search_locations or ()) if nvidia is not None else []
    for folder in folders:
        for library in Path(folder).glob("nccl/lib/libnccl.so*"):
            return frozenset(name.decode() for name in _NAME.findall(library.read_bytes()))
    return frozenset()
