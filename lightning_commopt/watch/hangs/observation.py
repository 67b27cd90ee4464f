"""Observation: the state of a watcher's own rank."""

from __future__ import annotations

import mmap
import threading
import time
from dataclasses import dataclass
from typing import Any

from lightning_commopt.compat.hooks import activity_of
from lightning_commopt.watch import times
from lightning_commopt.watch.hangs import marks as kinds
from lightning_commopt.watch.hangs import process as processes
from lightning_commopt.watch.hangs.device_place import (
    add_device_bucket,
    current_span,
    find_unmarked_bucket,
    follow_device,
)
from lightning_commopt.watch.hangs.flight_recorder import last_progress_unix_s
from lightning_commopt.watch.hangs.marks import NUM_BYTES, PHASES, Mark, PhaseTimes, read_marks
from lightning_commopt.watch.hangs.process import ComputingProbe
from lightning_commopt.watch.hangs.snapshot import SIGTERM_BROADCAST, RankSnapshot, place_in_training
from lightning_commopt.watch.hangs.stacks import Frame, collective_in, dump_stack, is_compiling, user_place
from lightning_commopt.watch.hangs.transport import RankLink

_MAX_WORKERS = 4
"""Maximum number of a dataloader's workers whose stacks are read. Each may take `times.STACK_S` and more, and
`times.STATE_S` must be long enough for all. Workers that hang usually wait for the same thing."""

_DATALOADER = {
    kinds.DATA,
    kinds.DATA_START,
    *(n for n, phase in enumerate(PHASES) if phase.where.startswith("in the dataloader")),
}


@dataclass(frozen=True, kw_only=True)
class WatcherSettings:
    """What a rank passes to its watcher."""

    rank: int
    host: str
    pid: int
    fit_thread: tuple[int, int]  # ident of the training thread, and its number in the kernel
    after_s: float  # seconds that every phase may last without progress
    action: str = "report"  # "report" or "abort"
    folder: str = ""  # folder for the files of watchers
    key: str = ""  # secret that all watchers share
    world_size: int = 1  # number of ranks
    has_gpu: bool = False


class Observation:
    """Follows one rank through its marks, and takes snapshots of it.

    The descriptors are those of the shared memory with the marks, and of the file that the rank writes stacks to.

    Attributes:
        ended: "finished", "failed", "interrupted" or "terminated" once the rank has reported that; "died" if its
            process has ended without a report.
        detail: the exception if the rank has failed; how its process has ended if it has died.
        ended_unix_s: the time of its end, in seconds since 1970; None before.
    """

    def __init__(self, settings: WatcherSettings, *, marks_fd: int, stacks_fd: int, link: RankLink) -> None:
        self._settings, self._pid, self._fit_thread = settings, settings.pid, settings.fit_thread
        self._link, self._stacks_fd = link, stacks_fd
        self._memory = mmap.mmap(marks_fd, NUM_BYTES, prot=mmap.PROT_READ)
        self._names: dict[int, list[str]] = {}
        self._num_unmarked = 0
        self._lock = threading.Lock()
        self._times = PhaseTimes(settings.after_s)
        self._last = Mark(time.monotonic(), 0, 0, 0, 0)
        self._phase, self._longest_idle_s = kinds.SETUP, 0.0
        self.ended: str | None = None
        self.ended_unix_s: float | None = None
        self._gone_s: float | None = None  # when its process was first seen to have ended
        self._last_dump: dict[str, Any] = {}
        self._raised: list[Frame] = []
        self.detail = self._stop_reason = ""
        self._resumed_s = time.monotonic()
        self._was_stopped = False
        self._probe = None if settings.has_gpu else ComputingProbe(self._pid, self._fit_thread[1], settings.after_s)

    @property
    def marks(self) -> list[Mark]:
        """The last marks of the rank, the oldest first."""
        return read_marks(self._memory)

    @property
    def idle_s(self) -> float:
        """Seconds since the last mark, or since the rank or this process was continued after a stop."""
        return time.monotonic() - max(self._last.at_s, self._resumed_s)

    def learn(self, message: dict[str, Any]) -> None:
        """Stores a report of the rank."""
        if "buckets" in message:
            self._names.update(dict(message["buckets"]))
            self._num_unmarked = len(self._names) if message["are_all"] else 0
        elif "stop_reason" in message:
            self._stop_reason = message["stop_reason"]
        elif "ended" in message:
            self.detail, self.ended_unix_s = message.get("detail", ""), time.time()
            self._last_dump = message.get("dump", {})
            self._raised = [Frame(*fields) for fields in message.get("raised", ())]
            self.ended = message["ended"]

    def update(self) -> None:
        """Reads the rank's new marks, and whether its process runs, is stopped or has ended."""
        new = [mark for mark in self.marks if mark.number > self._last.number]
        for mark in new:
            self._longest_idle_s = max(self._longest_idle_s, mark.at_s - self._last.at_s)
            self._last = mark
            if mark.kind == kinds.PHASE:
                self._times.add(self._phase, self._longest_idle_s)
                self._phase, self._longest_idle_s = mark.code, 0.0
        state = processes.process_state(self._pid).state
        is_stopped = state.startswith("stopped")
        if self._was_stopped and not is_stopped:
            self.resume()
        self._was_stopped = is_stopped
        if self.ended is None and state == "dead":
            self.note_exit()
            self.ended_unix_s = self.ended_unix_s or time.time()
            self._gone_s = self._gone_s or time.monotonic()
            # Its last message may still be on its way.
            if time.monotonic() - self._gone_s > times.LAST_MESSAGE_S:
                self.ended = "died"
        elif self._probe is not None:
            self._probe.sample(self.idle_s, with_children=self._phase in _DATALOADER)

    def resume(self) -> None:
        """Resets the idle seconds, because a job that was suspended and continues does not hang."""
        self._resumed_s = time.monotonic()

    def note_exit(self) -> None:
        """Reads how the rank's process has ended: its parent may reap it at any time."""
        for _ in range(round(times.EXIT_S / times.EXIT_POLL_S)):
            if self.ended is not None or self.detail:
                return
            self.detail = processes.find_exit(self._pid) or ""
            if not processes.is_alive(self._pid):
                return
            time.sleep(times.EXIT_POLL_S)

    def snapshot(self, *, is_whole: bool = True) -> RankSnapshot:
        """Returns the state of the rank, whole with stacks and collectives, which need the process.

        It takes some seconds, and twice as long if the rank has moved or ended meanwhile.
        """
        with self._lock:
            before = self._progress
            snapshot = self._take_snapshot(is_whole)
            return snapshot if self._progress == before else self._take_snapshot(is_whole)

    @property
    def _progress(self) -> tuple[str | None, int]:
        return self.ended, max((mark.number for mark in self.marks), default=0)

    def _take_snapshot(self, is_whole: bool) -> RankSnapshot:
        process = processes.process_state(self._pid)
        state = self.ended or ("stopped" if process.state.startswith("stopped") else "running")
        snapshot = RankSnapshot(
            rank=self._settings.rank,
            host=self._settings.host,
            pid=self._pid,
            state=state,
            detail=self.detail,
            stop_reason=self._stop_reason,
            ended_unix_s=self.ended_unix_s,
            idle_s=self.idle_s,
            is_computing=self._probe is not None and self._probe.is_computing(),
            fit_thread=hex(self._fit_thread[0]),
            process=str(process),
            **place_in_training(self.marks, self._names),
        )
        if is_whole and state == "running":
            is_answered = self._add_stacks(snapshot) and self._add_dump(snapshot)
            if self._settings.has_gpu and not is_answered:
                self._infer_wait(snapshot)
        elif self._raised:
            self._add_thread(snapshot, self._raised)
            self._apply_dump(snapshot, self._last_dump)
        elif is_whole:
            snapshot.missing.append(f"stacks and collectives: the process is {state}")
        is_in_hook = snapshot.hook not in (None, SIGTERM_BROADCAST)
        phases = (snapshot.phase, kinds.CALLBACKS) if is_in_hook else (snapshot.phase,)
        snapshot.limit_s = max(map(self._times.limit_s, phases))
        return snapshot

    def _add_stacks(self, snapshot: RankSnapshot) -> bool:
        """Adds the stacks that the process reports or, if it does not answer, the stack of the training thread.

        Returns:
            Whether it has answered.
        """
        ident, thread = self._fit_thread
        cpu_s = processes.thread_cpu_s(self._pid, thread)
        answer = self._link.request(times.ANSWER_S, stacks=True)
        if answer is not None:
            stacks = {
                int(key): [Frame(*fields) for fields in frames] for key, frames in answer.get("stacks", {}).items()
            }
        # No other thread gets the GIL: the training thread waits for it too, or is in a C function that holds it.
        elif (
            processes.is_asleep(self._pid, thread)
            or processes.thread_cpu_s(self._pid, thread) - cpu_s > times.HOLDS_GIL_S
        ):
            stacks = {ident: dump_stack(self._pid, thread, self._stacks_fd, times.STACK_S)}
        else:
            stacks = {}
        frames = stacks.get(ident, [])
        if not frames:
            snapshot.missing.append(f"stacks: the process has not answered within {times.ANSWER_S:g} s")
        snapshot.stacks[f"process {self._pid}"] = {hex(key): list(map(str, stack)) for key, stack in stacks.items()}
        self._add_thread(snapshot, frames)
        snapshot.is_compiling = is_compiling(frames)
        if snapshot.phase in _DATALOADER:
            self._add_workers(snapshot)
        return answer is not None

    def _add_thread(self, snapshot: RankSnapshot, frames: list[Frame]) -> None:
        """Adds a thread's activity: other callbacks have no marks, and may run after ours has set the next phase."""
        snapshot.place = _text_of(user_place(frames))
        snapshot.innermost = _text_of(next(iter(frames), None))
        snapshot.called = collective_in(frames)
        activity = activity_of([(frame.file, frame.function) for frame in frames])
        if activity is None:
            return
        if activity.kind == "SIGTERM":
            snapshot.stop_reason = activity.kind
            return
        if activity.kind == "SIGTERM broadcast":
            snapshot.hook = SIGTERM_BROADCAST
        elif activity.kind == "hook":
            snapshot.hook = f"a {activity.owner}'s {activity.hook}"
        if snapshot.called is None and snapshot.phase not in (kinds.SETUP, kinds.END):
            if activity.kind == "hook":
                snapshot.phase = kinds.CALLBACKS
            elif activity.kind == "checkpoint":
                snapshot.phase = kinds.CHECKPOINT
            elif snapshot.phase in (kinds.CALLBACKS, kinds.CHECKPOINT):
                snapshot.phase = kinds.DATA

    def _add_workers(self, snapshot: RankSnapshot) -> None:
        for pid in processes.descendants(self._pid)[:_MAX_WORKERS]:
            if not processes.is_asleep(pid, pid):
                snapshot.missing.append(f"stack of process {pid}: it is running, and the signal could crash it")
                continue
            frames = dump_stack(pid, pid, self._stacks_fd, times.STACK_S)
            snapshot.stacks[f"process {pid}"] = {"main": list(map(str, frames))}
            if (place := user_place(frames)) is not None:
                snapshot.worker_places.append(str(place))

    def _add_dump(self, snapshot: RankSnapshot) -> bool:
        """Adds the collectives that the process reports; returns whether it has answered."""
        dump = self._link.request(times.ANSWER_S, dump=True)
        if dump is None:
            snapshot.missing.append(f"collectives: the process has not answered within {times.ANSWER_S:g} s")
            return False
        self._apply_dump(snapshot, dump)
        return True

    def _infer_wait(self, snapshot: RankSnapshot) -> None:
        """Counts a rank as waiting if its thread only waits for the device, and the device's collective is unknown."""
        if snapshot.hook == SIGTERM_BROADCAST and snapshot.called is None:
            snapshot.called, snapshot.is_ahead = "broadcast", True

    def _apply_dump(self, snapshot: RankSnapshot, dump: dict[str, Any]) -> None:
        if dump.get("owner") and snapshot.hook is not None:  # the class that has the hook is known
            snapshot.hook = f"{dump['owner']}.{snapshot.hook.rpartition(' ')[2]}"
        snapshot.collectives = dump.get("collectives")
        # A hook that loops over collectives, or a fit within this one, makes progress without any mark.
        since_s = time.time() - last_progress_unix_s(snapshot.collectives)
        if 0 <= since_s < snapshot.idle_s:
            snapshot.idle_s = since_s
        if dump.get("missing"):
            snapshot.missing.append(dump["missing"])
        marks = self.marks
        span = follow_device(snapshot, marks) if self._settings.has_gpu else current_span(marks)
        if dump.get("device_bucket") is not None:
            add_device_bucket(snapshot, dump)
        elif snapshot.phase == kinds.BACKWARD and self._num_unmarked:
            find_unmarked_bucket(snapshot, span, self._num_unmarked)
        elif snapshot.phase == kinds.BACKWARD and snapshot.bucket is None and snapshot.called is None:
            # With another hook than ours, or before DDP has built its buckets, only the collective is known.
            current = snapshot.current_collective()
            snapshot.called = None if current is None else current.signature.operation
        if snapshot.bucket is not None:
            snapshot.bucket_names = list(self._names.get(snapshot.bucket, []))


def _text_of(frame: Frame | None) -> str | None:
    return None if frame is None else str(frame)
