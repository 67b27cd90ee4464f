"""The rank's side of the watch: starts its watcher, writes marks, and answers its questions."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from ipaddress import ip_address
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from lightning_commopt.compat.hooks import hook_owner
from lightning_commopt.compat.torch import flight_records
from lightning_commopt.measure.observer import APPLIED, DUE, END, BucketInfo, BucketSync, SyncObserver
from lightning_commopt.sync.store import key_space
from lightning_commopt.text.formatting import text_of
from lightning_commopt.watch import times
from lightning_commopt.watch.hangs import marks as kinds
from lightning_commopt.watch.hangs.marks import MarkWriter
from lightning_commopt.watch.hangs.observation import WatcherSettings
from lightning_commopt.watch.hangs.snapshot import fragment_key
from lightning_commopt.watch.hangs.stacks import MAX_FRAMES, make_dumpable, own_stacks
from lightning_commopt.watch.hangs.transport import RankLink, find_own_ip
from lightning_commopt.watch.hangs.watcher import SETTINGS_VARIABLE
from lightning_commopt.watch.waiting import end_process

_RAISED_ELSEWHERE = re.compile(r"Caught \w+ (in .+)\.")

_NUM_EVENTS = 256
"""Number of events of buckets on the device that are kept: enough for the steps by which the host may run ahead."""

# The folder of this package may hold a backport of a module of Python, and the program's own folder a secrets.py: the
# watcher looks into neither before Python's own modules.
_START = """\
import sys
sys.path[:] = filter(None, sys.path)
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
spec = PathFinder.find_spec("lightning_commopt", sys.argv[4:])
package = sys.modules[spec.name] = module_from_spec(spec)
spec.loader.exec_module(package)
from lightning_commopt.watch.hangs.watcher import main
main()
"""


class WatchedRank:
    """This rank, with a watcher beside it until `close`. All ranks must create it.

    Attributes:
        observer: observes the gradient sync.
    """

    def __init__(
        self, *, after_s: float, action: str, folder: Path, main_address: tuple[str, int], device: torch.device
    ) -> None:
        self._marks = MarkWriter()
        self._world_size = dist.get_world_size()
        self._rank = dist.get_rank()
        self._main_address = main_address
        self._store = key_space("hangs")
        self._is_closed, self._meeting_is_over = threading.Event(), threading.Event()
        self._began_s = time.monotonic()
        self._fit_thread = threading.get_ident()
        settings = WatcherSettings(
            rank=self._rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            fit_thread=(self._fit_thread, threading.get_native_id()),
            after_s=after_s,
            action=action,
            folder=str(folder.absolute()),
            key=self._store.compare_set("key", "", secrets.token_hex(32)).decode(),
            world_size=self._world_size,
            has_gpu=device.type == "cuda",
        )
        root = str(Path(__file__).resolve().parents[3])  # the folder that this package was imported from
        own, others = socket.socketpair()
        with others:
            fds = (others.fileno(), self._marks.fd, make_dumpable())
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, *map(str, fds), root],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                env=os.environ | {SETTINGS_VARIABLE: json.dumps(asdict(settings))},
            )
        os.close(self._marks.fd)
        self.observer = MarkedSync(self)
        self._step = 0
        self._events: deque[tuple[int, int, torch.cuda.Event]] | None = (
            deque(maxlen=_NUM_EVENTS) if device.type == "cuda" else None
        )
        self._link = RankLink(own)
        self._link.start(self._answer)
        threading.Thread(target=self._meet, name="commopt-hang-monitor", daemon=True).start()

    def meet(self) -> bool:
        """Waits up to a minute from the start; returns whether all watchers have met, or cannot without rank 0."""
        return self._meeting_is_over.wait(max(0.0, self._began_s + times.MEET_S - time.monotonic()))

    def enter(self, phase: int, step: int) -> None:
        """Marks the beginning of a phase, an index into `lightning_commopt.watch.hangs.marks.PHASES`."""
        self._step = step
        self._marks.write(kinds.PHASE, phase, step)

    def mark(self, kind: int, code: int = 0, value: int = 0) -> None:
        self._marks.write(kind, code, value)

    def name_buckets(self, names: Mapping[int, Sequence[str]], *, are_all: bool = False) -> None:
        """Reports the parameters of buckets.

        Args:
            names: names of each bucket's parameters, by its index.
            are_all: whether these are all buckets of a model, each of which is one all-reduce without marks.
        """
        self._link.send(buckets=[[index, list(parameters)] for index, parameters in names.items()], are_all=are_all)

    def note_device(self, index: int) -> None:
        """Records an event after all work of a bucket on the device, without waiting."""
        if self._events is not None:
            event = torch.cuda.Event()
            event.record()
            self._events.append((self._step, index, event))

    def note_stop(self, reason: str) -> None:
        """Reports why the training of this rank ends before its last batch."""
        self._link.send(stop_reason=reason)

    def close(self, exception: BaseException | None = None) -> None:
        """Ends the watch, after a successful fit or after an exception."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        if exception is None:
            self._link.send(ended="finished")
        else:  # everything is sent now, because the watcher cannot ask for it later
            frames = [*traceback.walk_tb(exception.__traceback__)][-MAX_FRAMES:][::-1]
            raised = [(frame.f_code.co_filename, line or 0, frame.f_code.co_name) for frame, line in frames]
            ended, detail = _ending_of(exception)
            dump = describe_work(frames[0][0] if frames else None, self._events)
            self._link.send(ended=ended, detail=detail, raised=raised, dump=dump)
        threading.Thread(target=self._reap_watcher, daemon=True).start()

    def _reap_watcher(self) -> None:
        self._process.wait()  # otherwise it would stay as a zombie
        self._link.close()

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        if self._is_closed.is_set():
            return {}  # everything about this rank has been sent already
        if "stacks" in question:
            return {"stacks": own_stacks()}
        if "dump" in question:
            return describe_work(sys._current_frames().get(self._fit_thread), self._events)
        if "abort" in question:
            end_process(f"[rank {self._rank}] HangMonitor ends this rank, because action='abort' is set.")
        return {}

    def _meet(self) -> None:
        try:
            exchange_addresses(self._main_address, self._exchange, self._link)
        except EOFError:  # the watcher has ended, or the watch
            return
        except RuntimeError:  # the store has ended with rank 0: the launcher notices
            pass
        self._meeting_is_over.set()

    def _exchange(self, name: str, own: Any) -> list[Any]:
        """Returns the values of all ranks; waits until all have written theirs, or the watch ends."""
        keys = [f"{name}/{rank}" for rank in range(self._world_size)]
        self._store.set(keys[self._rank], json.dumps(own))
        pause_s = times.MEET_FIRST_POLL_S
        while not self._store.check(keys):  # a wait would block the store's other users
            if self._is_closed.wait(pause_s):
                raise EOFError
            is_awaited = time.monotonic() < self._began_s + times.MEET_S
            pause_s = times.MEET_FIRST_POLL_S if is_awaited else times.MEET_LAST_POLL_S
        return [json.loads(self._store.get(key)) for key in keys]


def exchange_addresses(
    main_address: tuple[str, int], exchange: Callable[[str, Any], list[Any]], link: RankLink
) -> None:
    """Makes the watcher listen on the interface towards the others, and sends it their addresses.

    ``exchange`` writes a value to the store under a name, and returns the values of all ranks.

    Raises:
        EOFError: the watcher has ended.
    """
    own = find_own_ip(*main_address)
    # MASTER_ADDR may be a name that means loopback on rank 0's own host.
    others = [ip for ip in exchange("ip", own) if not ip_address(ip).is_loopback]
    ip = find_own_ip(others[0]) if ip_address(own).is_loopback and others else own
    answer = link.request(None, listen=ip)
    if answer is None:
        raise EOFError
    link.send(peers=exchange("address", [ip, answer["port"], socket.gethostname()]))


def describe_work(
    frame: FrameType | None, events: Iterable[tuple[int, int, torch.cuda.Event]] | None
) -> dict[str, Any]:
    """Returns what a rank has called: the hook that a frame is in, the collectives, and the bucket on the device."""
    work: dict[str, Any] = {"owner": hook_owner(frame)}
    try:
        work["collectives"] = flight_records()
    except (RuntimeError, ValueError) as error:
        work["missing"] = f"collectives: {error}"
    if events is not None:
        try:
            pending = ((step, index) for step, index, event in [*events] if not event.query())
            work["device_step"], work["device_bucket"] = next(pending, (None, None))
        except RuntimeError as error:  # after an error of CUDA every call raises it again
            work["missing"] = f"buckets on the device: {_first_line(error)}"
    return work


class MarkedSync(SyncObserver):
    """Writes a mark for every event of a bucket, and of an exchange for those that a step waits between."""

    def __init__(self, rank: WatchedRank) -> None:
        self._rank = rank
        self._names: dict[int, tuple[str, ...]] = {}
        self._num_exchanges: Counter[int] = Counter()

    def ready(self, bucket: BucketInfo) -> BucketSync:
        self._name(bucket.index, bucket)
        self._rank.mark(kinds.BUCKET_READY, bucket.is_last, bucket.index)
        return _MarkedBucket(self._rank, bucket.index)

    def exchange(self, fragment: BucketInfo) -> BucketSync:
        self._name(fragment_key(fragment.index), fragment)
        number = self._num_exchanges[fragment.index]
        self._num_exchanges[fragment.index] += 1
        return _MarkedExchange(self._rank, fragment.index, number)

    def _name(self, key: int, bucket: BucketInfo) -> None:
        if self._names.get(key) != bucket.names:
            self._names[key] = bucket.names
            self._rank.name_buckets({key: bucket.names})


class _MarkedBucket(BucketSync):
    __slots__ = ("_index", "_rank")

    def __init__(self, rank: WatchedRank, index: int) -> None:
        self._rank, self._index = rank, index

    def note(self, event: int, wire_bytes: int = 0) -> None:
        self._rank.mark(kinds.BUCKET_START + event, 0, self._index)
        if event == END:
            self._rank.note_device(self._index)


class _MarkedExchange(BucketSync):
    __slots__ = ("_index", "_number", "_rank")

    def __init__(self, rank: WatchedRank, index: int, number: int) -> None:
        self._rank, self._index, self._number = rank, index, number

    def note(self, event: int, wire_bytes: int = 0) -> None:
        if event in (DUE, APPLIED):
            kind = kinds.EXCHANGE_DUE if event == DUE else kinds.EXCHANGE_APPLIED
            self._rank.mark(kind, self._index, self._number)


def _ending_of(exception: BaseException) -> tuple[str, str]:
    """Returns the state of a rank after an exception, and the exception in words."""
    if isinstance(exception, KeyboardInterrupt):
        return "interrupted", "KeyboardInterrupt"
    if type(exception).__name__ == "SIGTERMException":  # Lightning's, which it raises once a step is over
        return "terminated", "SIGTERM"
    if isinstance(exception, SystemExit):
        return "failed", f"SystemExit: {text_of(exception.code, repr)}"
    return "failed", _first_line(exception)


def _first_line(exception: BaseException) -> str:
    text = text_of(exception).strip().splitlines()
    if raised := _RAISED_ELSEWHERE.fullmatch("".join(text[:1])):
        return f"{text[-1]} {raised[1]}"  # torch adds the traceback of a dataloader's worker
    return f"{type(exception).__name__}: {text[0]}" if text else type(exception).__name__
