"""What a rank does for its watcher: starts it, writes marks, and answers what only its own process knows."""

from __future__ import annotations

import itertools
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from lightning_commopt.compat.torch import default_store, flight_recorder_json
from lightning_commopt.measure.observer import BucketInfo, BucketSync, SyncObserver
from lightning_commopt.watch.hangs import marks as kinds
from lightning_commopt.watch.hangs.marks import MarkWriter
from lightning_commopt.watch.hangs.network import own_ip
from lightning_commopt.watch.hangs.rank_link import RankLink
from lightning_commopt.watch.hangs.stacks import make_dumpable
from lightning_commopt.watch.hangs.watcher import SETTINGS_VARIABLE

_POLL_S = 0.02
_MEET_S = 60.0
_NUM_EVENTS = 256
_NUM_FRAMES = 200

# By the default group, whose store must not see a run's keys twice.
_runs: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()


class WatchedRank:
    """This rank, with a watcher beside it until `close`. All ranks must make it.

    Args:
        after_s: seconds without progress.
        action: "report" or "abort".
        folder: where watchers leave their files; the same on all ranks of a host.
        main_address: of rank 0's host, with the port where ranks meet.
        device: whose progress counts.

    Attributes:
        observer: of the gradient sync.
    """

    def __init__(
        self, *, after_s: float, action: str, folder: Path, main_address: tuple[str, int], device: torch.device
    ) -> None:
        self._marks = MarkWriter()
        self._world_size = dist.get_world_size()
        self._rank = dist.get_rank()
        self._main_address = main_address
        self._store = _store_of_run()
        self._is_closed, self._has_met = threading.Event(), threading.Event()
        settings = {
            "rank": self._rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "fit_thread": threading.get_ident(),
            "after_s": after_s,
            "action": action,
            "folder": str(folder.absolute()),
            "token": self._shared_token(),
            "world_size": self._world_size,
            "has_nccl": device.type == "cuda",
        }
        own, others = socket.socketpair()
        with others:
            fds = (others.fileno(), self._marks.fd, make_dumpable())
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lightning_commopt.watch.hangs.watcher", *map(str, fds)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": _python_path(), SETTINGS_VARIABLE: json.dumps(settings)},
            )
        os.close(self._marks.fd)
        self.observer = MarkedSync(self)
        self._events: deque[tuple[int, torch.cuda.Event]] | None = (
            deque(maxlen=_NUM_EVENTS) if device.type == "cuda" else None
        )
        self._link = RankLink(own)
        self._link.start(self._receive)

    def meet(self) -> bool:
        """Waits until the watchers of all ranks know each other; returns whether they do."""
        return self._has_met.wait(_MEET_S)

    def enter(self, phase: int, step: int) -> None:
        """A phase begins.

        Args:
            phase: index into `lightning_commopt.watch.hangs.phases.PHASES`.
            step: optimizer steps before it.
        """
        self._marks.write(kinds.PHASE, phase, step)

    def mark(self, kind: int, code: int = 0, value: int = 0) -> None:
        """Writes a mark of another kind."""
        self._marks.write(kind, code, value)

    def name_buckets(self, names: Mapping[int, Sequence[str]], *, are_all: bool = False) -> None:
        """Says which parameters buckets have.

        Args:
            names: by the index of a bucket.
            are_all: whether these are all buckets of a model, each of which is one all-reduce that nobody marks.
        """
        self._link.send(buckets=[[index, list(each)] for index, each in names.items()], are_all=are_all)

    def note_device(self, index: int) -> None:
        """Notes that the device has been given all work of a bucket; nothing is waited for."""
        if self._events is not None:
            event = torch.cuda.Event()
            event.record()
            self._events.append((index, event))

    def close(self, exception: BaseException | None = None) -> None:
        """Ends the watch.

        Args:
            exception: that has ended the fit; None if it has ended well.
        """
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        if exception is None:
            self._link.send(ended="finished")
        else:  # nobody can ask for it later
            frames = traceback.extract_tb(exception.__traceback__)[-_NUM_FRAMES:]
            raised = [(frame.filename, frame.lineno or 0, frame.name) for frame in reversed(frames)]
            self._link.send(ended="failed", detail=_first_line(exception), raised=raised, dump=self._dump())
        threading.Thread(target=self._see_off, daemon=True).start()

    def _see_off(self) -> None:
        self._process.wait()  # else it stays as a zombie
        self._link.close()

    def _receive(self, message: dict[str, Any]) -> None:
        if self._is_closed.is_set():
            return
        if "port" in message:
            threading.Thread(target=self._meet, args=(message["port"],), daemon=True).start()
        elif "dump" in message:
            self._link.send(answer=message["request"], **self._dump())
        elif "abort" in message:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def _dump(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        try:
            found["collectives"] = json.loads(flight_recorder_json())
        except (RuntimeError, ValueError) as error:
            found["missing"] = f"collectives: {error}"
        if self._events is not None:
            found["device_bucket"] = next((index for index, event in [*self._events] if not event.query()), None)
        return found

    def _meet(self, port: int) -> None:
        """Exchanges the watchers' addresses through the store, and tells them to this rank's."""
        address = [own_ip(*self._main_address), port, socket.gethostname()]
        keys = [f"address/{rank}" for rank in range(self._world_size)]
        deadline = time.monotonic() + _MEET_S
        try:
            self._store.set(keys[self._rank], json.dumps(address))
            while not self._store.check(keys):  # a wait would block the store's other users
                if self._is_closed.is_set() or time.monotonic() > deadline:
                    return
                time.sleep(_POLL_S)
            self._link.send(peers=[json.loads(self._store.get(key)) for key in keys])
            self._has_met.set()
        except RuntimeError:  # the store has gone, and with it rank 0: the launcher knows
            return

    def _shared_token(self) -> str:
        return self._store.compare_set("token", "", secrets.token_hex(16)).decode()


class MarkedSync(SyncObserver):
    """Writes a mark for everything that happens to a bucket.

    Args:
        rank: whose marks they are.
    """

    def __init__(self, rank: WatchedRank) -> None:
        self._rank = rank
        self._names: dict[int, tuple[str, ...]] = {}

    def ready(self, bucket: BucketInfo) -> BucketSync:
        """Marks a bucket as ready."""
        if self._names.get(bucket.index) != bucket.names:
            self._names[bucket.index] = bucket.names
            self._rank.name_buckets({bucket.index: bucket.names})
        self._rank.mark(kinds.BUCKET_READY, bucket.is_last, bucket.index)
        return _MarkedBucket(self._rank, bucket.index)


class _MarkedBucket(BucketSync):
    __slots__ = ("_index", "_rank")

    def __init__(self, rank: WatchedRank, index: int) -> None:
        self._rank, self._index = rank, index

    def start(self) -> None:
        self._rank.mark(kinds.BUCKET_START, 0, self._index)

    def send(self) -> None:
        self._rank.mark(kinds.COLLECTIVE_START, 0, self._index)

    def arrive(self) -> None:
        self._rank.mark(kinds.COLLECTIVE_END, 0, self._index)

    def end(self, wire_bytes: int) -> None:
        self._rank.mark(kinds.BUCKET_END, 0, self._index)
        self._rank.note_device(self._index)


def _store_of_run() -> dist.Store:
    world = dist.group.WORLD
    assert isinstance(world, dist.ProcessGroup)
    number = next(_runs.setdefault(world, itertools.count()))
    return dist.PrefixStore(f"commopt/hangs/{number}", default_store())


def _first_line(exception: BaseException) -> str:
    text = str(exception).strip().splitlines()
    return f"{type(exception).__name__}: {text[0]}" if text else type(exception).__name__


def _python_path() -> str:
    """Returns a path on which the watcher finds this package, wherever it was imported from."""
    root = str(Path(__file__).resolve().parents[3])
    return os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
