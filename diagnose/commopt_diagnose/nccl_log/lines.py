"""Splits the lines of a log into messages, and finds who wrote each of them."""

from __future__ import annotations

import gzip
import io
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from commopt_diagnose.nccl_log.collectors import unquoted
from commopt_diagnose.nccl_log.skipping import INFO, Block, Repeats
from lightning_commopt.text.findings import Line

MAX_CONTINUED = 3
"""How many lines an error may be spread over behind its first."""

_MAX_BYTES = 1 << 16  # longer lines are not NCCL's, whose own buffer has 1024 bytes
_BLOCK_BYTES = 1 << 18  # so many bytes and their lines fit into a processor's cache
_MAX_CHARACTERS = 4000  # Python's int() refuses numbers of more than 4300 digits
_SHOWN_CHARACTERS = 400
_LARGE_BYTES = 16 << 20  # a file of this size shows its progress
_MAX_RAS_LINES = 600  # lines that are read after the head of a RAS report
_MAX_RAS_JSON = 1 << 20  # the same in JSON, which has 25 lines for each rank
# Lines whose next lines belong to them: an error of NCCL, or a line of the watchdog that a terminal has wrapped.
_CONTINUED = re.compile(rb"Last error:|atchdog(?: caught|\s*$)|nccl\w+(?:Error|Usage|Argument): ")
# Ends of the first line of a RAS report, in front of which a launcher may have written; and the same of its JSON.
_RAS_ENDS = tuple(
    status + end for status in (b"INCOMPLETE", b"DEAD", b"ERROR", b"MISMATCH", b"TIMEOUT") for end in (b"\n", b"\r\n")
)
_RAS_JSON = b'"communicators_count'
# Before 2.3 NCCL does not write its name before the level, and those of PPU and Baidu warn as "NCCL ERROR", which
# programs write, too. Then the head must have a host, or a device and a place.
_MARK = re.compile(r"NCCL (INFO|WARN|TRACE)\b ?|(?<=[\d\]] )(INFO|WARN|NCCL ERROR) (?=\S)")
_HEAD = re.compile(
    r"(?:(?P<host><[\w.-]+>|[^\s:<>()\[\]{}`*'\"|=,;]+):(?P<pid>\d{1,10}):(?P<tid>\d{1,10}) +"
    r"|(?P<host_only>(?!\d+:)[^\s:/<>()\[\]{}|=,;]+):(?P<pid_only>\d{1,10}) +(?=\[)"
    r"|(?<![\w:])\d*:?(?P<tid_only>\d{5,10}) +(?=\[))?"  # the rest of a head of which the beginning is torn off
    # TRACE has a time, NCCLX of Meta the thread's name, and plugins a function with its arguments as the place.
    r"(?:\[ ?(?P<device>-?\d{1,10}) ?\](?:\[\w+\])? +)?(?:\d+\.\d+ +)?"
    r"(?P<place>(?:[^\s:]+\.\w+|\w+|\w[\w:<>*&~ ]*\([^()]*\)(?: const)?):\d+ +(?:\([^()]*\) +)?)?$"
)
_PLAIN_HEAD = re.compile(rb"([A-Za-z][\w.-]*):(\d{1,10}):(\d{1,10}) \[(\d{1,3})\]")
# Lines of NCCL whose head was left out, by a filter or an editor.
_BARE = re.compile(
    r"\s*((?:Channel|Ring) \d+(?:/\d+)? : \d+(?:\[\w+\])? -> \d+.* via (?:P2P|SHM|NET|direct).*"
    r"|NET/(?:IB|Socket|Plugin) ?: (?:No |Using |Could not find|dlerror|Plugin load|GPU Direct).*"
    r"|Using network \S+.{0,40})$"
)
_FRAME = " \t\r│|"  # what a terminal's window may draw around a line
_LONE_RETURN = re.compile(rb"\r(?!\r*\n)")
_CLOCK = re.compile(r"\d{1,2}$")
# Some collectors of logs put no space between the time and the host.
_JOINED_TIME = re.compile(
    r"(?:(?<=\d[T-])|(?<![\w:.-]))\d{1,2}:\d{2}:\d{2}(?:[.,]\d{1,9})?(?:Z|[+-]\d{2}:?\d{2})?-?(?=[A-Za-z])"
)
# Colors of a terminal, also as syslog and editors write them.
_ESCAPES = re.compile(r"(?:\x1b|#033|\\(?:x1b|033|u001b)|\^\[)\[[0-9;?]*[A-Za-z]|\[\d{1,2}m(?= )|\x00")
_LINK = re.compile(r"\[([^\[\]\s]+)\]\(https?://[^()\s]*\)")  # what chats and mails make of the name of a file
# What Ray writes behind a line, in place of lines of other processes that differ from it in numbers only.
_REPEATED = re.compile(r"\s*(?:ESC)?\s*\[repeated (\d{1,6})x across cluster\].*$")


@dataclass(slots=True, kw_only=True)
class Message:
    """A message in the log.

    Parts of a line's head are None if they are missing.
    """

    file: str
    number: int
    whole_line: str
    host: str | None = None
    pid: int | None = None
    tid: int | None = None
    device: int | None = None
    place: str = ""  # file and line in NCCL's source, which stand in front of a warning
    level: str = ""  # INFO, WARN or TRACE; "" for a line that NCCL did not write in this form
    text: str  # the line behind its head
    is_whole: bool = True  # False for the end of a file that stops in the middle of a line
    is_alone: bool = True  # False if another message follows in the same line
    num_left_out: int = 0  # lines that Ray took for repeats of this one, and left out

    @property
    def thread(self) -> tuple[int | None, int | None]:
        return self.tid, self.device

    @property
    def line(self) -> Line:
        return Line(file=self.file, number=self.number, text=self.whole_line.strip()[:_SHOWN_CHARACTERS])


def read_messages(path: Path, repeats: Repeats | None = None) -> Iterator[Message]:
    """Reads the lines of a log that may be NCCL's or of PyTorch's watchdog, and leaves out all others.

    A file may be compressed by gzip and in UTF-16; ``-`` is the standard input. A large file shows its progress.

    Raises:
        OSError: the file cannot be read.
        EOFError, zlib.error, gzip.BadGzipFile: it is compressed, and cut or damaged here.
    """
    repeats = repeats or Repeats()
    with ExitStack() as stack:
        name = "standard input" if str(path) == "-" else str(path)
        wanted = 0  # number of further lines that belong to the last one
        for number, raw, block in _raw_lines(_open(path, stack), stack):
            place = raw.find(INFO)
            wanted -= 1
            if place >= 0:
                if repeats.skips(raw, place):
                    continue
                if b"rror:" in raw or b"atchdog" in raw:
                    wanted = max(wanted, _num_wanted(raw))
            elif block.is_of_interest(raw) or raw.endswith(_RAS_ENDS) or _RAS_JSON in raw:
                wanted = max(wanted, _num_wanted(raw))
            elif wanted < 0:
                continue
            text = raw.decode("utf-8", errors="replace").rstrip("\r\n")
            is_plain = place > 0 and raw.find(b"NCCL ", place + len(INFO)) < 0 and b"](http" not in raw
            head = _plain_head(raw[:place]) if is_plain else None
            is_whole = raw.endswith(b"\n")
            if head is None:
                yield from split_line(text, name, number, is_whole=is_whole)
                continue
            rest = text[place + len(INFO) :][:_MAX_CHARACTERS].strip()
            message = Message(file=name, number=number, whole_line=text, level="INFO", text=rest, is_whole=is_whole)
            message.host, message.pid, message.tid, message.device = head
            yield message


@lru_cache(maxsize=1 << 16)  # each thread of a job has its own head
def _plain_head(head: bytes) -> tuple[str, int, int, int] | None:
    """Returns host, process, thread and device; None for a head of another form than that of most lines."""
    match = _PLAIN_HEAD.fullmatch(head)
    return None if match is None else (match[1].decode(), int(match[2]), int(match[3]), int(match[4]))


def _num_wanted(raw: bytes) -> int:
    """Returns how many lines behind this one belong to it."""
    if _RAS_JSON in raw:
        return _MAX_RAS_JSON
    return _MAX_RAS_LINES if raw.endswith(_RAS_ENDS) else MAX_CONTINUED if _CONTINUED.search(raw) else 0


def _open(path: Path, stack: ExitStack) -> io.BufferedReader[Any] | gzip.GzipFile:
    if str(path) == "-":
        stream = io.BufferedReader(cast(io.RawIOBase, sys.stdin.buffer), 1 << 20)
        stack.callback(stream.detach)  # standard input stays open
    else:
        raw: io.RawIOBase = stack.enter_context(path.open("rb", buffering=0))
        size = path.stat().st_size
        if size > _LARGE_BYTES and sys.stderr.isatty():
            from rich.markup import escape
            from rich.progress import wrap_file

            from lightning_commopt.text.terminal import TextConsole

            file = cast(BinaryIO, raw)
            console = TextConsole(stderr=True)
            shown = wrap_file(file, size, description=escape(path.name), transient=True, console=console)
            raw = cast(io.RawIOBase, stack.enter_context(shown))
        stream = stack.enter_context(io.BufferedReader(raw, 1 << 20))
    if stream.peek(2)[:2] == b"\x1f\x8b":
        # Another buffer around GzipFile would lose what it has read before the place where the file is damaged.
        return stack.enter_context(gzip.GzipFile(fileobj=stream))
    return stream


def _raw_lines(stream: io.BufferedReader[Any] | gzip.GzipFile, stack: ExitStack) -> Iterator[tuple[int, bytes, Block]]:
    """Reads the lines of a file, with their numbers and the block that each belongs to."""
    begin = stream.peek(4)[:4]
    read: Callable[[], bytes] = partial(stream.read1, _BLOCK_BYTES)
    if begin[:2] in (b"\xff\xfe", b"\xfe\xff") or (len(begin) == 4 and begin[1] == begin[3] == 0 < begin[0]):
        encoding = "utf-16" if begin[0] > 0x7F else "utf-16-le"
        text = stack.enter_context(io.TextIOWrapper(cast(BinaryIO, stream), encoding, errors="replace", newline="\n"))
        read = lambda: text.read(_BLOCK_BYTES).encode()  # noqa: E731
    number, rest = 1, b""
    while content := read():
        content = rest + content
        end = content.rfind(b"\n") + 1
        rest = content[end:]
        if len(rest) > _MAX_BYTES:
            end, rest = len(content), b""  # longer than a line of NCCL can be
        block = Block(content[:end])
        has_lone = _LONE_RETURN.search(content, 0, end) is not None
        for raw in io.BytesIO(content[:end]):
            for part in _split_returns(raw) if has_lone else (raw,):
                yield number, part, block
            number += 1
    for part in _split_returns(rest):
        yield number, part, Block(part)


def _split_returns(raw: bytes) -> list[bytes]:
    """Splits a line at carriage returns, which progress bars write, or an editor in place of all ends of lines."""
    *parts, last = _LONE_RETURN.split(raw)
    return [part + b"\n" for part in parts if part] + ([last] if last else [])


def split_line(text: str, file: str, number: int, *, is_whole: bool = True) -> Iterator[Message]:
    r"""Splits a line into its messages: several, if ranks wrote into one line at the same time.

    >>> [found] = split_line("[1,0]<stdout>:node-3:21:27 [2] NCCL INFO Connected all trees", "log", 1)
    >>> found.host, found.pid, found.tid, found.device, found.level, found.text
    ('node-3', 21, 27, 2, 'INFO', 'Connected all trees')
    >>> [found] = split_line(" [0] misc/socket.cc:446 NCCL WARN wrong type 3 != 4", "log", 1)
    >>> found.host, found.device, found.place, found.level, found.text
    (None, 0, 'misc/socket.cc:446', 'WARN', 'wrong type 3 != 4')
    """
    for part in unquoted(text).split("\n"):
        whole = _ESCAPES.sub("", part)
        whole = _LINK.sub(r"\1", whole) if "](http" in whole else whole
        text, repeated = whole, _REPEATED.search(whole)
        if repeated is not None:
            text = whole[: repeated.start()]
        for message in _split(text, file, number, is_whole=is_whole):
            if repeated is not None:
                message.whole_line, message.num_left_out = whole, int(repeated[1]) - 1  # the line shown is one of them
            yield message


def _split(text: str, file: str, number: int, *, is_whole: bool) -> Iterator[Message]:
    starts = []
    for mark in _MARK.finditer(text):
        head = _HEAD.search(text[: mark.start()], max(0, mark.start() - 300))
        assert head is not None  # every part of the pattern is optional, so it always matches
        begin = head.start()
        if begin and text[begin - 1] in ":," and text[begin].isdigit():
            head = _HEAD.search(_JOINED_TIME.sub(" ", text[: mark.start()])[-300:]) or head
        host, numbers = _writer(head)
        if mark[1] or host or (head["device"] and head["place"]):
            starts.append((mark, begin, head, host, numbers))
    if not starts and (bare := _BARE.match(text)):
        yield Message(file=file, number=number, whole_line=text, level="INFO", text=bare[1].strip(), is_whole=is_whole)
        return
    if not starts:
        rest = text.strip() if text.startswith('{"') else text.strip()[:_MAX_CHARACTERS]  # JSON has its own limits
        yield Message(file=file, number=number, whole_line=text, text=rest, is_whole=is_whole)
        return
    before = text[: starts[0][1]]
    if _is_of_interest(before):
        # Another program has written into the line, or an editor has left out the ends of lines.
        yield Message(file=file, number=number, whole_line=text, text=before.strip()[:_MAX_CHARACTERS])
    for (mark, _, head, host, numbers), following in zip(starts, [*starts[1:], None], strict=True):
        end = len(text) if following is None else max(mark.end(), following[1])
        rest = text[mark.end() : end].strip(_FRAME)[:_MAX_CHARACTERS]
        message = Message(file=file, number=number, whole_line=text, text=rest)
        message.level = mark[1] or mark[2].replace("NCCL ERROR", "WARN")
        message.host, (message.pid, message.tid, message.device) = host, numbers
        message.place, message.is_whole = (head["place"] or "").strip(), is_whole and following is None
        message.is_alone = following is None
        yield message


@lru_cache(maxsize=1 << 10)  # a launcher puts the same few texts in front of all lines
def _is_of_interest(text: str) -> bool:
    raw = text.encode(errors="replace")
    return Block(raw).is_of_interest(raw)


def _writer(head: re.Match[str]) -> tuple[str | None, list[int | None]]:
    """Returns the host, and pid, tid and device. A time of day in front of a missing head has the same form."""
    host = head["host"] or head["host_only"]
    pid, tid, device = head["pid"] or head["pid_only"], head["tid"] or head["tid_only"], head["device"]
    if host is not None and all(part is not None and _CLOCK.match(part) for part in (host, pid, tid)):
        host = pid = tid = None
    if device is not None and abs(int(device)) > 1023:
        device = None  # NCCL prints such a number for a thread that has no device
    return host, [None if part is None else int(part) for part in (pid, tid, device)]
