"""NCCL's environment variables: what they accept since which version, and mistakes in a user's environment.

The table is made from NCCL's sources.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from pathlib import Path
from typing import Literal

from lightning_commopt.text.findings import Finding, read_texts

PREFIX = "NCCL_"
_TABLE = Path(__file__).with_suffix(".json")  # docs/nccl_variables.py writes it
_NAMES = Path(__file__).with_name("nccl_names.txt")
_MISSPELT_PREFIX = re.compile(r"(?:N+C*L*C*|CNCL)_?(?=[A-Z])")
_OPPOSITES = {"DISABLE": "ENABLE", "ENABLE": "DISABLE"}
# Similarities from 0 to 1 from which on a name, or a word of it, counts as misspelt. The first is high enough that
# NCCL_DEBUG_FLAG is not taken for NCCL_DEBUG_FILE. The second is above the 4/7 of NET and NVTX, and below the 2/3 that
# two of three letters have.
_MIN_NAME_SIMILARITY, _MIN_WORD_SIMILARITY = 0.88, 0.65
_OLDEST = (2, 21)  # the version that comes with the oldest supported torch


@dataclass(frozen=True, kw_only=True)
class Variable:
    """How NCCL's sources read a variable."""

    name: str  # the name, with its prefix
    # How NCCL reads the value: "switch" and "integer" as a number, "choice" as one of ``choices`` in any case, "exact"
    # only as written, "level" as "exact" or a number, "list" as several of ``choices``, "algorithms" as such a list or
    # one for each collective, "names" as names of interfaces or adapters, "file" as a path, and "text" as it is.
    kind: Literal["switch", "integer", "choice", "exact", "level", "list", "algorithms", "names", "file", "text"]
    choices: tuple[str, ...] = ()  # the words that it accepts
    low: int | None = None  # the smallest integer; None for no limit
    high: int | None = None  # the largest integer; None for no limit
    since: str | None = None  # the first NCCL that has it; None if all have
    removed_in: str | None = None  # the first NCCL that does not have it any more
    former_name: str | None = None  # the name that it had in earlier versions of NCCL

    @property
    def allowed(self) -> str:
        """What it accepts, in words."""
        return self._grammar()[1]

    def accepts(self, value: str, version: tuple[int, ...] | None = None) -> bool:
        """Returns whether a version of NCCL, None if unknown, accepts a value; an empty value counts as unset."""
        if self.kind == "list" and version is not None and version >= (2, 30):
            value = value.replace(" ", "")  # since 2.30 NCCL removes spaces around the words
        if value == "" or (self.kind == "algorithms" and "MSCCL" in value.upper()):
            return True  # MSCCL is a fork of NCCL, whose algorithms are not in the table
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


def find_mistakes(environment: Mapping[str, str], *, version: tuple[int, ...] | None = None) -> list[Finding]:
    """Looks for misspelt, obsolete and never-existing variables of NCCL, and for values that it does not take.

    A name that is unlike all of NCCL's may be for another program, and is no mistake. ``version`` is the version of the
    NCCL that will read them; None for any that a supported torch comes with. What this version has no more or not yet
    is a warning, as training works as it would without.
    """
    variables = nccl_variables()
    passed_over = {name for name in environment if name in variables and _no_effect(variables[name], version)}
    return [
        Finding(severity="warning" if name in passed_over else "error", what=message, advice=f"correct or unset {name}")
        for name, value in sorted(environment.items())
        if (message := _message(name, value, version)) is not None
    ]


def _message(name: str, value: str, version: tuple[int, ...] | None) -> str | None:
    variables = nccl_variables()
    if variable := variables.get(name):
        wrong = None if variable.accepts(value, version) else f"{name} must be {variable.allowed}, got {value!r}"
        return _no_effect(variable, version) or wrong
    names = read_texts(_NAMES)
    if name in names["meant"]:
        return f"{name} is not a variable of NCCL: {names['meant'][name]}"
    for variable in variables.values():
        if name == variable.former_name:
            return f"{name} was renamed: it is {variable.name} now"
    if name in other_variables() or any(re.match(pattern, name) for pattern in names["third_party"].values()):
        return None
    meant = _suggest(name, value) if name.startswith(PREFIX) else _with_right_prefix(name)
    return None if meant is None else f"{name} is not a variable of NCCL; did you mean {meant}?"


def _no_effect(variable: Variable, version: tuple[int, ...] | None) -> str | None:
    name = variable.name
    if variable.removed_in is not None and (version or _OLDEST) >= parse_version(variable.removed_in):
        return f"{name} has no effect since NCCL {variable.removed_in}, which removed it"
    if variable.since is not None and version is not None and version < parse_version(variable.since):
        return f"{name} has no effect before NCCL {variable.since}; this is {'.'.join(map(str, version))}"
    return None


def _suggest(name: str, value: str) -> str | None:
    """Returns the variable that an unknown name may stand for, with a value if that changes; None if nothing is near.

    >>> _suggest("NCCL_NVLS_DISABLE", "1"), _suggest("NCCL_DISABLE_IB", "1"), _suggest("NCCL_MY_SCRIPT", "x")
    ('NCCL_NVLS_ENABLE=0', 'NCCL_IB_DISABLE', None)
    """
    names = [name for name, variable in nccl_variables().items() if variable.removed_in is None]
    by_words = {frozenset(known.split("_")): known for known in names}
    words = [re.sub(r"ABLED$", "ABLE", word) for word in name.split("_")]
    if frozenset(words) in by_words:
        return by_words[frozenset(words)]
    opposite = by_words.get(frozenset(_OPPOSITES.get(word, word) for word in words))
    if opposite is not None:
        return f"{opposite}={int(value == '0')}"
    beginnings = [known for known in names if re.match(rf"{known}[A-Z]", name)]
    near = [known for known in get_close_matches(name, names, cutoff=_MIN_NAME_SIMILARITY) if _is_alike(name, known)]
    return next(iter([*beginnings, *near]), None)


def _is_alike(name: str, other: str) -> bool:
    """Returns whether each word of a name may be a misspelt word of another name, unlike NET and NVTX."""
    words, others = name.split("_"), other.split("_")
    pairs = [(word, known) for word, known in zip(words, others, strict=False) if word != known]
    return len(words) != len(others) or all(
        SequenceMatcher(None, *pair).ratio() > _MIN_WORD_SIMILARITY for pair in pairs
    )


def _with_right_prefix(name: str) -> str | None:
    """Returns the variable whose prefix is wrong, such as NCLL_DEBUG, nccl_debug or NCCLDEBUG.

    Prefixes of other libraries, such as RCCL and HCCL, are not wrong.
    """
    meant = PREFIX + _MISSPELT_PREFIX.sub("", name.upper(), count=1)
    return meant if meant in nccl_variables() and _MISSPELT_PREFIX.match(name.upper()) else None
