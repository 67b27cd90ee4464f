"""Reads logs of ``NCCL_DEBUG=INFO``, of all ranks in any order, into facts; what it does not know it leaves out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from lightning_commopt.commands.nccl_log import grammar
from lightning_commopt.commands.nccl_log.communicators import group_members
from lightning_commopt.commands.nccl_log.events import LoggedWarning
from lightning_commopt.commands.nccl_log.facts import Fact, NcclLog
from lightning_commopt.commands.nccl_log.member_reader import read_member_line
from lightning_commopt.commands.nccl_log.process_reader import read_process_line
from lightning_commopt.commands.nccl_log.sources import Message, Sources, read_messages


def read_log(paths: Sequence[Path]) -> NcclLog:
    """Reads the logs of a job: one for each rank, or all ranks in one file, from the start or cut anywhere.

    Raises:
        OSError: a file cannot be read.
        ValueError: no line of any file is NCCL's.
    """
    reader = _Reader()
    for path in paths:
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a directory; name the files in it, such as {path}/*.log")
        before = reader.log.num_lines
        reader.read(read_messages(path))
        reader.log.files.append(str(path))
        if reader.log.num_lines == before:
            reader.log.silent_files.append(str(path))
    if not reader.log.num_lines:
        raise ValueError(_nothing_found(paths))
    return reader.finish()


def read_lines(messages: Iterable[Message]) -> NcclLog:
    """Reads messages, as `read_messages` gives them."""
    reader = _Reader()
    reader.read(messages)
    return reader.finish()


def _nothing_found(paths: Sequence[Path]) -> str:
    names = ", ".join(map(str, paths))
    if any(b"\0" in _beginning(path) for path in paths):
        return f"{names}: no line of NCCL, and not a text file"
    return f"{names}: no line of NCCL; set NCCL_DEBUG=INFO for the job, and NCCL_DEBUG_FILE=nccl.%h.%p.log for files"


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(4096)


class _Reader:
    def __init__(self) -> None:
        self.log = NcclLog()
        self._sources = Sources()

    def read(self, messages: Iterable[Message]) -> None:
        for message in messages:
            if message.level:
                self.log.num_lines += 1
                self._read_nccl(message)
            else:
                self._read_other(message)

    def finish(self) -> NcclLog:
        self.log.processes = self._sources.processes()
        self.log.communicators = group_members(self._sources.members())
        return self.log

    def _read_nccl(self, message: Message) -> None:
        source = self._sources.find(message)
        if message.level == "WARN":
            member = source.find_member(message)
            warning = LoggedWarning(
                text=message.text,
                host=source.process.host,
                rank=None if member is None else member.rank,
                line=message.line,
            )
            self.log.warnings.append(warning)
        elif " Bytes -> " in message.text:
            choice = grammar.parse_choice(message.text) if message.is_whole else None
            if choice is not None:
                self.log.choices[choice] += 1
                self.log.choice_lines.setdefault(choice, message.line)
        elif not read_process_line(source.process, message):
            read_member_line(source, message)

    def _read_other(self, message: Message) -> None:
        """Reads a line that has no head of NCCL's: its version alone, or PyTorch's watchdog."""
        timeout = grammar.parse_timeout(message.text, message.line)
        progress = grammar.parse_progress(message.text, message.line)
        version = grammar.VERSION.search(message.text) if message.is_whole else None
        error = grammar.parse_torch_error(message.text)
        if error is not None:
            self.log.warnings.append(LoggedWarning(text=error[1], host="", rank=error[0], line=message.line))
        if timeout is not None:
            self.log.timeouts.setdefault((timeout.rank, timeout.group, timeout.sequence, timeout.operation), timeout)
        if progress is not None:
            self.log.progress[progress.rank, progress.group] = progress
        if version is not None:
            self.log.versions.setdefault(version[1], Fact(version[1], message.line))
        self.log.num_lines += bool(timeout or progress or version or error)
