"""Checks that what is printed for people keeps its numbers in a narrow terminal, and needs no more than ASCII."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable

import pytest
from rich.console import Console

_WIDTHS = (40, 60, 80)
_NUMBER = re.compile(r"\d+(?:[.,:]\d+)*")
_IN_ASCII = """
import json, sys
from lightning_commopt.commands.app import app
for arguments in json.loads(sys.argv[1]):
    try:
        app(arguments)
    except SystemExit as end:
        assert not end.code, (arguments, end.code)
"""
ASCII = [
    {"PYTHONIOENCODING": "ascii"},
    pytest.param({"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}, id="C locale"),
]
"""The environments of a terminal or a cron job without UTF-8, as parameters of a test."""


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


def printed_in_ascii(commands: list[list[str]], variables: dict[str, str]) -> str:
    """Returns what commands of ``commopt``, of which none may fail, print with further environment variables."""
    ran = subprocess.run(
        [sys.executable, "-c", _IN_ASCII, json.dumps(commands)],
        env=os.environ | variables | {"COLUMNS": "100"},
        capture_output=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr.decode()
    return ran.stdout.decode()
