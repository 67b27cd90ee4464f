"""Reads logs of ``NCCL_DEBUG=INFO``, from all ranks in any order, into facts; unknown lines are skipped.

Also reads what PyTorch's watchdog, NCCL's RAS and nccl-tests write into such logs.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from gzip import BadGzipFile
from pathlib import Path

from commopt_diagnose.nccl_log.communicators import NcclLog
from commopt_diagnose.nccl_log.complaints import RasReport
from commopt_diagnose.nccl_log.facts import Choice, Fact, Process, TornLines
from commopt_diagnose.nccl_log.grouping import add_listed, add_unnamed, group_members
from commopt_diagnose.nccl_log.inspector import Inspected
from commopt_diagnose.nccl_log.lines import Message, read_messages
from commopt_diagnose.nccl_log.messages import (
    find_version,
    is_passed_on,
    is_retried,
    read_process_line,
    read_rank_line,
)
from commopt_diagnose.nccl_log.ras_json import RasJson
from commopt_diagnose.nccl_log.skipping import Repeats
from commopt_diagnose.nccl_log.torch_lines import PATTERNS, TorchLines
from commopt_diagnose.nccl_log.warn_texts import explain
from commopt_diagnose.nccl_log.writers import Writers
from lightning_commopt.text.findings import Line

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
            reader.read(path)
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
    """Reads files into a log."""

    def __init__(self, *, keeps_order: bool = False) -> None:
        self.log = NcclLog(inspected=Inspected(keeps_order=keeps_order))
        self._writers = Writers(self.log.torn)
        self._torch = TorchLines(self.log)
        self._ras_json = RasJson(self.log.ras)
        self._ras_dead: RasReport | None = None  # peers that RAS calls dead, as ``ncclras -m`` watches them
        # A detail of the last report, if a launcher has written something, such as a time, in front of its lines.
        self._ras_detail: re.Pattern[str] | None = None
        # A thread is here as long as its last line says that it tries a connection again.
        self._retries: dict[tuple[Process, int | None], Message] = {}
        # Those that nccl-tests calls rank 0, in this file since the end of a run.
        self._test_processes: dict[tuple[str, int], Line] = {}
        self._first_ranks: dict[str, dict[tuple[str, int], Line]] = {}  # the same, all of each file

    @property
    def num_lines(self) -> int:
        return self.log.num_lines + self.log.inspected.num_records

    def read(self, path: Path) -> None:
        """Reads a file; the part of a damaged one in front of the damage, then raises as `read_messages` does."""
        repeats, self._test_processes = Repeats(), {}
        try:
            for message in read_messages(path, repeats):
                if message.num_left_out:
                    left_out = self.log.left_out.setdefault(message.file, TornLines(first=message.line))
                    left_out.count += message.num_left_out
                if message.level:
                    self.log.num_lines += 1
                    self._read_nccl(message)
                elif not self.log.inspected.read(message.text):
                    self._read_other(message)
        finally:
            self._add_repeats(repeats)

    def _add_repeats(self, repeats: Repeats) -> None:
        """Adds lines that were only counted."""
        self.log.num_lines += repeats.num_skipped
        self.log.num_choices_left_out += repeats.num_left_out
        for text, times in repeats.choices.items():
            choice = _parse_choice(text.decode("utf-8", errors="replace").strip()) if times else None
            if choice is not None:
                self.log.choices[choice] += times

    def finish(self) -> NcclLog:
        """Groups what was read; processes that wrote nothing about themselves or a rank are left out.

        A process without an address, as in a cut log, gets the address of its host if that has only one.
        """
        for (process, _), message in self._retries.items():
            self.log.warn(message.text, message.line, host=process.host)
        self._torch.add_result()
        self._ras_json.add_reports()
        ones = [processes for processes in self._first_ranks.values() if len(processes) == 1]
        if self.log.listed.keys() == {0} and len(ones) > len(self.log.lone_tests):
            # A test of one rank measures nothing, so a file for each is what a launcher makes of them.
            self.log.lone_tests = {process_key: line for processes in ones for process_key, line in processes.items()}
        known: dict[str, set[str]] = {}
        for p in self._writers.processes:
            if self._writers.is_fragment(p):
                continue
            facts = (p.settings, p.bootstrap, p.version, p.network, p.notes, p.nics, p.gdr, p.failed_at, p.interfaces)
            if p.members or any(facts):
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

    def _read_nccl(self, message: Message) -> None:
        process = self._writers.process_of(message)
        if not message.is_alone:
            self._writers.note_torn(message)
        self._note_retry(process, message)
        if message.level == "WARN" and not is_passed_on(message.text):  # NCCLX warns of each error that it passes on
            member = process.find_member(message)
            members = [member] if member else process.members
            # Threads that have not chosen a GPU write the number 0.
            ranks = {m.rank for m in members if m.device == message.device} or {m.rank for m in members}
            rank = ranks.pop() if len(ranks) == 1 else None
            if message.is_whole or explain(message.text, message.place) is not None:
                self.log.warn(message.text, message.line, rank=rank, host=process.host, place=message.place)
            read_process_line(process, message)
        elif " Bytes -> " in message.text:
            choice = _parse_choice(message.text) if message.is_whole else None
            if choice is not None:
                self.log.choices[choice] += 1
                self.log.choice_lines.setdefault(choice, message.line)
        elif not read_process_line(process, message):
            read_rank_line(process, message)

    def _note_retry(self, process: Process, message: Message) -> None:
        """Remembers a connection that is tried again until its thread, or the process, goes on."""
        if is_retried(message.text):
            self._retries[process, message.tid] = message
        elif self._retries:
            # A thread that only connects may write nothing about its success.
            is_connected = message.text.startswith("Connected ") or message.text.endswith("COMPLETE")
            for known in [
                key for key in self._retries if key[0] is process and (is_connected or key[1] == message.tid)
            ]:
                del self._retries[known]

    def _read_other(self, message: Message) -> None:
        """Reads a line without NCCL's head: a version, PyTorch's errors and watchdog, or nccl-tests' list."""
        readers = (
            self._read_ras,
            self._ras_json.read,
            self._torch.read_error,
            self._torch.read_watchdog,
            self._read_version,
            self._read_listed,
        )
        are_known = [read(message) for read in readers]  # a line may be several of them
        self._torch.read_outside(message)
        self.log.num_lines += any(are_known)

    def _read_ras(self, message: Message) -> bool:
        text, reports = message.text, self.log.ras
        if match := PATTERNS["ras_event"].search(text):
            if match[1] == "DEAD" and self._ras_dead is None:
                self._ras_dead = RasReport("", "DEAD", message.line, [])
                reports.append(self._ras_dead)
            if match[1] == "DEAD" and self._ras_dead is not None:
                self._ras_dead.details.append(match[2])
            return True
        if match := PATTERNS["ras_head"].search(text):
            reports.append(RasReport(match[1] or "", match[2], message.line, []))
            prefix = re.sub(r"\d+", r"\\d+", re.escape(text[: match.start()]))
            self._ras_detail = re.compile(f"{prefix}  +(.+)") if prefix else None
            return True
        last = reports[-1] if reports else None
        if last is None or message.number != last.line.number + len(last.details) + 1:
            return False
        if self._ras_detail is not None:
            indented = self._ras_detail.match(message.whole_line.strip())
            text = "" if indented is None else indented[1]
        if PATTERNS["ras_detail"].match(text):
            last.details.append(PATTERNS["ras_place"].sub(r" (process \1 on \2)", text))
            return True
        return False

    def _read_version(self, message: Message) -> bool:
        if "ccl" not in message.text and "CCL" not in message.text:
            return False
        version = find_version(message.text) if message.is_whole else None
        if library := PATTERNS["tested_library"].search(message.text):
            version = ".".join(str(int(number)) for number in library.groups())
        if version is not None:
            self.log.versions.setdefault(version, Fact(version, message.line))
        elif package := PATTERNS["package"].search(message.text):
            self.log.packages.setdefault(package[1], Fact(package[1], message.line))
        return version is not None

    def _read_listed(self, message: Message) -> bool:
        match = PATTERNS["listed"].search(message.text) if "#" in message.text else None
        if match is not None:
            rank, host, pid, device, bus = int(match[1]), match[4], int(match[3]), int(match[5]), match[6].lower()
            if rank == 0 and match[2] in (None, "0"):  # each group of a run that is split has a rank 0
                self._test_processes.setdefault((host, pid), message.line)
                self._first_ranks.setdefault(message.file, {}).setdefault((host, pid), message.line)
            self.log.listed[rank] = (host, pid, device, f"{bus}000")
        elif PATTERNS["test_end"].search(message.text):
            self._test_processes = {}  # what follows is another run
        if len(self._test_processes) > len(self.log.lone_tests):
            self.log.lone_tests = dict(self._test_processes)
        return match is not None


def _parse_choice(text: str) -> Choice | None:
    """Parses a line of the tuner; algorithms and protocols of old versions are numbers."""
    if match := PATTERNS["kernel_choice"].match(text):
        channels = f"{match[5]} channels" if match[5] else ""
        return Choice(match[1], int(match[3]), f"{match[2]} {match[4]}", "", channels)
    if (match := PATTERNS["choice"].match(text)) is None:
        return None
    algorithm, protocol = (
        names[int(word)] if word.isdecimal() and len(word) < 3 and int(word) < len(names) else word.upper()
        for word, names in ((match[3], _ALGORITHMS), (match[4], _PROTOCOLS))
    )
    return Choice(match[1] or "", int(match[2]), algorithm, protocol, f"{match[5]}..{match[6]}" if match[5] else "")
