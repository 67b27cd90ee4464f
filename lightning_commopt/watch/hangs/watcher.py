"""The watcher: reports a hang even when its rank is stopped or dead.

Every rank has one. It reads the state of its own rank from memory and the kernel, and asks the other watchers over TCP.
Only the lowest rank whose watcher can be reached asks all, and the watcher of a rank that has ended. Those that find a
hang at the same time agree on one that reports it (`Turn`).
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
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_commopt.text.formatting import escape_controls
from lightning_commopt.watch import times
from lightning_commopt.watch.hangs.diagnosis import (
    Diagnosis,
    diagnose,
    has_moved,
    is_hang,
    is_waited_for,
    may_be_caught,
    may_end_ranks,
)
from lightning_commopt.watch.hangs.nccl_ras import RasError, ask_ras, ras_address
from lightning_commopt.watch.hangs.observation import Observation, WatcherSettings
from lightning_commopt.watch.hangs.peer_watchers import PeerWatchers
from lightning_commopt.watch.hangs.process import end_rank, is_alive
from lightning_commopt.watch.hangs.records import Records
from lightning_commopt.watch.hangs.snapshot import RankSnapshot
from lightning_commopt.watch.hangs.transport import Address, RankLink, Server
from lightning_commopt.watch.hangs.turn import Turn

SETTINGS_VARIABLE = "COMMOPT_HANG_WATCHER"
"""Environment variable with a watcher's settings, as JSON. Other users can read arguments, but not this."""


class Watcher:
    """Watches one rank, and all ranks together with the other watchers."""

    def __init__(self, settings: WatcherSettings, observation: Observation, link: RankLink) -> None:
        self._settings, self._own, self._link = settings, observation, link
        self._after_s, self._aborts = settings.after_s, settings.action == "abort"
        self._records = Records(Path(settings.folder), settings.rank)
        self._peers = PeerWatchers(settings.rank, settings.key)
        self._turn = Turn(settings.rank)
        self._is_reported = False
        self._own_report: tuple[Diagnosis, list[RankSnapshot]] | None = None
        self._must_abort = threading.Event()
        self._records.begin(settings.world_size)

    def receive(self, message: dict[str, Any]) -> dict[str, Any]:
        """Stores what the rank reports; returns the port if it asks for a server."""
        if "listen" in message:
            return {"port": Server(message["listen"], self._settings.key, self._answer).port}
        if "peers" in message:
            addresses = [Address(*fields) for fields in message["peers"]]
            threading.Thread(target=self._meet, args=(addresses,), daemon=True).start()
        else:
            self._own.learn(message)
        return {}

    def run(self) -> None:
        asked_at = kept_at = time.monotonic()
        while self._own.ended is None and not self._must_abort.is_set():
            slept_at = time.monotonic()
            time.sleep(times.HANG_LOOK_S)
            # If this process was suspended, so was the job.
            if time.monotonic() - slept_at > times.PAUSE_S:
                self._own.resume()
            self._own.update()
            now, idle_s = time.monotonic(), self._own.idle_s
            if idle_s < self._after_s:
                if idle_s < times.MOVED_S:
                    self._note_progress()
                asked_at = now - times.ASK_AGAIN_S + times.CONFIRM_S
            elif now - asked_at >= times.ASK_AGAIN_S and (self._aborts or not self._is_reported):
                self._inquire()
                asked_at = time.monotonic()
            if now - kept_at > times.KEEP_S:
                self._records.keep(self._own.snapshot(is_whole=False), self._own.marks)
                kept_at = now
        if self._own.ended is not None:
            self._end()
        if self._must_abort.is_set() and self._own.ended in (None, "failed"):
            # A rank that has failed may be writing a checkpoint.
            end_rank(self._settings.pid, self._link, times.FAILED_S if self._own.ended == "failed" else times.ORDERLY_S)

    def _end(self) -> None:
        """Reports that the rank has died, failed or was interrupted, if that is the cause and others wait for it."""
        snapshot = self._own.snapshot(is_whole=False)
        self._peers.send_all(notice=snapshot.to_plain())
        if self._own.ended == "finished":
            self._note_progress()
            self._records.discard()
            return
        self._records.keep(snapshot, self._own.marks)
        # Other ranks may end for the same reason, or all may be ended together, which is not a hang.
        time.sleep(times.DEATH_S)
        snapshots: list[RankSnapshot] | None = None
        while self._peers and not self._is_settled:
            if any(_is_cause(notice, snapshot) for notice in self._peers.notices.values()):
                return
            before, snapshots = snapshots, self._look()
            if not (is_alive(self._settings.pid) and may_be_caught(snapshot, before, snapshots, self._after_s)):
                is_shared = all((rank.state, rank.detail) == (snapshot.state, snapshot.detail) for rank in snapshots)
                if is_shared or not is_waited_for(snapshot, snapshots) or self._report(diagnose(snapshots), snapshots):
                    return
            time.sleep(times.CONFIRM_S)

    def _inquire(self) -> None:
        """Reports a hang, unless a lower rank reports. A second look must confirm it: a rank may just have moved."""
        if not self._peers or self._peers.is_lower_watching():
            return
        first = self._look()
        if not is_hang(first, self._after_s):
            return
        time.sleep(times.CONFIRM_S)
        self._own.update()
        snapshots = self._look()
        if is_hang(snapshots, self._after_s) and not has_moved(first, snapshots) and self._own.ended is None:
            self._report(diagnose(snapshots), snapshots)

    def _look(self) -> list[RankSnapshot]:
        return [self._own.snapshot(), *self._peers.snapshots()]

    @property
    def _is_settled(self) -> bool:
        """Whether the end of this rank needs no report, because it was reported, or follows from our own abort."""
        return self._must_abort.is_set() or (self._is_reported and not self._aborts)

    def _report(self, diagnosis: Diagnosis, snapshots: list[RankSnapshot]) -> bool:
        """Reports a hang, once; with ``action="abort"`` ends all ranks if some wait.

        Returns:
            False if another watcher is about to, which may still end before it has.
        """
        aborts = self._aborts and may_end_ranks(snapshots, diagnosis.kind)
        if self._is_reported and not aborts:
            return True
        if not self._turn.take(self._ask_for_turn):
            return False
        try:
            if not self._must_abort.is_set() and (aborts or not self._is_reported):
                self._print_and_write(diagnosis, snapshots, aborts)
        finally:
            self._turn.give_back()
        return True

    def _ask_for_turn(self) -> list[bool]:
        return [bool(answer.get("refused")) for answer in self._peers.send_all(turn=self._settings.rank)]

    def _print_and_write(self, diagnosis: Diagnosis, snapshots: list[RankSnapshot], aborts: bool) -> None:
        """Prints and writes a report; what was reported before gets one line, if ranks are ended now."""
        idle_s = max(rank.idle_s for rank in [rank for rank in snapshots if rank.state == "running"] or snapshots)
        is_first, self._is_reported = not self._is_reported, True
        self._own_report = diagnosis, snapshots
        self._records.keep(snapshots[0], self._own.marks)
        error = self._records.report(diagnosis, snapshots, idle_s)
        lines = [f"HangMonitor: {diagnosis.sentence}"]
        if diagnosis.kind != "interrupted":  # the user has interrupted it, and needs no hints
            verdict = f": {diagnosis.verdict}" if diagnosis.verdict else ""
            lines.append(f"  No progress for {idle_s:.0f} s{verdict}.")
            lines += [f"  Try: {hint}" for hint in diagnosis.hints]
            path = self._records.folder
            location = f"{path} (commopt doctor {path} draws them)" if error is None else f"cannot be written ({error})"
            lines.append(f"  Stacks and collectives of all ranks: {location}")
        _print(*(lines if is_first else lines[:1]))
        # NCCL's answer takes seconds, and cannot be had once the ranks have ended.
        if self._settings.has_gpu and is_first:
            self._peers.send_all(reported=True)
            self._records.report(diagnosis, snapshots, idle_s, self._ask_ras(snapshots[0]))
            aborts = aborts and (self._own.ended is not None or not has_moved(snapshots, self._look()))
        self._peers.send_all(reported=True, abort=aborts)
        if aborts:
            _print("  Ending all ranks, because action='abort' is set.")
            self._must_abort.set()

    def _note_progress(self) -> None:
        """Corrects a report once its rank makes progress."""
        if self._is_reported and self._own_report is not None:
            diagnosis, snapshots = self._own_report
            idle_s = max(rank.idle_s for rank in snapshots)
            conclusion = ", so it was slow, not hung" if diagnosis.verdict is not None else ""
            _print(f"HangMonitor: rank {self._settings.rank} continues after {idle_s:.0f} s or more{conclusion}.")
            if diagnosis.verdict is not None:
                slow = diagnosis.verdict.replace("hang", "slow")
                self._records.report(replace(diagnosis, verdict=slow), snapshots, idle_s)
        self._is_reported, self._own_report = False, None

    def _ask_ras(self, own: RankSnapshot) -> Any:
        """Returns the answer of NCCL's RAS; None if there is none, and then the snapshot has the reason."""
        try:
            return ask_ras(ras_address(os.environ), times.RAS_S)
        except RasError as error:
            own.missing.append(f"NCCL RAS: {error}")
            return None

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        if "state" in question:
            return self._own.snapshot().to_plain()
        if "notice" in question:
            self._peers.notices[question["notice"]["rank"]] = question["notice"]
        if question.get("abort"):
            self._must_abort.set()
        if "turn" in question:
            return {"refused": self._turn.refuse(question["turn"])}
        if question.get("reported"):
            self._is_reported = True
            self._records.keep(self._own.snapshot(is_whole=False), self._own.marks)
        return {"is_watching": self._own.ended is None}

    def _meet(self, addresses: list[Address]) -> None:
        warning = self._peers.meet(addresses)
        if warning is not None:
            _print(warning)


def _print(*lines: str) -> None:
    with suppress(OSError):  # who reads it may have ended
        sys.stderr.write(escape_controls("\n".join(lines)) + "\n")  # exceptions of ranks may hold anything
        sys.stderr.flush()


def _is_cause(notice: dict[str, Any], own: RankSnapshot) -> bool:
    """Returns whether another rank, which has sent a notice at its end, is the reason for the end of this one."""
    other = RankSnapshot.from_plain(notice)
    has_failed = other.state not in ("running", "finished") and not other.is_consequence
    return has_failed and (own.is_consequence or (other.ended_unix_s or math.inf) < (own.ended_unix_s or math.inf))


def main() -> None:
    """Watches the rank that has started this process; the arguments are descriptors from it."""
    link_fd, marks_fd, stacks_fd = map(int, sys.argv[1:4])
    # These signals are meant for the rank.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    settings = WatcherSettings(**json.loads(os.environ[SETTINGS_VARIABLE]))
    link = RankLink(socket.socket(fileno=link_fd))
    observation = Observation(settings, marks_fd=marks_fd, stacks_fd=stacks_fd, link=link)
    watcher = Watcher(settings, observation, link)
    link.start(watcher.receive, observation.note_exit)
    watcher.run()
    os._exit(0)  # threads may still be answering


if __name__ == "__main__":
    main()
