"""JoinWatch: says what ranks wait for while the process group is made."""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from lightning_commopt.launch.interfaces import find_listening, list_interfaces
from lightning_commopt.launch.ports import try_port
from lightning_commopt.watch.join_texts import Arrival, find_odd, missing_text, unconnected_text

_TELL_AFTER_S = 20.0
_LOOK_S = 1.0
_TRY_S = 3.0
_CLOSE_S = 3.0
_GRACE_S = 5.0

_num_joins = 0


class JoinWatch:
    """Says once, after some seconds, why the process group does not come into being; to be used in a ``with``.

    A thread with a connection of its own to the store of the rendezvous leaves this rank's name and address there, and
    looks who else has come. It says a sentence on stderr: a rank that cannot reach the store, why; rank 0, which ranks
    have not come; the lowest rank that still waits, which addresses do not fit when all are there. It speaks again
    only when it knows something else. A rank that fails is told at once; as there will be no group then, the others get
    some seconds to find out by themselves, and end. gloo would wait for five times the timeout. The thread raises
    nothing, and ends with the block.

    All ranks must use it equally often.

    Args:
        host: name or address of the store, ``MASTER_ADDR``.
        port: of the store, ``MASTER_PORT``.
        rank: this rank.
        world_size: number of ranks.
        backend: of the process group.
    """

    def __init__(self, host: str, port: int, *, rank: int, world_size: int, backend: str) -> None:
        global _num_joins
        self._host = host
        self._port = port
        self._address = f"{host}:{port}"
        self._rank = rank
        self._world_size = world_size
        self._backend = backend
        self._prefix = f"commopt/join/{_num_joins}"  # torchrun's store outlives process groups
        _num_joins += 1
        self._store: dist.Store | None = None
        self._is_store_lost = False
        self._arrivals: dict[int, Arrival] = {}
        self._complete_at: float | None = None
        self._begin = time.monotonic()
        self._told: str | None = None
        self._failure: str | None = None
        self._error: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commopt-join-watch", daemon=True)

    def __enter__(self) -> JoinWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            first_line = str(error).partition("\n")[0]
            self._error = f"{type(error).__name__}: {first_line}"
        self._stop.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        with suppress(Exception):  # what is only told must not end training
            self._watch()
        with suppress(Exception):
            self._leave()
        self._store = None

    def _watch(self) -> None:
        before: str | None = None
        in_vain_since: float | None = None
        while not self._stop.wait(_LOOK_S):
            now = time.monotonic()
            is_late = now - self._begin >= _TELL_AFTER_S
            self._failure = self._failure or self._find_failure()
            if self._failure is None:
                sentence = self._find_reason(is_late)
                # Twice the same, as a rank may come in this very moment.
                if is_late and sentence == before:
                    self._tell(sentence)
                before = sentence
                continue
            if self._rank == 0 or self._failure.startswith("rank 0 "):
                self._tell(self._failure)
            in_vain_since = in_vain_since or now
            if now - in_vain_since >= _GRACE_S:
                self._end_process(self._failure)

    def _tell(self, sentence: str | None) -> None:
        if sentence is not None and sentence != self._told and not (self._stop.is_set() and self._error is None):
            self._told = sentence
            waited_s = time.monotonic() - self._begin
            sys.stdout.flush()
            sys.stderr.write(f"[rank {self._rank}] {waited_s:.0f} s in init_process_group: {sentence}.\n")
            sys.stderr.flush()

    def _find_reason(self, is_late: bool) -> str | None:
        """Returns why this rank still waits; None if it does not know, or another rank says it."""
        if self._store is None:
            why = self._unreachable(_TRY_S)
            if why is not None and (self._rank != 0 or _is_agents_store()):
                return why
        if self._store is None or not is_late:
            return None
        try:
            return self._find_others(self._store)
        except RuntimeError:
            self._store, self._is_store_lost = None, True
            return None

    def _unreachable(self, limit_s: float) -> str | None:
        """Connects to the store; returns why that failed, None if it is done."""
        why = self._connect(limit_s)
        return None if why is None else f"rank {self._rank} on {socket.gethostname()} cannot come to rank 0: {why}"

    def _connect(self, limit_s: float) -> str | None:
        """Connects to the store and leaves this rank's arrival there; returns why that failed, None if it is done."""
        failure = try_port(self._host, self._port, limit_s=limit_s)
        if failure is not None:
            return failure.message
        # In a thread of its own: torch waits without limit for a program that is no store to answer.
        connecting = threading.Thread(target=self._open_store, name="commopt-join-watch", daemon=True)
        connecting.start()
        connecting.join(limit_s)
        if self._store is None:
            return (
                f"{self._address} takes connections, but does not answer as torch's store does: does another"
                " program listen there?"
            )
        return None

    def _open_store(self) -> None:
        with suppress(RuntimeError):
            store = dist.PrefixStore(
                self._prefix,
                dist.TCPStore(
                    self._host, self._port, None, False, timeout=timedelta(seconds=_TRY_S), wait_for_workers=False
                ),
            )
            store.set(f"here/{self._rank}", self._arrival().to_json())
            self._store = store

    def _arrival(self) -> Arrival:
        interfaces = list_interfaces()
        return Arrival(
            rank=self._rank,
            host=socket.gethostname(),
            network=_network_of_process(),
            listening=find_listening(self._backend, interfaces),
            interfaces={each.name: each.with_prefix for each in interfaces},
        )

    def _find_others(self, store: dist.Store) -> str | None:
        if self._rank > 0 and not store.check([f"joined/{rank}" for rank in range(self._rank)]):
            return None  # a lower rank waits too, and says why
        arrivals = self._look_who_is_here(store)
        if len(arrivals) < self._world_size:
            return missing_text(self._address, arrivals, self._world_size) if self._rank == 0 else None
        self._complete_at = self._complete_at or time.monotonic()
        if time.monotonic() - self._complete_at < _TELL_AFTER_S / 2:
            return None
        joined = [rank for rank in range(self._world_size) if store.check([f"joined/{rank}"])]
        return unconnected_text(self._address, arrivals, joined, _resolve(self._host))

    def _look_who_is_here(self, store: dist.Store) -> list[Arrival]:
        for rank in range(self._world_size):
            if rank not in self._arrivals and store.check([f"here/{rank}"]):
                self._arrivals[rank] = Arrival.from_json(store.get(f"here/{rank}").decode())
        return [self._arrivals[rank] for rank in sorted(self._arrivals)]

    def _find_failure(self) -> str | None:
        """Returns which other rank has failed while it joined, so that there will be no group."""
        if self._store is not None:
            try:
                return self._store.get("failed").decode() if self._store.check(["failed"]) else None
            except RuntimeError:
                self._store, self._is_store_lost = None, True
        if self._is_store_lost:
            gone = try_port(self._host, self._port, limit_s=_TRY_S)
            if gone is not None and gone.kind == "refused":
                return f"rank 0 has ended, and with it the store at {self._address}: its output tells why"
        return None

    def _end_process(self, reason: str) -> None:
        if not self._stop.is_set():
            who = f"[rank {self._rank}]"
            sys.stderr.write(f"{who} {reason}.\n{who} This rank has waited for {_GRACE_S:g} s, and ends.\n")
            sys.stderr.flush()
            os._exit(1)

    def _leave(self) -> None:
        if self._error is not None:
            self._explain_error()
        elif self._store is not None:
            self._store.set(f"joined/{self._rank}", "")

    def _explain_error(self) -> None:
        """Tells the others of this rank's error, and what is known of its reason."""
        if self._failure is not None:
            return
        why = self._unreachable(_CLOSE_S / 4) if self._store is None else None
        if self._store is None:
            self._tell(why if self._rank > 0 and self._told is None else None)
            return
        self._store.compare_set("failed", "", f"rank {self._rank} on {socket.gethostname()} has failed: {self._error}")
        deadline = time.monotonic() + _CLOSE_S / 2
        while len(arrivals := self._look_who_is_here(self._store)) < self._world_size and time.monotonic() < deadline:
            time.sleep(_CLOSE_S / 20)
        master = _resolve(self._host)
        if len(arrivals) == self._world_size and find_odd(arrivals, master)[0]:
            self._tell(unconnected_text(self._address, arrivals, (), master))


def watch_joining(strategy: Any, backend: str | None) -> AbstractContextManager[object]:
    """Returns what to make the process group in: a `JoinWatch`, where there is something to wait for.

    Args:
        strategy: Lightning's ``DDPStrategy``, of a Trainer or of Fabric, about to make the group.
        backend: of the group; None for that of the device.
    """
    world_size = strategy.num_nodes * strategy.num_processes
    environment = strategy.cluster_environment
    backend = backend or ("nccl" if strategy.root_device.type == "cuda" else "gloo")
    if world_size == 1 or environment is None or dist.is_initialized() or not {"gloo", "nccl"} & set(_words(backend)):
        return nullcontext()
    return JoinWatch(
        environment.main_address,
        environment.main_port,
        rank=strategy.node_rank * strategy.num_processes + strategy.local_rank,
        world_size=world_size,
        backend=backend,
    )


def _words(backend: str) -> list[str]:
    return re.split("[:,]", backend)


def _is_agents_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _network_of_process() -> str:
    """Returns what tells this network namespace, and so this host or container, from all others."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"


def _resolve(host: str) -> str | None:
    try:
        return socket.gethostbyname(host)
    except OSError:
        return None
