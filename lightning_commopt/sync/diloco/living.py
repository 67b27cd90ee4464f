"""LivingRanks: small collectives that continue without a rank that has died or is frozen.

Each rank writes its value to the store of the process group, and then a key that says it has arrived. The first rank
that has waited long enough decides whose values count. So a result depends on the store alone: a rank that dies later
cannot take it away, and a rank that was frozen finds the decision in the store and follows it.
"""

from __future__ import annotations

import atexit
import json
import pickle
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commopt.sync.diloco.errors import MembersError, store_errors
from lightning_commopt.sync.diloco.pulse import Listener, Pulse
from lightning_commopt.sync.store import key_space, poll
from lightning_commopt.text.formatting import ranks_text

_PIECE_BYTES = 2**22
"""Bytes in one message to the store, 4 MiB. A TCPStore refuses messages above 8 MiB."""
_LEAVE_S = 10.0
"""Longest time that rank 0, whose process may host the store, waits at the end for ranks that still read a result."""

_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.sum(0) / len(x),
    "sum": lambda x: x.sum(0),
    "avg": lambda x: x.sum(0) / len(x),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
    "product": lambda x: x.prod(0),
}

_T = TypeVar("_T")

_open: LivingRanks | None = None


class LivingRanks:
    """Collectives of the ranks whose processes run. All ranks that have not left must call the same ones in order.

    A collective waits for every rank that lives, however slow it is. A rank without a sign of life for ``patience_s``
    is left out until it shows one again.

    Args:
        store: part of a store that nothing else uses. The process that hosts it must live.
        rank: number of this rank.
        world_size: number of ranks.
        patience_s: seconds without a sign of life after which a rank is left out.
        timeout_s: seconds that a collective waits for ranks that live.
        log: called with a message when a rank is left out, and when it is back.

    Attributes:
        listener: finds ranks without a sign of life.
        is_closed: whether `close` was called.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        *,
        patience_s: float,
        timeout_s: float,
        log: Callable[[str], None],
    ) -> None:
        self._store, self.rank, self._log = store, rank, log
        self._all = tuple(range(world_size))
        self._patience_s, self._timeout_s = patience_s, timeout_s
        self._pulses = dist.PrefixStore("pulse", store)
        self._pulse = Pulse(self._pulses, rank, patience_s)
        self.listener = Listener(self._pulses, patience_s)
        self._number = self._num_ends = 0
        self._members = self._all
        self._old_keys: list[str] = []
        self._has_left = self.is_closed = False

    @classmethod
    def of_all_ranks(cls, *, patience_s: float, timeout_s: float, log: Callable[[str], None]) -> LivingRanks:
        """Returns an object for the ranks of the default group. All ranks must call it.

        The next call closes it, and so does the end of the process.
        """
        global _open
        if _open is None:
            atexit.register(_close_open)
        _close_open()
        rank, world_size = dist.get_rank(), dist.get_world_size()
        options: dict[str, Any] = {"patience_s": patience_s, "timeout_s": timeout_s, "log": log}
        _open = cls(key_space("living"), rank, world_size, **options)
        return _open

    def leave(self) -> None:
        """Lets the others continue without this rank. Its own further collectives return its own values at once."""
        if not self._has_left:
            self._has_left = True
            with suppress(RuntimeError):  # the store has ended with the process that hosts it
                self._store.set(f"left/{self.rank}", "")

    def wait_for_readers(self) -> None:
        """Makes rank 0, whose process may host the store, wait until all have read the results so far."""
        if not self._has_left:
            self._num_ends += 1
            prefix = f"has_read/{self._num_ends}"
            with suppress(RuntimeError):  # the store has ended with the process that hosts it
                self._store.set(f"{prefix}/{self.rank}", "")
            self._wait_as_host(prefix)

    def close(self) -> None:
        """Leaves once all have read the results, and shows no further sign of life."""
        if not self.is_closed:
            self.is_closed, had_left = True, self._has_left
            self.leave()
            if not had_left:
                self._wait_as_host("left")
            self._pulse.close()

    def _wait_as_host(self, prefix: str) -> None:
        def has_gone(rank: int) -> bool:
            return self._store.check([f"{prefix}/{rank}"]) or self._store.check([f"left/{rank}"])

        def are_all_gone() -> bool:
            remaining = [rank for rank in self._all[1:] if not has_gone(rank)]
            return self.listener.silent(remaining) == {*remaining}

        if self.rank == 0:
            with suppress(RuntimeError):  # another process hosts the store, and has ended
                poll(are_all_gone, _LEAVE_S)

    def barrier(self, purpose: str = "a barrier") -> None:
        """Waits until all living ranks have arrived."""
        self._gather(purpose, b"")

    def objects(self, value: _T, purpose: str) -> dict[int, _T]:
        """Returns the values of all living ranks, by rank. Values must be picklable."""
        return {rank: pickle.loads(data) for rank, data in self._gather(purpose, pickle.dumps(value)).items()}

    def tensors(self, value: Tensor, purpose: str) -> dict[int, Tensor]:
        """Returns the tensors of all living ranks, by rank, on the device of ``value``. Their shapes may differ."""
        flat = value.detach().cpu().contiguous().view(-1)
        packed = value.dtype, tuple(value.shape), flat.view(torch.uint8).numpy().tobytes()
        return {rank: _unpack(*other).to(value.device) for rank, other in self.objects(packed, purpose).items()}

    def _gather(self, purpose: str, value: bytes) -> dict[int, bytes]:
        """Returns the values of the ranks whose values count, by rank; ``purpose`` must be the same on all.

        Raises:
            MembersError: the store is lost, a living rank did not arrive in time, or ranks are in different
                collectives.
        """
        if self._has_left:
            return {self.rank: value}
        with store_errors():
            name, self._number = str(self._number), self._number + 1
            keys = [*self._write(f"{name}/value/{self.rank}", value), f"{name}/here/{self.rank}"]
            self._store.set(keys[-1], purpose)
            members = self._decide(name, purpose)
            self._check_same(name, members, purpose)
            if members == self._all:
                # All have arrived, and so have read the results of earlier collectives.
                for key in self._old_keys:
                    self._store.delete_key(key)
                self._old_keys = []
            self._old_keys += [*keys, *([f"{name}/members"] if self.rank == 0 else [])]
            self._log_changes(members, purpose)
            return {rank: self._read(f"{name}/value/{rank}") for rank in members}

    def _decide(self, name: str, purpose: str) -> tuple[int, ...]:
        arrival_keys, decision = [f"{name}/here/{rank}" for rank in self._all], f"{name}/members"

        def missing() -> list[int]:
            if self._store.check(arrival_keys):
                return []
            return [rank for rank, key in zip(self._all, arrival_keys, strict=True) if not self._store.check([key])]

        def is_over() -> bool:
            if self._store.check([decision]):
                return True
            absent = missing()
            return not {*absent} - self._left(absent) - self.listener.silent(absent)

        if not poll(is_over, self._timeout_s):
            raise MembersError(
                f"rank {self.rank} has waited {self._timeout_s:g} s in {purpose} for {ranks_text(missing())}, whose"
                " processes are running: all ranks must call the same collectives"
            )
        absent = missing()
        present = [rank for rank in self._all if rank not in absent]
        return tuple(json.loads(self._store.compare_set(decision, "", json.dumps(present))))

    def _left(self, ranks: Collection[int]) -> set[int]:
        return {rank for rank in ranks if self._store.check([f"left/{rank}"])}

    def _check_same(self, name: str, members: Collection[int], purpose: str) -> None:
        others = {rank: self._store.get(f"{name}/here/{rank}").decode() for rank in members}
        different = {rank: other for rank, other in others.items() if other != purpose}
        if different:
            rank = min(different)
            raise MembersError(
                f"rank {self.rank} is in {purpose}, and rank {rank} in {different[rank]}: all ranks must call the same"
                " collectives in the same order"
            )

    def _log_changes(self, members: tuple[int, ...], purpose: str) -> None:
        before, self._members = self._members, members
        if self.rank not in members:
            if self.rank not in before:
                return
            self._log(f"the others did not wait for {ranks_text([self.rank])} in {purpose}, which takes their result")
        elif self.rank == min(members):
            if missed := [rank for rank in before if rank not in members]:
                self._log(
                    f"{ranks_text(missed)}, which {'has' if len(missed) == 1 else 'have'} left or shown no sign of life"
                    f" for patience_s={self._patience_s:g}: {len(members)} of {len(self._all)} ranks continue in"
                    f" {purpose}"
                )
            if back := [rank for rank in members if rank not in before]:
                self._log(f"{ranks_text(back)} {'is' if len(back) == 1 else 'are'} back in {purpose}")

    def _write(self, key: str, value: bytes) -> list[str]:
        """Writes a value, and returns the keys that it takes."""
        pieces = [value[first : first + _PIECE_BYTES] for first in range(0, len(value), _PIECE_BYTES)]
        keys = [f"{key}/{number}" for number in range(len(pieces))]
        for piece_key, piece in zip(keys, pieces, strict=True):
            self._store.set(piece_key, piece)  # type: ignore[arg-type]  # it accepts bytes, too
        self._store.set(key, str(len(pieces)))
        return [*keys, key]

    def _read(self, key: str) -> bytes:
        return b"".join(self._store.get(f"{key}/{number}") for number in range(int(self._store.get(key))))


def _unpack(dtype: torch.dtype, shape: tuple[int, ...], data: bytes) -> Tensor:
    if not data:  # torch.frombuffer refuses empty memory
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(shape)


def _close_open() -> None:
    if _open is not None:
        _open.close()


def reduced(values: Collection[Tensor], op: Any) -> Tensor:
    """Returns the element-wise reduction of tensors of one shape, one from each rank.

    Args:
        values: the tensors.
        op: a name in `_REDUCTIONS`, in upper or lower case, or a member of ``dist.ReduceOp``; None for the sum.

    Raises:
        ValueError: ``op`` is none of these.
    """
    name = "sum" if op is None else op
    if not isinstance(name, str):
        name = next((x for x in _REDUCTIONS if op == getattr(dist.ReduceOp, x.upper(), None)), "")
    if name.lower() not in _REDUCTIONS:
        raise ValueError(f"with patience_s reduce_op must be one of {', '.join(_REDUCTIONS)}, got {op!r}")
    return _REDUCTIONS[name.lower()](torch.stack([*values]))
