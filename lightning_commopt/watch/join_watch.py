"""JoinWatch: reports what ranks wait for while they create the process group."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict
from datetime import timedelta
from types import TracebackType

import torch.distributed as dist

from lightning_commopt.launch.interfaces import find_listening, list_interfaces, resolve, try_port
from lightning_commopt.measure.plain import from_plain
from lightning_commopt.sync.store import Agreement, poll
from lightning_commopt.sync.strategies import RunningStrategy
from lightning_commopt.text.formatting import text_of
from lightning_commopt.watch import times
from lightning_commopt.watch.ended_ranks import EndedRanks
from lightning_commopt.watch.join_texts import (
    Arrival,
    activity_text,
    find_misplaced,
    missing_text,
    unconnected_text,
)
from lightning_commopt.watch.own_errors import log_own_errors
from lightning_commopt.watch.peers import namespace_name
from lightning_commopt.watch.waiting import end_waiting_rank, print_now


class JoinWatch:
    """Reports after some seconds why there is no process group yet; to be used in a ``with`` statement.

    A thread with its own connection to the store of the rendezvous writes this rank's name and address there, and reads
    which ranks have arrived. It prints on stderr why this rank cannot reach the store; on rank 0, which ranks have not
    arrived; on the lowest rank that still waits when all have, which addresses do not match. It prints again only when
    the reason changes. A rank that fails, or is found to have ended on this rank's host, is reported at once. As there
    will be no group then, the others get some seconds to notice, and are then ended: gloo would wait for five times the
    timeout. The thread raises nothing, and ends with the block.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        rank: int,
        world_size: int,
        backend: str,
        ended_ranks: EndedRanks | None = None,
    ) -> None:
        self._host = host
        self._port = port
        self._address = f"{host}:{port}"
        self._rank = rank
        self._world_size = world_size
        self._ended_ranks = ended_ranks
        self._backend = backend
        self._agreement: Agreement | None = None
        self._store: dist.Store | None = None
        self._is_store_lost = False
        self._starting: dict[int, int] = {}
        self._has_joined = False
        self._arrivals: dict[int, Arrival] = {}
        self._complete_at: float | None = None
        self._begin = time.monotonic()
        self._reported: str | None = None
        self._failure: str | None = None
        self._error: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commopt-join-watch", daemon=True)

    def __enter__(self) -> JoinWatch:
        self._thread.start()
        return self

    def note_joined(self) -> None:
        """Records that this rank has its process group; nothing is reported afterwards."""
        self._has_joined = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            first_line = text_of(error).partition("\n")[0]
            self._error = f"{type(error).__name__}: {first_line}"
        self._stop.set()
        self._thread.join(2 * times.JOIN_CLOSE_S)

    def _run(self) -> None:
        with log_own_errors("The watch of the start"):
            self._watch()
        with log_own_errors("The watch of the start"), suppress(RuntimeError):  # the store has ended
            self._leave()
        self._store = None

    def _watch(self) -> None:
        before: str | None = None
        in_vain_since: float | None = None
        while not self._stop.wait(self._pause_s):
            now, sentence = time.monotonic(), None
            is_late = now - self._begin >= times.JOIN_REPORT_AFTER_S
            try:
                sentence = self._look(is_late)
            except RuntimeError:
                self._agreement, self._store, self._is_store_lost = None, None, True
            is_seen_here = self._failure is None and self._find_ended()
            if self._failure is None:
                # It is only reported if it is found twice, as a rank may be about to arrive.
                if is_late and sentence == before:
                    self._report(sentence)
                before = sentence
                continue
            if self._rank == 0 or is_seen_here or self._failure.startswith("rank 0 "):
                self._report(self._failure)
            in_vain_since = in_vain_since or now
            if now - in_vain_since >= times.JOIN_GRACE_S and not self._stop.is_set():
                end_waiting_rank(self._rank, f"{self._failure}.", times.JOIN_GRACE_S)

    @property
    def _pause_s(self) -> float:
        is_agreeing = self._agreement is not None and bool(self._agreement.missing)
        return times.JOIN_ANSWER_S if is_agreeing else times.JOIN_LOOK_S

    def _report(self, sentence: str | None) -> None:
        if sentence is not None and sentence != self._reported and not (self._stop.is_set() and self._error is None):
            self._reported = sentence
            waited_s = time.monotonic() - self._begin
            states = activity_text(self._starting)
            print_now(f"[rank {self._rank}] {waited_s:.0f} s in init_process_group: {sentence}{states}.")

    def _look(self, is_late: bool) -> str | None:
        """Answers other ranks, and looks for failures.

        Returns:
            Why this rank still waits; None if that is unknown, or another rank reports it.

        Raises:
            RuntimeError: the store has ended.
        """
        reason = self._connect(times.JOIN_TRY_S) if self._agreement is None else None
        self._agree()
        if self._store is not None and self._failure is None and self._store.check(["failed"]):
            self._failure = self._store.get("failed").decode()
        if self._has_joined:
            return None
        # Rank 0 opens the store itself, except under torchrun.
        if reason is not None and (self._rank != 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"):
            return reason
        return self._find_others(self._store) if self._store is not None and is_late else None

    def _find_ended(self) -> bool:
        """Looks for a rank of this host that has ended, and reports it to the others; returns whether there is one."""
        if self._ended_ranks is None or self._has_joined:
            return False
        self._failure = self._ended_ranks.find()
        if self._failure is not None and self._store is not None:
            with suppress(RuntimeError):  # the store may have ended with that rank
                self._store.compare_set("failed", "", self._failure)
        return self._failure is not None

    def _agree(self) -> bool:
        """Answers other ranks, or looks for rank 0's answer; returns whether it has come, and writes the arrival."""
        if self._agreement is None:
            return False
        self._agreement.advance()
        if self._store is None and self._agreement.name is not None:
            store = dist.PrefixStore(self._agreement.name, self._agreement.store)
            store.set(f"here/{self._rank}", json.dumps(asdict(self._arrival())))
            self._store = store
        if self._has_joined and self._store is not None:
            self._store.set(f"joined/{self._rank}", "")
        return self._store is not None

    def _connect(self, limit_s: float) -> str | None:
        """Connects to the store; returns why that failed, None if it succeeded."""
        start = f"rank {self._rank} on {socket.gethostname()} cannot reach rank 0: "
        failure = try_port(self._host, self._port, limit_s=limit_s)
        if failure is not None:
            if failure.is_refused and self._is_store_lost:
                self._failure = f"rank 0 has ended, and with it the store at {self._address}: its output shows why"
            return start + failure.message
        # In a thread: if the program at this port is no store, torch waits for its answer without limit.
        connecting = threading.Thread(target=self._open_store, name="commopt-join-watch", daemon=True)
        connecting.start()
        connecting.join(limit_s)
        if self._agreement is None:
            return (
                f"{start}{self._address} accepts connections, but does not answer like torch's store: does another"
                " program listen there?"
            )
        return None

    def _open_store(self) -> None:
        with suppress(RuntimeError):
            limit = timedelta(seconds=times.JOIN_TRY_S)
            store = dist.TCPStore(self._host, self._port, None, False, timeout=limit, wait_for_workers=False)
            self._agreement = Agreement(dist.PrefixStore("commopt/join", store), self._rank, self._world_size)

    def _arrival(self) -> Arrival:
        interfaces = list_interfaces()
        return Arrival(
            rank=self._rank,
            host=socket.gethostname(),
            network=namespace_name("net") or socket.gethostname(),
            listening=find_listening(self._backend, interfaces),
            interfaces={interface.name: interface.with_prefix for interface in interfaces},
        )

    def _find_others(self, store: dist.Store) -> str | None:
        if self._rank > 0 and not store.check([f"joined/{rank}" for rank in range(self._rank)]):
            return None  # a lower rank waits too, and reports
        arrivals = self._read_arrivals(store)
        if len(arrivals) < self._world_size:
            if self._rank != 0:
                return None
            missing = sorted(set(range(self._world_size)) - self._arrivals.keys())
            processes = {} if self._ended_ranks is None else self._ended_ranks.processes()
            self._starting = {rank: pid for rank, pid in processes.items() if rank in missing}
            return missing_text(self._address, arrivals, missing, self._starting)
        self._starting = {}
        self._complete_at = self._complete_at or time.monotonic()
        if time.monotonic() - self._complete_at < times.JOIN_REPORT_AFTER_S / 2:
            return None
        joined = [rank for rank in range(self._world_size) if store.check([f"joined/{rank}"])]
        return unconnected_text(self._address, arrivals, joined, resolve(self._host))

    def _read_arrivals(self, store: dist.Store) -> list[Arrival]:
        for rank in range(self._world_size):
            if rank not in self._arrivals and store.check([f"here/{rank}"]):
                self._arrivals[rank] = from_plain(Arrival, json.loads(store.get(f"here/{rank}")))
        return [self._arrivals[rank] for rank in sorted(self._arrivals)]

    def _leave(self) -> None:
        if self._error is not None:
            self._explain_error()
        elif self._store is not None:
            self._store.set(f"joined/{self._rank}", "")

    def _explain_error(self) -> None:
        """Reports this rank's error to the others, and its reason as far as known."""
        if self._failure is not None:
            return
        limit_s = times.JOIN_CLOSE_S / 4
        # The store of rank 0 may not listen yet.
        poll(lambda: self._agreement is not None or self._connect(limit_s) is None, times.JOIN_CLOSE_S / 3)
        reason = self._connect(limit_s) if self._agreement is None else None
        if self._agreement is None:
            self._report(reason if self._rank > 0 and self._reported is None else None)
            return
        poll(self._agree, times.JOIN_CLOSE_S / 2)
        store = self._store
        if store is None:
            return
        store.compare_set("failed", "", f"rank {self._rank} on {socket.gethostname()} has failed: {self._error}")
        poll(lambda: self._agree() and len(self._read_arrivals(store)) == self._world_size, times.JOIN_CLOSE_S / 2)
        arrivals = self._read_arrivals(store)
        master = resolve(self._host)
        if len(arrivals) == self._world_size and find_misplaced(arrivals, master)[0]:
            self._report(unconnected_text(self._address, arrivals, (), master))


def watch_joining(strategy: RunningStrategy, backend: str | None) -> AbstractContextManager[JoinWatch | None]:
    """Returns a context in which to make the process group: a `JoinWatch` if there are other ranks to wait for."""
    world_size = strategy.num_nodes * strategy.num_processes
    environment = strategy.cluster_environment
    backend = backend or ("nccl" if strategy.root_device.type == "cuda" else "gloo")
    is_known = bool({"gloo", "nccl"} & set(re.split("[:,]", backend)))
    if world_size == 1 or environment is None or dist.is_initialized() or not is_known:
        return nullcontext()
    first = strategy.node_rank * strategy.num_processes
    return JoinWatch(
        environment.main_address,
        environment.main_port,
        rank=first + strategy.local_rank,
        world_size=world_size,
        backend=backend,
        ended_ranks=EndedRanks(strategy, range(first, first + strategy.num_processes)),
    )
