"""Reads what PyTorch writes of NCCL: errors that it raises, and its watchdog's lines of timeouts and progress."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from commopt_diagnose.nccl_log.communicators import NcclLog
from commopt_diagnose.nccl_log.complaints import Progress, Timeout
from commopt_diagnose.nccl_log.lines import MAX_CONTINUED, Message
from commopt_diagnose.nccl_log.warn_texts import explain
from lightning_commopt.text.findings import Line, read_texts

_TEXTS = read_texts(Path(__file__).with_name("patterns.txt"))["other"]
PATTERNS = {name: re.compile(text) for name, text in _TEXTS.items()}


class TorchLines:
    """Reads lines of PyTorch into a log."""

    def __init__(self, log: NcclLog) -> None:
        self.log = log
        self._last_error: int | None = None  # the rank whose "Last error:" continues in the next line; -1 if unknown
        # The name of NCCL's result, which says little, the line with it, and the rank. The error follows it.
        self._result: tuple[str, Line, int | None] | None = None
        self._wrapped: list[Message] = []  # the parts so far of a line of the watchdog that a terminal or a mail broke

    def read_error(self, message: Message) -> bool:
        """Reads an error that PyTorch raised. What follows "Last error:", perhaps in the next line, explains most."""
        text, rank = message.text, self._last_error
        is_after_result = self._result is not None and message.number == self._result[1].number + 1
        if rank is None and not is_after_result and not PATTERNS["error_words"].search(text):
            return False  # most lines, and the other patterns take longer
        if rank is not None and text:
            self._last_error = None
            text = PATTERNS["rank"].sub("", PATTERNS["label"].sub("", text, count=1))
        elif marked := PATTERNS["last_error"].search(text):
            start, text = text[: marked.start()], text[marked.end() :]
            match = PATTERNS["rank"].search(start)
            rank = -1 if match is None else int(match[1] or match[2])
            if not text.strip():
                self._last_error = rank
                return True
        elif error := PATTERNS["torch_error"].search(text):
            writer = _group_and_rank(text[: error.start()])
            self.log.warn(error[1], message.line, rank=None if writer is None else writer.rank)
            return True
        elif match := PATTERNS["torch_text"].search(text):
            writer = _group_and_rank(text[: match.start()])
            self.log.warn(match[1], message.line, rank=None if writer is None else writer.rank, place="torch")
            return True
        elif match := PATTERNS["result_line"].search(text):
            writer = _group_and_rank(text[: match.start()])
            self._result = text[match.start(1) :], message.line, None if writer is None else writer.rank
            return True
        elif is_after_result and explain(text, "Last error") is not None:
            rank = -1  # "Last error:" may be missing between them. As any line may stand here, only known errors count
        elif match := PATTERNS["test_failure"].search(text):
            self.log.warn(
                match[3] or (f"{match[1]} failure '{match[2]}'" if match[1] and match[1] != "NCCL" else match[2]),
                message.line,
            )
            return True
        else:
            return False
        text = PATTERNS["tail"].sub("", text).strip()
        if not PATTERNS["no_error"].match(text):
            self.log.warn(text, message.line, rank=None if rank == -1 else rank, place="Last error")
        return True

    def add_result(self) -> None:
        """Adds the name of NCCL's result as a warning, if it is all that a log says of an error."""
        if self._result is not None and not (self.log.warnings or self.log.timeouts):
            text, line, rank = self._result
            self.log.warn(text, line, rank=rank)

    def read_outside(self, message: Message) -> None:
        """Reads what the kernel, a launcher, the program or XLA say of a process that failed, ended or waits.

        That explains what NCCL reports, but a log is not NCCL's because of it.
        """
        text = message.text
        if match := PATTERNS["outside"].search(text):
            writer = _group_and_rank(text[: match.start()])
            self.log.warn(text, message.line, rank=None if writer is None else writer.rank, place="outside")
        elif "[rank" in text and (match := PATTERNS["raised"].search(text)):
            self.log.warn(match[2], message.line, rank=int(match[1]), place="raised")

    def read_watchdog(self, message: Message) -> bool:
        """Reads a line of PyTorch's watchdog; terminals and mails break it, mails at a space that they leave out."""
        text, parts = message.text, self._wrapped
        self._wrapped = []
        if not parts and not ("atchdog" in text or "nqueued" in text or "[E" in text):
            return False
        timeout, progress = _parse_timeout(text, message.line), _parse_progress(text, message.line)
        begins = "atchdog caught" in text or text.endswith("atchdog")
        if parts and timeout is None and not begins:
            parts = [*parts, message]
            joined = (_parse_timeout(joint.join(part.text for part in parts), parts[0].line) for joint in ("", " "))
            timeout = next(filter(None, joined), None)
        elif begins:
            parts = [message]
        if timeout is not None:
            identity = timeout.rank_in_job, timeout.rank_in_group, timeout.group
            key = (*identity, timeout.sequence, timeout.operation, timeout.sizes)
            self.log.timeouts.setdefault(key, timeout)
        elif len(parts) <= MAX_CONTINUED:
            self._wrapped = parts
        if timeout is None and "[E" in text and (match := PATTERNS["watchdog_error"].search(text)):
            self.log.failed_ranks.add(int(match[1]))
        if progress is not None:
            self.log.progress[progress.rank, progress.group] = progress
        return timeout is not None or progress is not None


def _parse_timeout(text: str, line: Line) -> Timeout | None:
    """Parses a line of PyTorch's watchdog that gives a collective up."""
    match = PATTERNS["timeout"].search(text) if "atchdog caught" in text else None
    writer = _group_and_rank(text[: match.start()]) if match else None
    if match is None or writer is None:
        return None
    fields = dict(re.findall(r"(\w+(?:\(ms\))?) ?= ?(\[[^\]]*\]|[^,\s)]+)", match[1]))
    sequence = fields.get("SeqNum", "")
    return Timeout(
        rank_in_job=writer.rank_in_job,
        rank_in_group=writer.rank_in_group,
        group=writer.group,
        sequence=int(sequence) if sequence.isdecimal() else None,
        operation=fields.get("OpType", "a collective"),
        sizes=", ".join(f"{key}={fields[key]}" for key in ("TensorShape", "NumelIn", "NumelOut") if key in fields),
        limit_s=int(fields["Timeout(ms)"]) / 1000 if fields.get("Timeout(ms)", "").isdecimal() else None,
        waited_s=None if match[2] is None else int(match[2]) / 1000,
        line=line,
    )


def _parse_progress(text: str, line: Line) -> Progress | None:
    """Parses a line of PyTorch's watchdog about how far a rank is; what cannot be true is left out."""
    match = PATTERNS["progress"].search(text) if "nqueued" in text else None
    writer = _group_and_rank(text[: match.start()]) if match else None
    if match is None or writer is None or int(match[3]) > int(match[2]):
        return None
    work = int(match[1]) if match[1] else None
    return Progress(rank=writer.rank, group=writer.group, work=work, enqueued=int(match[2]), line=line)


class _Writer(NamedTuple):
    """The rank that wrote a line."""

    rank_in_job: int | None
    rank_in_group: int
    group: str  # its process group; "" if unknown

    @property
    def rank(self) -> int:
        return self.rank_in_group if self.rank_in_job is None else self.rank_in_job


def _group_and_rank(text: str) -> _Writer | None:
    """Returns the rank that stands last in front of a message, and its process group, if it is named.

    Since torch 2.3 a prefix has the rank in the job, as in ``[rank9]:``; what follows counts the ranks of the group.

    >>> _group_and_rank("[rank9]:[E129 16:38:47 ProcessGroupNCCL.cpp:683] [PG ID 5 PG GUID 37(TP) Rank 1] ")
    _Writer(rank_in_job=9, rank_in_group=1, group='PG ID 5 PG GUID 37(TP)')
    """
    matches = list(PATTERNS["group_and_rank"].finditer(text))
    in_job = [int(match[3]) for match in matches if match[3]]
    in_group = [(match[1] or "", int(match[2])) for match in matches if match[2]]
    if not matches:
        return None
    rank = in_group[-1][1] if in_group else in_job[-1]
    groups = [group for group, group_rank in in_group if group and group_rank == rank]
    return _Writer(in_job[-1] if in_job else None, rank, (groups or [""])[0])
