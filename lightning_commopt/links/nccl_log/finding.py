"""What a finding is, and the words that all findings share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from lightning_commopt.links.nccl_log.facts import Communicator, Connection, Fact, Process
from lightning_commopt.links.nccl_log.lines import Line

Severity = Literal["error", "slow", "differs", "note"]
_OFF = ("0", "no", "false", "")
_MOST_SHOWN = 4


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong, slow, unequal or worth knowing.

    Attributes:
        code: our name for this kind of finding, for scripts.
        severity: ``error``: the job fails or hangs; ``slow``; ``differs``: ranks are not alike; ``note``.
        what: the fact, with ranks and hosts.
        why: which setting or which fact about the hardware is behind it.
        advice: what to try.
        evidence: lines of the log; none where the finding is that lines are missing.
        communicator: its number; None for findings about processes.
    """

    code: str
    severity: Severity
    what: str
    why: str
    advice: str
    evidence: tuple[Line, ...] = ()
    communicator: int | None = None


class Reason(NamedTuple):
    """Why something is so.

    Attributes:
        why: the setting or the fact about the hardware.
        advice: what to try.
        evidence: lines that say so.
    """

    why: str
    advice: str
    evidence: tuple[Line, ...] = ()


def ranks_text(ranks: Iterable[int]) -> str:
    """Returns ranks as a person writes them.

    >>> ranks_text([3]), ranks_text([0, 1, 2, 3, 7])
    ('rank 3', 'ranks 0-3, 7')
    """
    stretches: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if stretches and rank == stretches[-1][-1] + 1:
            stretches[-1].append(rank)
        else:
            stretches.append([rank])
    shown = [
        f"{each[0]}-{each[-1]}" if len(each) > 2 else ", ".join(map(str, each)) for each in stretches[: 2 * _MOST_SHOWN]
    ]
    more = sum(map(len, stretches[2 * _MOST_SHOWN :]))
    noun = "rank" if len(stretches) == 1 and len(stretches[0]) == 1 else "ranks"
    return f"{noun} {', '.join(shown)}{f' and {more} more' if more else ''}"


def pairs_text(pairs: Iterable[tuple[int, int]]) -> str:
    """Returns pairs of ranks, whichever of them sends.

    >>> pairs_text([(0, 1)]), pairs_text([(1, 0), (0, 1), (1, 2)])
    ('ranks 0 and 1', '2 pairs of ranks (0 and 1, 1 and 2)')
    """
    unordered = sorted({(min(pair), max(pair)) for pair in pairs})
    shown = [f"{first} and {second}" for first, second in unordered]
    if len(shown) == 1:
        return f"ranks {shown[0]}"
    more = f" and {len(shown) - _MOST_SHOWN} more" if len(shown) > _MOST_SHOWN else ""
    return f"{len(shown)} pairs of ranks ({', '.join(shown[:_MOST_SHOWN])}{more})"


def pairs_of(connections: Iterable[Connection]) -> list[tuple[int, int]]:
    """Returns sender and receiver of connections."""
    return [(each.sender, each.receiver) for each in connections]


def setting(processes: Iterable[Process], name: str) -> Fact | None:
    """Returns a variable that one of the processes read, the first of them."""
    return next((process.settings[name] for process in processes if name in process.settings), None)


def switched_on(processes: Iterable[Process], name: str) -> Fact | None:
    """Returns a variable such as ``NCCL_P2P_DISABLE``, where a process has it and it is not 0."""
    found = (process.settings[name] for process in processes if name in process.settings)
    return next((fact for fact in found if fact.value.lower() not in _OFF), None)


def switched_off(processes: Iterable[Process], name: str) -> Fact | None:
    """Returns a variable such as ``NCCL_NVLS_ENABLE``, where a process has it and it is 0."""
    found = (process.settings[name] for process in processes if name in process.settings)
    return next((fact for fact in found if fact.value.lower() in _OFF), None)


def processes_of(communicator: Communicator, ranks: Iterable[int] | None = None) -> list[Process]:
    """Returns the processes of some ranks, or of all."""
    chosen = communicator.members if ranks is None else set(ranks)
    return [member.process for rank, member in communicator.members.items() if rank in chosen]


def lines(*found: Line | Fact | None) -> tuple[Line, ...]:
    """Returns evidence without what is missing, and nothing twice."""
    given = [each.line if isinstance(each, Fact) else each for each in found if each is not None]
    return tuple(dict.fromkeys(given))


def first_of(processes: Sequence[Process], note: str) -> Line | None:
    """Returns the first line of a note that one of the processes has."""
    return next((process.notes[note] for process in processes if note in process.notes), None)
