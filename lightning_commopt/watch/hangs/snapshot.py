"""RankSnapshot: the state of one rank, as far as it is known."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_commopt.measure.plain import from_plain
from lightning_commopt.watch.hangs import marks as kinds
from lightning_commopt.watch.hangs.flight_recorder import Collective, parse_collectives
from lightning_commopt.watch.hangs.marks import BACKWARD, OUTSIDE_OF_BATCHES, PHASES, SETUP, Mark

_CONNECTION_LOST = re.compile(
    r"connection (was )?(closed|reset|refused|aborted|lost)|closed by peer|broken pipe|remote (process|worker|error)"
    r"|ncclRemoteError|ncclSystemError|Rank \d+ has (died|failed)",
    re.IGNORECASE,
)
_TIMED_OUT = re.compile(
    r"timed out waiting|collective operation timeout|NCCL operation timed out|timed out in (blocking wait|monitored)"
    r"|timeout caused pair closure|wait timeout after|Operation timed out",
    re.IGNORECASE,
)
"""Errors of gloo and of torch's two NCCL backends when other ranks do not join a collective in time."""

SIGTERM_BROADCAST = "Lightning's broadcast of SIGTERM before a batch"


@dataclass(kw_only=True)
class RankSnapshot:
    """The state of one rank."""

    rank: int
    host: str  # name of its host
    pid: int = 0  # number of its process in the kernel
    # "running", "stopped", "died", "failed" (has raised), "interrupted" (Ctrl-C or SIGINT), "terminated" (SIGTERM),
    # "finished" (has ended its fit), "unreachable" (its host does not answer), "unwatched" (its watcher has ended) or
    # "silent" (its watcher could never be reached)
    state: str = "running"
    detail: str = ""  # the reason for its state: the exception, or why it is unreachable
    stop_reason: str = ""  # what has ended its training before the last batch; "" if nothing has
    ended_unix_s: float | None = None  # when it has ended, in seconds since 1970; None if it has not
    phase: int = SETUP  # index into `lightning_commopt.watch.hangs.marks.PHASES`
    step: int = 0  # optimizer steps before this one
    batch: int = -1  # index of the last batch of an evaluation; -1 outside of one
    # The phases outside of training's batches, other than checkpoints, that it has entered in this step.
    passed: list[int] = field(default_factory=list)
    idle_s: float = 0.0  # seconds since the last mark or, if collectives are known, since the last of them
    limit_s: float = 0.0  # seconds without progress that its phase is allowed
    ready: int = 0  # number of buckets of this backward that are ready
    bucket: int | None = None  # index of the oldest bucket that is ready and not averaged; None if there is none
    bucket_names: list[str] = field(default_factory=list)  # names of its parameters
    all_ready: bool = False  # whether the last bucket of this backward is ready
    # DiLoCo's fragment whose exchange a step waits for, and how often it was exchanged before; None if there is none.
    fragment: int | None = None
    exchange: int | None = None
    fragment_names: list[str] = field(default_factory=list)  # names of its parameters
    # The collective that the fit's thread is in, or has raised in, or that its device waits in; None if there is none.
    called: str | None = None
    # Whether the fit's thread has gone on, or may have, since it called that: its stack does not show the place then.
    is_ahead: bool = False
    # The hook of a callback or a module that the fit's thread is in, or `SIGTERM_BROADCAST`; None if there is none.
    hook: str | None = None
    # The user's own code that the fit's thread is in, or has raised in, as "file:line in function".
    place: str | None = None
    innermost: str | None = None  # the innermost code of any kind that the fit's thread is in
    worker_places: list[str] = field(default_factory=list)  # the user's own code that the dataloader's workers are in
    is_compiling: bool = False  # whether the fit's thread is in a compiler
    # Whether the fit's thread, or in a dataloader its workers, use CPU time. With a GPU, where a waiting thread uses it
    # too, only a `device_step` tells.
    is_computing: bool = False
    # The step that the device computes while the fit's thread waits for it before a batch; None if it is not known.
    device_step: int | None = None
    fit_thread: str = ""  # key of that thread in ``stacks``
    process: str = ""  # its state in the kernel, in words
    collectives: Any = None  # the collectives that it has called, as the Flight Recorder's JSON; the oldest first
    stacks: dict[str, dict[str, list[str]]] = field(default_factory=dict)  # its stacks, by process and thread
    missing: list[str] = field(default_factory=list)  # what could not be read, and why

    @property
    def is_waiting(self) -> bool:
        """Whether the rank waits for others, in a collective, in gradient sync or in an exchange of DiLoCo."""
        is_exchanging = self.fragment is not None
        return self.state == "running" and (self.called is not None or self.is_syncing or is_exchanging)

    @property
    def is_consequence(self) -> bool:
        """Whether the rank has failed because it lost its connection to another, or timed out."""
        return self.has_timed_out or (self.state == "failed" and _CONNECTION_LOST.search(self.detail) is not None)

    @property
    def has_timed_out(self) -> bool:
        """Whether the rank has failed because others did not join a collective."""
        return self.state == "failed" and _TIMED_OUT.search(self.detail) is not None

    @property
    def is_unknown(self) -> bool:
        return self.state in ("unreachable", "unwatched", "silent")

    @property
    def is_inferred(self) -> bool:
        """Whether it is known that the rank waits, but not in what: it has not said what its device is in."""
        return self.is_ahead and self.collectives is None

    @property
    def frames(self) -> list[str]:
        """Stack of the fit's thread where the rank is, innermost first, without line numbers; empty if unknown."""
        if self.is_ahead:
            return []
        frames = self.stacks.get(f"process {self.pid}", {}).get(self.fit_thread, [])
        return [re.sub(r":\d+ in ", " ", frame) for frame in frames]

    @property
    def is_syncing(self) -> bool:
        """Whether backward only waits for averages."""
        return self.phase == BACKWARD and self.all_ready and self.bucket is not None

    def parsed_collectives(self) -> list[Collective]:
        return parse_collectives(self.collectives)

    def current_collective(self) -> Collective | None:
        """Returns the collective that the rank waits in, or did when it lost its connection; None if there is none."""
        collectives, outstanding = self.parsed_collectives(), self.outstanding_collective()
        was_in_one = self.is_consequence and (self.called is not None or self.phase == BACKWARD)
        if outstanding is None and was_in_one and collectives:
            return collectives[-1]  # gloo marks collectives that have failed as ended
        return outstanding

    def outstanding_collective(self) -> Collective | None:
        """Returns the oldest collective that has not ended on this rank; None if there is none."""
        return next((collective for collective in self.parsed_collectives() if not collective.is_done), None)

    def to_plain(self) -> dict[str, Any]:
        return {**vars(self), "phase_name": PHASES[self.phase].name}

    @classmethod
    def from_plain(cls, plain: Any) -> RankSnapshot:
        """Reverts `to_plain`; raises a ValueError or a TypeError if it is not from there."""
        snapshot = from_plain(cls, plain)
        if snapshot.phase not in range(len(PHASES)):
            raise ValueError(f"a rank is in phase {snapshot.phase}")
        return snapshot


def fragment_key(index: int) -> int:
    """Returns the number under which a fragment of DiLoCo has its names, beside those of buckets from 0 on."""
    return -1 - index


def place_in_training(marks: Sequence[Mark], names: Mapping[int, list[str]]) -> dict[str, Any]:
    """Returns the fields of a snapshot that follow from a rank's marks, the oldest first.

    ``names`` has every bucket's parameters, and under `fragment_key` those of every fragment.
    """
    phase, step, batch, since = SETUP, 0, -1, 0
    due: tuple[int, int] | None = None
    passed: set[int] = set()
    for position, mark in enumerate(marks):
        if mark.kind == kinds.PHASE:
            passed = passed if mark.value == step else set()
            passed |= {mark.code} if mark.code in OUTSIDE_OF_BATCHES else set()
            since = position if mark.code == BACKWARD or phase == BACKWARD else since
            phase, step, batch = mark.code, mark.value, -1
        elif mark.kind == kinds.BATCH:
            batch = mark.value
        elif mark.kind in (kinds.EXCHANGE_DUE, kinds.EXCHANGE_APPLIED):
            due = (mark.code, mark.value) if mark.kind == kinds.EXCHANGE_DUE else None
    ready: list[int] = []
    pending: list[int] = []
    all_ready = False
    for mark in marks[since:]:
        if mark.kind == kinds.BUCKET_READY:
            ready.append(mark.value)
            pending.append(mark.value)
            all_ready = all_ready or bool(mark.code)
        elif mark.kind == kinds.BUCKET_END and mark.value in pending:
            pending.remove(mark.value)
    bucket = pending[0] if pending else None
    fragment, exchange = (None, None) if due is None else due
    return {
        "fragment": fragment,
        "exchange": exchange,
        "fragment_names": [] if fragment is None else list(names.get(fragment_key(fragment), [])),
        "phase": phase,
        "step": step,
        "batch": batch,
        "passed": sorted(passed),
        "ready": len(ready),
        "bucket": bucket,
        "bucket_names": [] if bucket is None else list(names.get(bucket, [])),
        "all_ready": all_ready,
    }
