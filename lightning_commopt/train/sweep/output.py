"""Lines from what a program writes to a terminal, progress bars included."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence

_ENDS = re.compile(r"([\r\n])")
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# How Python ends a traceback; a logger or Lightning may have put something before it.
_EXCEPTION_LINE = re.compile(
    r"^(\[rank(?P<rank>\d+)\]: ?)?(?P<exception>[\w.]*(Error|Exception|Interrupt|Exit)\b(: .*)?)$"
)
# What a rank says whose peer has gone, or that was stopped for that reason.
_CONSEQUENCE = re.compile(
    r"closed by peer|connection (was )?(closed|reset|refused)|broken pipe|gloo|nccl|\bDist\w*Error|SIG(TERM|KILL|ABRT)",
    re.IGNORECASE,
)


class LineReader:
    """Splits output into lines, and separates those that stay from those that are overwritten.

    Args:
        on_line: receives each line without control sequences, and whether it stays. Empty lines that stay are left
            out.
    """

    def __init__(self, on_line: Callable[[str, bool], None]) -> None:
        self._on_line = on_line
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._line = ""
        self._overwritten = ""

    def feed(self, data: bytes) -> None:
        """Takes the next piece of the output, which may end anywhere."""
        for piece in _ENDS.split(self._decoder.decode(data)):
            if piece == "\n":
                self._end_line()
            elif piece == "\r":
                self._overwritten = self._line or self._overwritten
                self._line = ""
            else:
                self._line += piece
        shown = _CONTROL.sub("", self._line or self._overwritten).rstrip()
        if shown:
            self._on_line(shown, False)

    def close(self) -> None:
        self._end_line()

    def _end_line(self) -> None:
        # A carriage return only moves the cursor: what stood there before the end of the line is still to be seen.
        line = _CONTROL.sub("", self._line or self._overwritten).rstrip()
        self._line = self._overwritten = ""
        if line:
            self._on_line(line, True)


def lines_that_stay(output: str) -> list[str]:
    """Returns what is left to be read of a program's whole output, line by line."""
    lines: list[str] = []
    reader = LineReader(lambda text, is_final: lines.append(text) if is_final else None)
    reader.feed(output.encode())
    reader.close()
    return lines


def last_exception(lines: Sequence[str]) -> str | None:
    """Returns the last line with which Python ends a traceback; None without any."""
    return next((line for line in reversed(lines) if _EXCEPTION_LINE.match(line)), None)


def cause_in_another_rank(error: str, lines: Sequence[str]) -> str | None:
    """Returns the exception of another rank that explains why one has failed.

    Args:
        error: of the rank that has failed.
        lines: of all ranks, mixed.

    Returns:
        The first exception that is no consequence itself, after its rank; None if ``error`` is no lost connection and
        no signal, or nothing explains it.

    >>> cause_in_another_rank("RuntimeError: Connection closed by peer", ["[rank1]: ValueError: no such token"])
    'rank 1: ValueError: no such token'
    """
    if not _CONSEQUENCE.search(error):
        return None
    for found in filter(None, map(_EXCEPTION_LINE.match, lines)):
        exception = found["exception"]
        if exception not in error and not _CONSEQUENCE.search(exception):
            return f"{'another rank' if found['rank'] is None else 'rank ' + found['rank']}: {exception}"
    return None
