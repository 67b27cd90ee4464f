"""Reads what ``ncclras -f json`` writes, NCCL 2.28 and newer, into reports as its text has them.

It is read line by line, as NCCL 2.28.9 leaves out a comma in it, and as a log may cut it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from commopt_diagnose.nccl_log.complaints import RasReport
from commopt_diagnose.nccl_log.lines import Message
from lightning_commopt.text.findings import Line
from lightning_commopt.text.formatting import count, grouped, ranks_text

_FIELD = re.compile(r'"(\w+)" ?: ?"?([^",{}\[\]\s]{1,64})')
_FINE = ("0", "7")  # ncclSuccess and ncclInProgress

Rank = Mapping[str, str]
"""The fields of a rank, with those of its status and its counts of collectives."""


class RasJson:
    """Adds reports to those of a log."""

    def __init__(self, reports: list[RasReport]) -> None:
        self._reports = reports
        self._is_open = False  # whether the object has begun, and not ended
        self._communicator: tuple[str, Line] | None = None
        self._ranks: list[dict[str, str]] = []

    def read(self, message: Message) -> bool:
        """Reads a line; returns whether it is of such an object."""
        self._is_open |= '"communicators_count"' in message.text
        fields = _FIELD.findall(message.text) if self._is_open else []
        for name, value in fields:
            if name == "hash":
                self.add_reports()
                self._communicator = value.removeprefix("0x"), message.line
            elif name == "rank":
                self._ranks.append({name: value})
            elif name == "timeouts_count":
                self.add_reports()
                self._is_open = False
            elif self._ranks:
                self._ranks[-1][name] = value
        return bool(fields)

    def add_reports(self) -> None:
        """Adds what is wrong with the communicator that was read last."""
        ranks, self._ranks = self._ranks, []
        if self._communicator is not None:
            comm_id, line = self._communicator
            of_status = grouped(_complaints(ranks))
            self._reports += [RasReport(comm_id, status, line, details) for status, details in of_status.items()]


def _complaints(ranks: Sequence[Rank]) -> Iterator[tuple[str, str]]:
    """Yields the status of a report, and one of its details."""
    members = [rank for rank in ranks if "unresponsive" not in rank]
    others = grouped((_absent_rank_report(rank), rank) for rank in ranks if "unresponsive" in rank)
    for (status, absence), absent in others.items():
        yield status, f"{absence} {count(len(absent), 'rank')}"
        yield from ((status, _place(rank)) for rank in absent)
    for rank in members:
        codes = [rank.get(name, "0") for name in ("init_state", "async_error")]
        if any(code not in _FINE for code in codes):
            yield "ERROR", f"{_place(rank)}: init_state {codes[0]}, async_error {codes[1]}"
    for name in ("abort_flag", "finalize_called", "destroy_flag"):
        with_flag = [int(rank["rank"]) for rank in members if rank.get(name) == "true" and rank["rank"].isdecimal()]
        if 0 < len(with_flag) < len(members):
            yield "MISMATCH", f"{name} is set on {ranks_text(with_flag)} only"
    for operation in dict.fromkeys(name for rank in members for name in rank if name[0].isupper()):
        counts = grouped((rank[operation], rank) for rank in members if operation in rank)  # the last may be cut
        if len(counts) > 1:
            yield "MISMATCH", f"Communicator ranks have different {operation} operation counts"
            for number, equal_ranks in counts.items():
                subject = f"{len(equal_ranks)} ranks have" if len(equal_ranks) > 1 else f"{_place(equal_ranks[0])} has"
                yield "MISMATCH", f"{subject} launched up to operation {number}"


def _absent_rank_report(rank: Rank) -> tuple[str, str]:
    """Returns the status of a report about a rank that is not in its communicator, and in words why."""
    if rank.get("considered_dead") == "true":
        return "DEAD", "Dead process of"
    if rank["unresponsive"] == "true":
        return "INCOMPLETE", "Missing communicator data from"
    return "MISMATCH", "Not yet, or no longer, a member:"


def _place(rank: Rank) -> str:
    return f"Rank {rank['rank']} (process {rank.get('pid', '?')} on {rank.get('host', '?')})"
