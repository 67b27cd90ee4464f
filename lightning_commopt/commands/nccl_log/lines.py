"""Lines of NCCL's log: who wrote which message, whatever a launcher, a terminal or a cut has made of the line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lightning_commopt.text.findings import Line

_MAX_BYTES = 1 << 16  # of a line: what is longer is no line of NCCL, whose own buffer has 1024 bytes
_MAX_CHARACTERS = 4000  # so that no number is too long for int()
_SHOWN_CHARACTERS = 400
_OF_INTEREST = (b"NCCL", b"atchdog", b"enqueued")
_MARK = re.compile(r"NCCL (INFO|WARN|TRACE)\b ?")
# The end of what stands before the mark. A head has all of host:pid:tid, or host:pid and then the device.
_HEAD = re.compile(
    r"(?:(?P<host>[^\s:<>()\[\]{}]+):(?P<pid>\d{1,10}):(?P<tid>\d{1,10}) +"
    r"|(?P<host_only>[^\s:/<>()\[\]{}]+):(?P<pid_only>\d{1,10}) +(?=\[))?"
    r"(?:\[(?P<device>-?\d{1,4})\] +)?"
    r"(?:[^\s:]+\.\w+:\d+ +(?:\([^()]*\) +)?)?$"
)
_CLOCK = re.compile(r"\d{1,2}$")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x00")


@dataclass(frozen=True, kw_only=True)
class Message:
    """A message in the log.

    Attributes:
        line: where it stands.
        host: name of the host; None where the head of the line is missing.
        pid: process, likewise.
        tid: thread, likewise.
        device: CUDA device of the thread, likewise.
        level: ``INFO``, ``WARN`` or ``TRACE``; "" for a line that NCCL did not write in this form.
        text: behind the head.
        is_whole: False for the end of a file that stops in the middle of a line.
    """

    line: Line
    host: str | None = None
    pid: int | None = None
    tid: int | None = None
    device: int | None = None
    level: str = ""
    text: str
    is_whole: bool = True


def read_messages(path: Path) -> Iterator[Message]:
    """Reads the lines of a log that may be NCCL's or of PyTorch's watchdog, and leaves out all others.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(_MAX_BYTES):
            number += 1
            if any(word in raw for word in _OF_INTEREST):
                text = raw.decode("utf-8", errors="replace")
                yield from split_line(text.rstrip("\r\n"), str(path), number, is_whole=raw.endswith(b"\n"))


def split_line(text: str, file: str, number: int, *, is_whole: bool = True) -> Iterator[Message]:
    r"""Splits a line into its messages: several, where ranks wrote into one line at the same time.

    >>> [found] = split_line("[1,0]<stdout>:node-3:21:27 [2] NCCL INFO Connected all trees", "log", 1)
    >>> found.host, found.pid, found.tid, found.device, found.level, found.text
    ('node-3', 21, 27, 2, 'INFO', 'Connected all trees')
    >>> [found] = split_line(" [0] misc/socket.cc:446 NCCL WARN wrong type 3 != 4", "log", 1)
    >>> found.host, found.device, found.level, found.text
    (None, 0, 'WARN', 'wrong type 3 != 4')
    """
    text = _ESCAPES.sub("", text)
    line = Line(file=file, number=number, text=text.strip()[:_SHOWN_CHARACTERS])
    marks = list(_MARK.finditer(text))
    if not marks:
        yield Message(line=line, text=text.strip()[:_MAX_CHARACTERS], is_whole=is_whole)
        return
    heads: list[re.Match[str]] = []
    begin = 0
    for mark in marks:
        found = _HEAD.search(text[: mark.start()], max(begin, mark.start() - 300))
        assert found is not None  # all of its parts may be missing
        heads.append(found)
        begin = mark.end()
    for index, (head, mark) in enumerate(zip(heads, marks, strict=True)):
        is_last = index == len(marks) - 1
        host, pid, tid, device = _parts(head)
        end = len(text) if is_last else heads[index + 1].start()
        yield Message(
            line=line,
            host=host,
            pid=pid,
            tid=tid,
            device=device,
            level=mark[1],
            text=text[mark.end() : end].strip()[:_MAX_CHARACTERS],
            is_whole=is_whole if is_last else False,
        )


def _parts(head: re.Match[str]) -> tuple[str | None, int | None, int | None, int | None]:
    """Returns host, pid, tid and device; a time of day in front of a dropped head is none of them."""
    host = head["host"] or head["host_only"]
    pid, tid, device = head["pid"] or head["pid_only"], head["tid"], head["device"]
    if host is not None and all(part is not None and _CLOCK.match(part) for part in (host, pid, tid)):
        host = pid = tid = None
    return host, _integer(pid), _integer(tid), _integer(device)


def _integer(digits: str | None) -> int | None:
    return None if digits is None else int(digits)
