"""Checks that what is printed for people keeps its numbers in a narrow terminal."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable

from rich.console import Console

_WIDTHS = (40, 60, 80)
_NUMBER = re.compile(r"\d+(?:[.,:]\d+)*")


def printed(show: Callable[[Console], object], width: int, *, is_terminal: bool = True) -> str:
    """Returns what a terminal shows, or a file gets, without colors."""
    console = Console(file=io.StringIO(), width=width, force_terminal=is_terminal, color_system=None)
    show(console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def check_numbers_are_whole(show: Callable[[Console], object], *more_widths: int) -> None:
    """Fails unless a narrow terminal shows, as whole words, all numbers that one of any width shows."""
    wide = printed(show, 1000)
    for width in (*_WIDTHS, *more_widths):
        narrow = printed(show, width)
        missing = Counter(_NUMBER.findall(wide)) - Counter(_NUMBER.findall(narrow))
        assert not missing, f"{narrow}\nlacks {dict(missing)}"
        assert "…" not in narrow
        # A line of text to paste is never wrapped; everything else is.
        assert all(len(line) <= width for line in narrow.splitlines() if not line.startswith("#"))
