"""The process beside a rank that tells hangs, whatever state the rank is in.

Every rank has one. Each sees its own rank through memory and the kernel, and asks the others over TCP. Only the lowest
rank whose watcher can be reached asks all and reports, so that one says it.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from lightning_commopt.watch.hangs.diagnosis import Diagnosis, diagnose
from lightning_commopt.watch.hangs.ending import end_rank
from lightning_commopt.watch.hangs.nccl_ras import RasError, ask_ras, ras_address
from lightning_commopt.watch.hangs.network import Address, GoneError, Server, UnreachableError, ask
from lightning_commopt.watch.hangs.observation import Observation
from lightning_commopt.watch.hangs.rank_link import RankLink
from lightning_commopt.watch.hangs.records import Records
from lightning_commopt.watch.hangs.snapshot import RankSnapshot

_T = TypeVar("_T")

SETTINGS_VARIABLE = "COMMOPT_HANG_WATCHER"
"""In the environment of a watcher: what it is to watch, as JSON. Other users cannot read it, as they can arguments."""

_WAKE_S = 0.25
_ASK_AGAIN_S = 5.0
_SOON_S = 1.0
_HELLO_S = 2.0
_GREET_S = 15.0
_STATE_S = 8.0
_RAS_S = 8.0
_DEATH_S = 2.0
_ORDERLY_S = 2.0
_FAILED_S = 8.0
_KEEP_S = 30.0
_NUM_ASKED_AT_ONCE = 32
_MOVED_S = 1.0


class Watcher:
    """Watches one rank, and with the others all.

    Args:
        settings: what the rank has handed over.
        observation: of the rank.
        link: to its process.
    """

    def __init__(self, settings: dict[str, Any], observation: Observation, link: RankLink) -> None:
        self._rank: int = settings["rank"]
        self._pid: int = settings["pid"]
        self._after_s: float = settings["after_s"]
        self._aborts = settings["action"] == "abort"
        self._own = observation
        self._link = link
        self._records = Records(Path(settings["folder"]), self._rank)
        self._peers: dict[int, Address] = {}
        self._token: str = settings["token"]
        self._notices: dict[int, dict[str, Any]] = {}
        self._silent: set[int] = set()
        self._has_nccl: bool = settings["has_nccl"]
        self._is_reported = False
        self._must_abort = threading.Event()
        self._records.begin(settings["world_size"])

    def receive(self, message: dict[str, Any]) -> None:
        """Takes a message of the rank."""
        if "peers" in message:
            self._peers = {rank: Address(*fields) for rank, fields in enumerate(message["peers"]) if rank != self._rank}
            threading.Thread(target=self._greet, daemon=True).start()
        else:
            self._own.learn(message)

    def run(self) -> None:
        """Watches until the rank has ended."""
        self._link.send(port=Server(self._token, self._answer).port)
        asked_at = kept_at = time.monotonic()
        while self._own.ended is None and not self._must_abort.is_set():
            time.sleep(_WAKE_S)
            self._own.update()
            now, idle_s = time.monotonic(), self._own.idle_s
            if idle_s < self._after_s:
                if self._is_reported and idle_s < _MOVED_S:
                    self._is_reported = False
                asked_at = now - _ASK_AGAIN_S + _SOON_S
            elif now - asked_at >= _ASK_AGAIN_S and not self._is_reported:
                self._inquire()
                asked_at = time.monotonic()
            if now - kept_at > _KEEP_S:
                self._records.keep(self._own.snapshot(is_whole=False), self._own.marks)
                kept_at = now
        if self._own.ended is not None:
            self._end()
        if self._must_abort.is_set() and self._own.ended in (None, "failed"):
            # One that has failed may be writing a checkpoint.
            end_rank(self._pid, self._link, _FAILED_S if self._own.ended == "failed" else _ORDERLY_S)

    def _end(self) -> None:
        """The rank's fit is over, one way or another."""
        snapshot = self._own.snapshot(is_whole=False)
        self._tell_all(notice=snapshot.to_plain())
        if self._own.ended == "finished":
            self._records.discard()
            return
        self._records.keep(snapshot, self._own.marks)
        time.sleep(_DEATH_S)  # what follows from it happens, and where all are ended together nobody hangs
        # What a rank does because all are being ended is not to be told about.
        has_reported = self._is_reported or self._must_abort.is_set()
        if not has_reported and not any(_is_cause(notice, snapshot) for notice in self._notices.values()):
            self._inquire(is_first_to_end=True)

    def _inquire(self, *, is_first_to_end: bool = False) -> None:
        """Finds out which ranks keep the others waiting, and reports it, unless a lower rank does.

        Args:
            is_first_to_end: this rank has died or failed before any other, and is the one to be told about.
        """
        if not is_first_to_end and self._is_lower_watching():
            return
        snapshots = [self._own.snapshot(), *self._in_parallel(self._ask_state, list(self._peers))]
        if is_first_to_end:
            if all((each.state, each.detail) == (self._own.ended, self._own.detail) for each in snapshots):
                return
        elif any(self._may_go_on(each) for each in snapshots) or all(each.state != "running" for each in snapshots):
            return
        self._report(diagnose(snapshots), snapshots)

    def _may_go_on(self, each: RankSnapshot) -> bool:
        """Returns whether a rank may still be at work in a phase that takes long."""
        if each.state != "running":
            return False
        if each.is_waiting:
            return each.idle_s < self._after_s
        return each.idle_s < (10 * each.limit_s if each.is_compiling else each.limit_s)

    def _report(self, diagnosis: Diagnosis, snapshots: list[RankSnapshot]) -> None:
        running = [each for each in snapshots if each.state == "running"]
        idle_s = max(each.idle_s for each in running or snapshots)
        self._is_reported = True
        self._records.keep(snapshots[0], self._own.marks)
        path = self._records.report(diagnosis, snapshots, idle_s)
        lines = [f"HangMonitor: {diagnosis.sentence}", f"  No progress for {idle_s:.0f} s."]
        lines += [f"  Try: {hint}" for hint in diagnosis.hints]
        lines.append(f"  Stacks and collectives of all ranks: {path} (commopt doctor {path} draws them)")
        if self._aborts:
            lines.append("  Ending all ranks, as action='abort' asks for.")
        sys.stderr.write("\n".join(lines) + "\n")
        sys.stderr.flush()
        if self._has_nccl:  # takes seconds, and ends with the ranks
            self._tell_all(reported=True)
            self._records.report(diagnosis, snapshots, idle_s, self._ask_ras(snapshots[0]))
        self._tell_all(reported=True, abort=self._aborts)
        if self._aborts:
            self._must_abort.set()

    def _ask_ras(self, own: RankSnapshot) -> Any:
        """Returns what NCCL says of the job; notes why, if it says nothing."""
        try:
            return ask_ras(ras_address(os.environ), _RAS_S)
        except RasError as error:
            own.missing.append(f"NCCL RAS: {error}")
            return None

    def _is_lower_watching(self) -> bool:
        """Returns whether a lower rank is watched; asks several at once, as a host that is gone costs seconds."""
        lower = list(range(self._rank))
        return any(
            any(self._in_parallel(self._is_watching, lower[at : at + _NUM_ASKED_AT_ONCE]))
            for at in range(0, len(lower), _NUM_ASKED_AT_ONCE)
        )

    def _is_watching(self, rank: int) -> bool:
        """Returns whether the watcher of a rank can be reached, and its rank has not ended."""
        if rank in self._notices:
            return False
        try:
            return bool(ask(self._peers[rank], self._token, {"hello": True}, _HELLO_S).get("is_watching"))
        except (OSError, KeyError):
            return False

    def _ask_state(self, rank: int) -> RankSnapshot:
        address = self._peers[rank]
        try:
            return RankSnapshot.from_plain(ask(address, self._token, {"state": True}, _STATE_S))
        except (GoneError, UnreachableError, ValueError) as error:
            if rank in self._notices:
                return RankSnapshot.from_plain(self._notices[rank])
            state = "silent" if rank in self._silent else "died" if isinstance(error, GoneError) else "unreachable"
            return RankSnapshot(rank=rank, host=address.host, state=state, detail=str(error))

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        if "state" in question:
            return self._own.snapshot().to_plain()
        if "notice" in question:
            self._notices[question["notice"]["rank"]] = question["notice"]
        if question.get("abort"):
            self._must_abort.set()
        if question.get("reported"):
            self._is_reported = True
            self._records.keep(self._own.snapshot(is_whole=False), self._own.marks)
        return {"is_watching": self._own.ended is None}

    def _greet(self) -> None:
        """Finds out at the start which watchers do not answer: later that would look like a lost host."""
        if self._rank == 0:
            unheard, deadline = list(self._peers), time.monotonic() + _GREET_S
            while unheard and time.monotonic() < deadline:
                found = self._in_parallel(self._does_answer, unheard)
                unheard = [rank for rank, answers in zip(unheard, found, strict=True) if not answers]
                unheard = [rank for rank in unheard if rank not in self._notices]
                time.sleep(_SOON_S)
            self._silent = set(unheard)
            if self._silent:
                address = self._peers[min(self._silent)]
                sys.stderr.write(
                    f"HangMonitor: the monitors of ranks {sorted(self._silent)} cannot be reached (the first one at"
                    f" {address.ip}:{address.port}): of a hang there only the other ranks can be told about.\n"
                )

    def _does_answer(self, rank: int) -> bool:
        try:
            return bool(ask(self._peers[rank], self._token, {"hello": True}, _HELLO_S))
        except OSError:
            return False

    def _tell_all(self, **message: Any) -> None:
        def tell(rank: int) -> None:
            with suppress(OSError):
                ask(self._peers[rank], self._token, message, _HELLO_S)

        self._in_parallel(tell, list(self._peers))  # also to those that have ended: one of them may be about to report

    def _in_parallel(self, function: Callable[[int], _T], ranks: list[int]) -> list[_T]:
        if not ranks:
            return []
        with ThreadPoolExecutor(min(_NUM_ASKED_AT_ONCE, len(ranks))) as pool:
            return list(pool.map(function, ranks))


def _is_cause(notice: dict[str, Any], own: RankSnapshot) -> bool:
    """Returns whether what another rank has said at its end is why this one has ended."""
    other = RankSnapshot.from_plain(notice)
    has_failed = other.state in ("died", "failed") and not other.is_consequence
    return has_failed and (own.is_consequence or (other.ended_unix_s or math.inf) < (own.ended_unix_s or math.inf))


def main() -> None:
    """Watches the rank that has started this process; arguments are the descriptors that it hands over."""
    link_fd, marks_fd, stacks_fd = map(int, sys.argv[1:4])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # meant for the rank, which decides what they mean
        signal.signal(number, signal.SIG_IGN)
    settings = json.loads(os.environ[SETTINGS_VARIABLE])
    link = RankLink(socket.socket(fileno=link_fd))
    observation = Observation(
        rank=settings["rank"],
        host=settings["host"],
        pid=settings["pid"],
        fit_thread=settings["fit_thread"],
        after_s=settings["after_s"],
        marks_fd=marks_fd,
        stacks_fd=stacks_fd,
        link=link,
    )
    watcher = Watcher(settings, observation, link)
    link.start(watcher.receive)
    watcher.run()
    sys.stderr.flush()
    os._exit(0)  # threads may still be answering


if __name__ == "__main__":
    main()
