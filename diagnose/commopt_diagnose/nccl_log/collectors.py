"""Removes what collectors of logs put around a line."""

from __future__ import annotations

import json
import re

# A line as a string of JSON or CSV, as Docker and clouds keep logs, and what shows that a string is such a line.
_STRING = re.compile(r'(?:^|[{\[,:])\s*("(?:[^"\\]|\\.)*")(?=\s*(?:[,}\]]|$))')
_LOGGED = re.compile(r"NCCL (?:INFO|WARN|ERROR|TRACE|version) |atchdog caught|\[rank\d+\]:")
# Where Docker, journald and clouds keep a line that has no such mark, as the last error of PyTorch below its head.
_KEPT = re.compile(
    r'\s*(?:\{(?:.*[,{\s])?)?"(?:log|@?message|msg|MESSAGE|textPayload|line|body|_raw)"\s*:\s*("(?:[^"\\]|\\.)*")'
)
_MAX_COLLECTORS = 3  # collectors may pass a line on to each other, each in a string of its own


def unquoted(text: str) -> str:
    r"""Returns what a program wrote, without what a collector of logs has put around it.

    >>> unquoted(r'{"log":"a:1:2 [0] NCCL INFO Using eth0:10.0.0.1\u003c0\u003e\n","stream":"stdout"}')
    'a:1:2 [0] NCCL INFO Using eth0:10.0.0.1<0>'
    """
    for _ in range(_MAX_COLLECTORS):
        strings = _STRING.findall(text) if '"' in text and _LOGGED.search(text) else []
        string = next(filter(_LOGGED.search, strings), None)
        if string is None and text.lstrip().startswith(("{", '"')) and (kept := _KEPT.match(text)):
            string = kept[1]
        if string is None:
            break
        text = _text_of(string)
    return text


def _text_of(string: str) -> str:
    """Returns what a string in quotes holds."""
    try:
        return str(json.loads(string)).rstrip()
    except ValueError:  # CSV has no escapes
        return string[1:-1]
