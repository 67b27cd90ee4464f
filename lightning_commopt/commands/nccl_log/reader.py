"""Reads logs of ``NCCL_DEBUG=INFO``, of all ranks in any order, into facts; what it does not know it leaves out."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from gzip import BadGzipFile
from pathlib import Path

from lightning_commopt.commands.nccl_log import grammar
from lightning_commopt.commands.nccl_log.communicators import add_listed, add_unnamed, group_members
from lightning_commopt.commands.nccl_log.facts import Fact, LoggedWarning, NcclLog, RasReport
from lightning_commopt.commands.nccl_log.inspector import InspectorReader
from lightning_commopt.commands.nccl_log.lines import Message, read_messages
from lightning_commopt.commands.nccl_log.message_readers import MemberReader, read_process_line
from lightning_commopt.commands.nccl_log.sources import Sources
from lightning_commopt.commands.nccl_log.warnings import explain
from lightning_commopt.text.findings import Line

_LAST_ERROR = re.compile(r"Last (?:error:|NCCL warning\(error\):)")
_NO_ERROR = re.compile(r"Exception raised|frame #|Traceback|nccl(?:(?:UnhandledCuda|System|Internal|Remote)E|Invalid)")
_TEST_FAILURE = re.compile(r"Test (CUDA|NCCL) failure \S+ '(.+?)(?: / .*)?'|(watchdog got stuck for \d+ seconds)")
_LABEL = re.compile(r"\s*(?:\d{1,5}: +|\(\w+ pid=[^)]*\) +)")  # of srun and Ray, in front of a line
_RANK = re.compile(r"\[rank(\d+)\]:? ?|\[(?:default|trainer)(\d+)(?:\|\d+)?\]:? ?")
# Of the report of NCCL's RAS (``ncclras``): ranks that are missing, failed, or called other collectives than the rest.
_RAS_HEAD = re.compile(r"(?:#\d+-\d+ \(([0-9a-f]{8,16})\) )?(INCOMPLETE|DEAD|ERROR|MISMATCH|TIMEOUT)$")
_RAS_DETAIL = re.compile(
    r"(?:Missing|Communicator|Initialization error|Asynchronous error|Process \d+ on|The |Dead |\[could not find"
    r"|\d+ (?:ranks?|job process|process)|Rank \d+ )"
)
_RAS_PLACE = re.compile(r" -- GPUs? \S+ managed by process (\d+) on node (\S+)")


def read_log(paths: Sequence[Path], *, keeps_order: bool = False) -> NcclLog:
    """Reads the logs of a job: one for each rank, or all ranks in one file, from the start or cut anywhere.

    Raises:
        OSError: a file cannot be read.
        ValueError: no line of any file is NCCL's.
    """
    reader = LogReader(InspectorReader(keeps_order=keeps_order))
    for path in paths:
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a directory; name the files in it, such as {path}/*.log")
        before = reader.num_lines
        try:
            reader.read(read_messages(path))
        except (EOFError, zlib.error, BadGzipFile) as error:
            reader.log.damaged_files[str(path)] = str(error)
        reader.log.files.append(str(path))
        if reader.num_lines == before:
            reader.log.silent_files.append(str(path))
    if not reader.num_lines:
        raise ValueError(_nothing_found(paths, reader.log.damaged_files))
    return reader.finish()


def _nothing_found(paths: Sequence[Path], damaged: Mapping[str, str]) -> str:
    names = ", ".join(map(str, paths))
    if damaged:
        return f"{names}: no line of NCCL before {' and '.join(damaged)} is cut or damaged"
    if any(path.is_file() and b"\0" in _beginning(path) for path in paths):
        return f"{names}: no line of NCCL, and not a text file"
    return f"{names}: no line of NCCL; set NCCL_DEBUG=INFO for the job, and NCCL_DEBUG_FILE=nccl.%h.%p.log for files"


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(4096)


class LogReader:
    """Reads messages, as `read_messages` gives them, into a log."""

    def __init__(self, inspector: InspectorReader) -> None:
        self.log = NcclLog()
        self._sources = Sources()
        self._members = MemberReader()
        self._inspector = inspector
        self._last_error: int | None = None  # the rank whose "Last error:" goes on in the next line; -1 where unknown
        self._wrapped: Message | None = None  # a line of the watchdog that a terminal broke

    @property
    def num_lines(self) -> int:
        return self.log.num_lines + self._inspector.found.num_records

    def read(self, messages: Iterable[Message]) -> None:
        for message in messages:
            if message.level:
                self.log.num_lines += 1
                self._read_nccl(message)
            elif not self._inspector.read(message.text):
                self._read_other(message)

    def finish(self) -> NcclLog:
        """Groups what was read."""
        self.log.processes = self._sources.processes()
        self.log.communicators = group_members(self._sources.members())
        if self.log.listed:
            add_listed(self.log.communicators, self.log.processes, self.log.listed)
        add_unnamed(self.log.communicators, self.log.processes)
        self.log.inspected = self._inspector.found
        return self.log

    def _read_nccl(self, message: Message) -> None:
        source = self._sources.find(message)
        if message.level == "WARN":
            member = source.find_member(message)
            ranks = {m.rank for m in ([member] if member else source.members) if m.device == message.device}
            rank = ranks.pop() if len(ranks) == 1 else None
            if message.is_whole or explain(message.text, message.place) is not None:
                self._warn(message.text, message.line, rank=rank, host=source.process.host, place=message.place)
            read_process_line(source.process, message)
        elif " Bytes -> " in message.text:
            choice = grammar.parse_choice(message.text) if message.is_whole else None
            if choice is not None:
                self.log.choices[choice] += 1
                self.log.choice_lines.setdefault(choice, message.line)
        elif not read_process_line(source.process, message):
            self._members.read(source, message)

    def _warn(self, text: str, line: Line, *, rank: int | None = None, host: str = "", place: str = "") -> None:
        self.log.warnings.append(LoggedWarning(text=text, place=place, host=host, rank=rank, line=line))

    def _read_other(self, message: Message) -> None:
        """Reads a line that has no head of NCCL's: a version, PyTorch's errors and watchdog, nccl-tests' list."""
        found = [read_ras(message, self.log.ras), self._read_error(message), self._read_watchdog(message)]
        found.append(self._read_version(message))
        if listed := grammar.LISTED.search(message.text):
            host, pid, device, bus = listed[3], int(listed[2]), int(listed[4]), listed[5].lower()
            self.log.listed[int(listed[1])] = (host, pid, device, f"{bus}000")
        self.log.num_lines += any(found) or listed is not None

    def _read_error(self, message: Message) -> bool:
        """Reads an error that PyTorch raised; what stands behind "Last error:", also in the next line, says most."""
        text, rank = message.text, self._last_error
        if rank is not None and text:
            self._last_error = None
            text = _RANK.sub("", _LABEL.sub("", text, count=1))
        elif marked := _LAST_ERROR.search(text):
            start, text = text[: marked.start()], text[marked.end() :]
            found = _RANK.search(start)
            rank = -1 if found is None else int(found[1] or found[2])
            if not text.strip():
                self._last_error = rank
                return True
        elif error := grammar.parse_torch_error(text):
            self._warn(error[1], message.line, rank=error[0])
            return True
        elif found := _TEST_FAILURE.search(text):
            self._warn(found[3] or (f"Cuda failure '{found[2]}'" if found[1] == "CUDA" else found[2]), message.line)
            return True
        else:
            return False
        text = text.strip()
        if not _NO_ERROR.match(text):
            self._warn(text, message.line, rank=None if rank == -1 else rank, place="Last error")
        return True

    def _read_watchdog(self, message: Message) -> bool:
        """Reads a line of PyTorch's watchdog; terminals and mails break it in two."""
        text, line, first = message.text, message.line, self._wrapped
        self._wrapped = None
        if first is not None and "atchdog caught" not in text:
            joined = grammar.parse_timeout(first.text + text, first.line)
            text, line = (first.text + text, first.line) if joined else (text, line)
        timeout, progress = grammar.parse_timeout(text, line), grammar.parse_progress(text, line)
        if timeout is not None:
            key = (timeout.rank, timeout.group, timeout.sequence, timeout.operation, timeout.sizes)
            self.log.timeouts.setdefault(key, timeout)
        elif "atchdog caught" in text:
            self._wrapped = message
        if progress is not None:
            self.log.progress[progress.rank, progress.group] = progress
        return timeout is not None or progress is not None

    def _read_version(self, message: Message) -> bool:
        version = grammar.VERSION.search(message.text) if message.is_whole else None
        if version is not None:
            name = f"{version[1]} (RCCL)" if version[0][0] in "Rr" else version[1]
            self.log.versions.setdefault(name, Fact(name, message.line))
        elif package := grammar.PACKAGE.search(message.text):
            self.log.packages.setdefault(package[1], Fact(package[1], message.line))
        return version is not None


def read_ras(message: Message, reports: list[RasReport]) -> bool:
    """Adds a line to the reports; returns whether it is one of RAS."""
    text = message.text
    if found := _RAS_HEAD.match(text):
        reports.append(RasReport(comm_id=found[1] or "", status=found[2], line=message.line))
        return True
    if reports and _RAS_DETAIL.match(text) and message.number == reports[-1].line.number + len(reports[-1].details) + 1:
        reports[-1].details.append(_RAS_PLACE.sub(r" (process \1 on \2)", text))
        return True
    return False
