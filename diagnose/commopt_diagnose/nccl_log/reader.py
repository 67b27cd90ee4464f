"""Reads logs of ``NCCL_DEBUG=INFO``, from all ranks in any order, into facts; unknown lines are skipped.

Also reads what PyTorch's watchdog, NCCL's RAS and nccl-tests write into such logs.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Sequence
from gzip import BadGzipFile
from pathlib import Path

from commopt_diagnose.nccl_log.communicators import NcclLog, add_listed, add_unnamed, group_members
from commopt_diagnose.nccl_log.facts import Choice, Fact, LoggedWarning, Process, Progress, RasReport, Timeout
from commopt_diagnose.nccl_log.inspector import Inspected
from commopt_diagnose.nccl_log.lines import Message, read_messages
from commopt_diagnose.nccl_log.messages import find_version, read_process_line, read_rank_line
from commopt_diagnose.nccl_log.warnings import explain
from lightning_commopt.text.findings import Line, read_texts

_TEXTS = read_texts(Path(__file__).with_name("patterns.txt"))["other"]
_PATTERNS = {name: re.compile(text) for name, text in _TEXTS.items()}
_ADDRESS = re.compile(r"\bcomm (0x[0-9a-fA-F]+) rank ")
_ALGORITHMS = ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")
_PROTOCOLS = ("LL", "LL128", "SIMPLE")


def read_log(paths: Sequence[Path], *, keeps_order: bool = False) -> NcclLog:
    """Reads the logs of a job: one for each rank, or all ranks in one file, from the start or cut anywhere.

    Raises:
        OSError: a file cannot be read.
        ValueError: no line of any file is NCCL's.
    """
    reader = LogReader(keeps_order=keeps_order)
    damaged = reader.log.damaged_files
    for path in paths:
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a directory; name the files in it, such as {path}/*.log")
        before = reader.num_lines
        try:
            reader.read(read_messages(path))
        except (EOFError, zlib.error, BadGzipFile) as error:
            damaged[str(path)] = str(error)
        reader.log.files.append(str(path))
        if reader.num_lines == before:
            reader.log.silent_files.append(str(path))
    if reader.num_lines:
        return reader.finish()
    names = ", ".join(map(str, paths))
    if damaged:
        raise ValueError(f"{names}: no line of NCCL before {' and '.join(damaged)} is cut or damaged")
    if any(path.is_file() and _is_binary(path) for path in paths):
        raise ValueError(f"{names}: no line of NCCL, and not a text file")
    advice = "set NCCL_DEBUG=INFO for the job, and NCCL_DEBUG_FILE=nccl.%h.%p.log for files"
    raise ValueError(f"{names}: no line of NCCL; {advice}")


def _is_binary(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" in file.read(4096)


class LogReader:
    """Reads messages, as `read_messages` gives them, into a log."""

    def __init__(self, *, keeps_order: bool = False) -> None:
        self.log = NcclLog(inspected=Inspected(keeps_order=keeps_order))
        self._processes: dict[tuple[object, ...], Process] = {}
        self._last_in_file: dict[tuple[str, int | None], Process] = {}
        self._last_error: int | None = None  # the rank whose "Last error:" continues in the next line; -1 if unknown
        self._wrapped: Message | None = None  # a line of the watchdog that a terminal broke

    @property
    def num_lines(self) -> int:
        return self.log.num_lines + self.log.inspected.num_records

    def read(self, messages: Iterable[Message]) -> None:
        for message in messages:
            if message.level:
                self.log.num_lines += 1
                self._read_nccl(message)
            elif not self.log.inspected.read(message.text):
                self._read_other(message)

    def finish(self) -> NcclLog:
        """Groups what was read; processes that wrote nothing about themselves or a rank are left out.

        A process without an address, as in a cut log, gets the address of its host if that has only one.
        """
        known: dict[str, set[str]] = {}
        for p in self._processes.values():
            if p.members or any((p.settings, p.bootstrap, p.network, p.notes, p.gdr, p.failed_at)):
                self.log.processes.append(p)
                p.address = "" if p.bootstrap is None else p.bootstrap.value.partition(":")[2]
                known.setdefault(p.host, set()).update({p.address} - {""})
        for p in self.log.processes:
            if not p.address and len(known[p.host]) == 1:
                (p.address,) = known[p.host]
        self.log.communicators = group_members([member for p in self.log.processes for member in p.members])
        add_listed(self.log)
        add_unnamed(self.log)
        return self.log

    def _process_of(self, message: Message) -> Process:
        """Returns the process of a line; if the head is missing, the owner of its communicator or the last writer."""
        place = (message.file, message.device)
        key: tuple[object, ...] = (message.host, message.pid)
        host = message.host or ""
        if message.host is None:
            named = _ADDRESS.search(message.text) if "comm 0x" in message.text else None
            owners = [p for p in self._processes.values() if named[1] in p.by_address] if named else []
            last = owners[0] if len(owners) == 1 else self._last_in_file.get(place)
            # The first line of another process begins like this.
            begins = message.text.startswith("Bootstrap")
            if last and not (begins and not last.host and any(member.finished for member in last.members)):
                return last
            key = (*place, len(self._processes))
        elif key not in self._processes:
            host = self._known_host(host, message.pid)
            key = (host, message.pid)
        if key not in self._processes:
            self._processes[key] = Process(host=host, pid=message.pid)
        self._last_in_file[place] = self._processes[key]
        return self._processes[key]

    def _known_host(self, host: str, pid: int | None) -> str:
        """Returns the host without the rest of another rank's line in front of it, as in ``12node-a``."""
        for other in self._processes.values():
            if host.endswith(other.host) and other.host and not other.host[0].isdecimal():
                before = host.removesuffix(other.host)
                if before.isdecimal() or (before and other.pid == pid):
                    return other.host
        return host

    def _read_nccl(self, message: Message) -> None:
        process = self._process_of(message)
        if message.level == "WARN":
            member = process.find_member(message)
            ranks = {m.rank for m in ([member] if member else process.members) if m.device == message.device}
            rank = ranks.pop() if len(ranks) == 1 else None
            if message.is_whole or explain(message.text, message.place) is not None:
                self._warn(message.text, message.line, rank=rank, host=process.host, place=message.place)
            read_process_line(process, message)
        elif " Bytes -> " in message.text:
            choice = _parse_choice(message.text) if message.is_whole else None
            if choice is not None:
                self.log.choices[choice] += 1
                self.log.choice_lines.setdefault(choice, message.line)
        elif not read_process_line(process, message):
            read_rank_line(process, message)

    def _warn(self, text: str, line: Line, *, rank: int | None = None, host: str = "", place: str = "") -> None:
        self.log.warnings.append(LoggedWarning(text=text, place=place, host=host, rank=rank, line=line))

    def _read_other(self, message: Message) -> None:
        """Reads a line without NCCL's head: a version, PyTorch's errors and watchdog, or nccl-tests' list."""
        readers = (self._read_ras, self._read_error, self._read_watchdog, self._read_version, self._read_listed)
        are_known = [read(message) for read in readers]  # a line may be several of them
        self.log.num_lines += any(are_known)

    def _read_ras(self, message: Message) -> bool:
        text, reports = message.text, self.log.ras
        if match := _PATTERNS["ras_head"].match(text):
            reports.append(RasReport(match[1] or "", match[2], message.line, []))
            return True
        last = reports[-1] if reports else None
        if last and _PATTERNS["ras_detail"].match(text) and message.number == last.line.number + len(last.details) + 1:
            last.details.append(_PATTERNS["ras_place"].sub(r" (process \1 on \2)", text))
            return True
        return False

    def _read_error(self, message: Message) -> bool:
        """Reads an error that PyTorch raised. What follows "Last error:", perhaps in the next line, explains most."""
        text, rank = message.text, self._last_error
        if rank is not None and text:
            self._last_error = None
            text = _PATTERNS["rank"].sub("", _PATTERNS["label"].sub("", text, count=1))
        elif marked := _PATTERNS["last_error"].search(text):
            start, text = text[: marked.start()], text[marked.end() :]
            match = _PATTERNS["rank"].search(start)
            rank = -1 if match is None else int(match[1] or match[2])
            if not text.strip():
                self._last_error = rank
                return True
        elif error := _PATTERNS["torch_error"].search(text):
            who = _group_and_rank(text[: error.start()])
            self._warn(error[1], message.line, rank=None if who is None else who[1])
            return True
        elif match := _PATTERNS["test_failure"].search(text):
            self._warn(match[3] or (f"Cuda failure '{match[2]}'" if match[1] == "CUDA" else match[2]), message.line)
            return True
        else:
            return False
        text = text.strip()
        if not _PATTERNS["no_error"].match(text):
            self._warn(text, message.line, rank=None if rank == -1 else rank, place="Last error")
        return True

    def _read_watchdog(self, message: Message) -> bool:
        """Reads a line of PyTorch's watchdog; terminals and mails break it in two."""
        text, line, first = message.text, message.line, self._wrapped
        self._wrapped = None
        if first is not None and "atchdog caught" not in text and _parse_timeout(first.text + text, first.line):
            text, line = first.text + text, first.line
        timeout, progress = _parse_timeout(text, line), _parse_progress(text, line)
        if timeout is not None:
            key = (timeout.rank, timeout.group, timeout.sequence, timeout.operation, timeout.sizes)
            self.log.timeouts.setdefault(key, timeout)
        elif "atchdog caught" in text:
            self._wrapped = message
        if progress is not None:
            self.log.progress[progress.rank, progress.group] = progress
        return timeout is not None or progress is not None

    def _read_version(self, message: Message) -> bool:
        version = find_version(message.text) if message.is_whole else None
        if version is not None:
            self.log.versions.setdefault(version, Fact(version, message.line))
        elif package := _PATTERNS["package"].search(message.text):
            self.log.packages.setdefault(package[1], Fact(package[1], message.line))
        return version is not None

    def _read_listed(self, message: Message) -> bool:
        if match := _PATTERNS["listed"].search(message.text):
            host, pid, device, bus = match[3], int(match[2]), int(match[4]), match[5].lower()
            self.log.listed[int(match[1])] = (host, pid, device, f"{bus}000")
        return match is not None


def _parse_choice(text: str) -> Choice | None:
    """Parses a line of the tuner; algorithms and protocols of old versions are numbers."""
    if match := _PATTERNS["kernel_choice"].match(text):
        channels = f"{match[5]} channels" if match[5] else ""
        return Choice(match[1], int(match[3]), f"{match[2]} {match[4]}", "", channels)
    if (match := _PATTERNS["choice"].match(text)) is None:
        return None
    algorithm, protocol = (
        names[int(word)] if word.isdecimal() and len(word) < 3 and int(word) < len(names) else word.upper()
        for word, names in ((match[3], _ALGORITHMS), (match[4], _PROTOCOLS))
    )
    return Choice(match[1] or "", int(match[2]), algorithm, protocol, f"{match[5]}..{match[6]}" if match[5] else "")


def _parse_timeout(text: str, line: Line) -> Timeout | None:
    """Parses a line of PyTorch's watchdog that gives a collective up."""
    match = _PATTERNS["timeout"].search(text)
    who = _group_and_rank(text[: match.start()]) if match else None
    if match is None or who is None:
        return None
    named = dict(re.findall(r"(\w+(?:\(ms\))?) ?= ?(\[[^\]]*\]|[^,\s)]+)", match[1]))
    sequence = named.get("SeqNum", "")
    return Timeout(
        rank=who[1],
        group=who[0],
        sequence=int(sequence) if sequence.isdecimal() else None,
        operation=named.get("OpType", "a collective"),
        sizes=", ".join(f"{key}={named[key]}" for key in ("TensorShape", "NumelIn", "NumelOut") if key in named),
        limit_s=int(named["Timeout(ms)"]) / 1000 if named.get("Timeout(ms)", "").isdecimal() else None,
        waited_s=None if match[2] is None else int(match[2]) / 1000,
        line=line,
    )


def _parse_progress(text: str, line: Line) -> Progress | None:
    """Parses a line of PyTorch's watchdog about how far a rank is; what cannot be true is left out."""
    match = _PATTERNS["progress"].search(text)
    who = _group_and_rank(text[: match.start()]) if match else None
    if match is None or who is None or int(match[3]) > int(match[2]):
        return None
    work = int(match[1]) if match[1] else None
    return Progress(rank=who[1], group=who[0], work=work, enqueued=int(match[2]), line=line)


def _group_and_rank(text: str) -> tuple[str, int] | None:
    """Returns the rank that stands last in front of a message, and its process group, if it is named."""
    matches = _PATTERNS["group_and_rank"].finditer(text)
    named = [(match[1] or "", int(match[2] or match[3])) for match in matches]
    groups = [group for group, rank in named if group and rank == named[-1][1]]
    return ((groups or [""])[0], named[-1][1]) if named else None
