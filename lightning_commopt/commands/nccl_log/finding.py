"""Why findings are so, and the words that all of them share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from lightning_commopt.commands.nccl_log.facts import Communicator, Connection, Fact, Member, Process
from lightning_commopt.text.findings import Finding, Line, Severity, read_texts
from lightning_commopt.text.formatting import list_some, ranks_text

_OFF = ("0", "no", "false", "")


class HasLine(Protocol):
    """What stands somewhere in a log."""

    @property
    def line(self) -> Line: ...


class Reason(NamedTuple):
    """Why something is so."""

    why: str  # the setting or the fact about the hardware
    advice: str  # what to try
    evidence: tuple[Line, ...] = ()


def reason(code: str, /, *evidence: Line | HasLine | None, **values: object) -> Reason:
    """Returns an entry of ``reasons.txt`` with its words in braces filled in, and those lines that there are."""
    texts = read_texts(Path(__file__).with_name("reasons.txt"))[code]
    return Reason(texts["why"].format(**values), texts["try"].format(**values), lines(*evidence))


def finding(severity: Severity, code: str, what: str, reason: Reason, *evidence: Line | HasLine | None) -> Finding:
    """Returns a finding, with those lines that there are."""
    given = lines(*evidence, *reason.evidence)
    return Finding(severity=severity, code=code, what=what, why=reason.why, advice=reason.advice, evidence=given)


def pairs_text(pairs: Iterable[tuple[int, int]]) -> str:
    """Returns pairs of ranks, whichever of them sends.

    >>> pairs_text([(0, 1)]), pairs_text([(1, 0), (0, 1), (1, 2)])
    ('ranks 0 and 1', '2 pairs of ranks (0 and 1, 1 and 2)')
    """
    unordered = sorted({(min(pair), max(pair)) for pair in pairs})
    shown = [f"{first} and {second}" for first, second in unordered]
    if len(shown) == 1:
        return f"ranks {shown[0]}"
    return f"{len(shown)} pairs of ranks ({list_some(shown)})"


def pairs_of(connections: Iterable[Connection]) -> list[tuple[int, int]]:
    """Returns sender and receiver of connections."""
    return [(each.sender, each.receiver) for each in connections]


def setting(processes: Iterable[Process], name: str) -> Fact | None:
    """Returns a variable that one of the processes read, the first of them."""
    return next((process.settings[name] for process in processes if name in process.settings), None)


def switched_on(processes: Iterable[Process], name: str, *, on: bool = True) -> Fact | None:
    """Returns a variable such as ``NCCL_P2P_DISABLE``, where a process has it and it is not 0, or with not on, is 0."""
    found = (process.settings[name] for process in processes if name in process.settings)
    return next((fact for fact in found if (fact.value.lower() not in _OFF) == on), None)


def processes_of(communicator: Communicator, ranks: Iterable[int] | None = None) -> list[Process]:
    """Returns the processes of some ranks, or of all."""
    if ranks is None:
        return list({id(member.process): member.process for member in communicator.all_members}.values())
    chosen = set(ranks)
    return [member.process for rank, member in communicator.members.items() if rank in chosen]


def ranks_of(members: Iterable[Member]) -> str:
    """Returns the ranks of members, as text."""
    known = sorted({member.rank for member in members if member.rank is not None})
    return ranks_text(known) if known else "a rank"


def spans_hosts(communicator: Communicator) -> bool | None:
    """Returns whether there are several hosts; None where the log does not say."""
    if communicator.num_nodes is not None:
        return communicator.num_nodes > 1
    hosts = {each.process.host for each in communicator.all_members if each.process.host}
    if len(hosts) > 1 or any(is_between(each) for each in communicator.connections):
        return True
    return False if communicator.num_ranks == 1 else None


def is_between(connection: Connection) -> bool:
    """Returns whether both ends have one bus id, which a host has only once; a device number has fewer digits."""
    sender, receiver = connection.labels
    return connection.kind == "NET" and sender == receiver and len(sender) > 2


def lines(*found: Line | HasLine | None) -> tuple[Line, ...]:
    """Returns evidence without what is missing, and nothing twice."""
    given = [each if isinstance(each, Line) else each.line for each in found if each is not None]
    return tuple(dict.fromkeys(given))


def first_of(processes: Sequence[Process], note: str) -> Line | None:
    """Returns the first line of a note that one of the processes has."""
    return next((process.notes[note] for process in processes if note in process.notes), None)
