"""Members: lets ranks agree on which of them take part in an exchange, and on whether it has succeeded.

They agree through the store of the process group, which depends on no rank except its host. Each announcement has a key
of its own, and if two ranks decide at the same time the store accepts the first decision. So no rank has a role that is
vacant when it dies, and a rank that was frozen finds in the store what was decided without it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from lightning_commopt.sync.diloco.errors import MembersError, store_errors
from lightning_commopt.sync.diloco.pulse import Listener
from lightning_commopt.sync.store import poll
from lightning_commopt.text.formatting import list_some

_RETRY_PATIENCE = 2
"""Factor of ``patience_s`` in a repeated attempt: a rank may notice only after ``patience_s`` of waiting for a message
that the attempt has failed, and come to the next one then."""

FIRST_MESH = ""
"""Name of the mesh (the connections) of all ranks in the first exchange."""

_DONE, _FAILED = "done", "failed"


@dataclass(frozen=True)
class Attempt:
    """One attempt of an exchange.

    Attributes:
        name: a name that no other attempt has.
        members: the ranks that take part, in ascending order.
        joiners: members that have missed an exchange, and need the global weights first.
        mesh: name of the connections among the members: `FIRST_MESH`, or the name of the attempt that creates them.
    """

    name: str
    members: tuple[int, ...]
    joiners: tuple[int, ...]
    mesh: str

    @property
    def leader(self) -> int:
        """The first rank that has the global weights."""
        return min(rank for rank in self.members if rank not in self.joiners)


class Members:
    """The ranks that take part in exchanges.

    Exchanges are numbered from 0 on every rank; those that a rank has missed count on it as well.

    Args:
        store: part of a store that nothing else uses. The process that hosts it must live.
        rank: number of this rank.
        world_size: number of ranks, all of which are members at first.
        patience_s: seconds that the others wait for a rank.
        timeout_s: seconds that this rank waits for the others after they have continued without it.
        log: called with a message whenever a rank is missed or joins again.
        listener: finds ranks without a sign of life, for which nobody waits any longer; None to wait in any case.

    Attributes:
        current: members of the last exchange; all of them have the same global weights.
        steady: ranks in `current` that have missed no exchange since `watch_steadiness`.
        is_behind: whether this rank has missed an exchange, and has not joined again.
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
        listener: Listener | None = None,
    ) -> None:
        self._store, self.rank, self._log, self._listener = store, rank, log, listener
        self._all = tuple(range(world_size))
        self._patience_s, self._timeout_s = patience_s, timeout_s
        self._number = self._attempt = 0
        self._mesh: str | None = None
        self._keys: list[str] = []
        self._old_keys: list[str] = []
        self.current = self._awaited = self._all
        self.steady = {*self._all}
        self.is_behind = False

    @property
    def are_all_current(self) -> bool:
        """Whether all ranks took part in the last exchange."""
        return self.current == self._all

    @property
    def are_complete(self) -> bool:
        """Whether no rank has missed an exchange since `watch_steadiness`."""
        return len(self.steady) == len(self._all)

    def watch_steadiness(self) -> None:
        """Starts to watch which ranks miss an exchange; earlier misses of ranks that have joined again do not count."""
        self.steady = {*self.current}

    def meet(self, *, wait_for_all: bool = False) -> Attempt | None:
        """Waits for the others, and returns an attempt of the next exchange in which this rank takes part.

        It waits at most ``patience_s`` for the members of the last exchange. A rank that joins again takes part if it
        has arrived by then.

        Args:
            wait_for_all: wait for ranks that have missed exchanges, too.

        Returns:
            The attempt, which `conclude` must end; None if the exchange has succeeded without this rank.

        Raises:
            MembersError: the store is lost, or no rank that has the global weights is left.
        """
        with store_errors():
            while True:
                attempt = self._decide(self._all if wait_for_all else self._awaited)
                if self.rank in attempt.members:
                    return attempt
                if self._wait_for_end(attempt):
                    if not self.is_behind:
                        self._log(
                            f"exchange {self._number} succeeded without rank {self.rank}, which came later than"
                            f" patience_s={self._patience_s:g} allows; what it trains is dropped until it joins again"
                        )
                    self._enter_next_exchange(attempt)
                    return None
                self._enter_next_attempt(attempt)

    def conclude(self, attempt: Attempt, *, is_success: bool) -> bool:
        """Ends an attempt; returns whether it has succeeded on all members. Otherwise its results must be dropped.

        Raises:
            MembersError: the store is lost.
        """
        with store_errors():
            if is_success:
                self._note(f"{attempt.name}/{_DONE}/{self.rank}")
            has_succeeded = self._end(attempt, is_success=is_success)
            (self._enter_next_exchange if has_succeeded else self._enter_next_attempt)(attempt)
            return has_succeeded

    def any_member(self, value: bool) -> bool:
        """Returns whether ``value`` is true on any rank that arrives in time. All must call it; none may be behind.

        Raises:
            MembersError: the store is lost.
        """
        yes_key, answer_key = (f"{self._number}/{word}" for word in ("yes", "answer"))
        with store_errors():
            if value:
                self._store.set(yes_key, "")
            while (attempt := self.meet()) is not None:
                if self.rank == attempt.leader:  # written before the attempt ends, so that all read the same answer
                    self._store.compare_set(answer_key, "", yes_key if self._store.check([yes_key]) else "no")
                if self.conclude(attempt, is_success=True):
                    break
            return self._store.get(answer_key).decode() == yes_key

    def wait_for(self, ranks: Sequence[int], attempt: Attempt, milestone: str) -> None:
        """Waits until each of ``ranks`` has called `tell` with the same milestone.

        It waits at most ``patience_s`` at a time, but longer as long as ranks call `tell_progress`.

        Raises:
            MembersError: a rank has not called it in time, or the store is lost.
        """
        keys = [f"{attempt.name}/{milestone}/{rank}" for rank in ranks]
        with store_errors():
            if keys and not self._wait(lambda: self._store.check(keys), self._patience_s, attempt):
                raise MembersError(f"ranks {list_some([*map(str, ranks)], 8)} are not {milestone}")

    def tell(self, attempt: Attempt, milestone: str) -> None:
        """Announces that this rank has reached a milestone, for which others may be in `wait_for`."""
        with store_errors():
            self._note(f"{attempt.name}/{milestone}/{self.rank}")

    def tell_progress(self, attempt: Attempt) -> None:
        """Announces progress to ranks that wait in an attempt, so that it may take longer than ``patience_s``."""
        with store_errors():
            self._store.add(f"{attempt.name}/progress", 1)

    def _decide(self, awaited: Sequence[int]) -> Attempt:
        name = f"{self._number}/{self._attempt}"
        decision = f"{name}/members"
        self._note(f"{name}/here/{self.rank}")
        if self.is_behind:  # this rank cannot decide, since those present may not have the global weights
            poll(lambda: self._store.check([decision]) or self._are_silent(self.current), self._timeout_s)
            if not self._store.check([decision]):
                raise MembersError(
                    f"rank {self.rank} cannot join again: none of ranks {list_some([*map(str, self.current)], 8)},"
                    " which have the global weights, has come. They may have ended the fit"
                )
            members = self._store.get(decision)
        else:
            patience_s = self._patience_s * (_RETRY_PATIENCE if self._attempt else 1)
            poll(lambda: self._have_arrived(name, awaited) or self._store.check([decision]), patience_s)
            present = [rank for rank in self._all if self._store.check([f"{name}/here/{rank}"])]
            members = self._store.compare_set(decision, "", json.dumps(present))
        ranks = tuple(json.loads(members))
        joiners = tuple(rank for rank in ranks if rank not in self.current)
        mesh = self._mesh
        # The connections of a failed attempt are not used again, since they may still carry its messages.
        if mesh is None or self._attempt > 0 or ranks != self.current:
            mesh = FIRST_MESH if self._number == self._attempt == 0 and ranks == self._all else name
        attempt = Attempt(name, ranks, joiners, mesh)
        self._log_changes(attempt)
        return attempt

    def _have_arrived(self, name: str, ranks: Sequence[int]) -> bool:
        """Returns whether all of ``ranks`` that show a sign of life have arrived."""
        if self._store.check([f"{name}/here/{rank}" for rank in ranks]):
            return True
        return self._are_silent([rank for rank in ranks if not self._store.check([f"{name}/here/{rank}"])])

    def _are_silent(self, ranks: Sequence[int]) -> bool:
        return self._listener is not None and self._listener.silent(ranks) == {*ranks}

    def _log_changes(self, attempt: Attempt) -> None:
        if self.rank != attempt.leader:
            return
        if missing := [str(rank) for rank in self._awaited if rank not in attempt.members]:
            self._log(
                f"exchange {self._number}: rank {list_some(missing, 8)} did not come within"
                f" patience_s={self._patience_s:g}; {len(attempt.members)} of {len(self._all)} ranks continue"
            )
        if attempt.joiners:
            self._log(
                f"exchange {self._number}: rank {list_some([*map(str, attempt.joiners)], 8)} joins again, from the"
                " global weights"
            )

    def _wait_for_end(self, attempt: Attempt) -> bool:
        """Returns whether an attempt without this rank has succeeded."""
        if not self.is_behind:  # otherwise this rank could not decide that the attempt has failed
            return self._end(attempt, is_success=True, patience=_RETRY_PATIENCE)
        if not poll(lambda: self._store.check([f"{attempt.name}/end"]), self._timeout_s):
            raise MembersError(
                f"rank {self.rank} has waited {self._timeout_s:g} s for the end of exchange {self._number}, in which"
                f" ranks {list_some([*map(str, attempt.members)], 8)} take part"
            )
        return self._store.get(f"{attempt.name}/end").decode() == _DONE

    def _end(self, attempt: Attempt, *, is_success: bool, patience: float = 1) -> bool:
        """Returns whether an attempt has succeeded. The first rank that knows decides, and all get its decision."""
        end, keys = f"{attempt.name}/end", [f"{attempt.name}/{_DONE}/{rank}" for rank in attempt.members]
        if is_success:
            self._wait(
                lambda: self._store.check(keys) or self._store.check([end]), patience * self._patience_s, attempt
            )
            is_success = self._store.check(keys)
        return self._store.compare_set(end, "", _DONE if is_success else _FAILED).decode() == _DONE

    def _wait(self, condition: Callable[[], bool], limit_s: float, attempt: Attempt) -> bool:
        """Waits for a condition; returns false once ``limit_s`` have passed without progress."""
        progress = 0
        while not poll(condition, limit_s):
            progress, before = self._store.add(f"{attempt.name}/progress", 0), progress
            if progress == before:
                return False
        return True

    def _enter_next_exchange(self, attempt: Attempt) -> None:
        self.current = self._awaited = attempt.members
        self._mesh = attempt.mesh
        self.steady &= {*attempt.members} - {*attempt.joiners}
        self.is_behind = self.rank not in attempt.members
        self._number, self._attempt = self._number + 1, 0
        # All members have left the exchange before this one, and other ranks read only decisions and ends of exchanges.
        for key in self._old_keys:
            self._store.delete_key(key)
        self._old_keys, self._keys = self._keys, []

    def _enter_next_attempt(self, attempt: Attempt) -> None:
        self._awaited = attempt.members
        self._attempt += 1

    def _note(self, key: str) -> None:
        self._store.set(key, "")
        self._keys.append(key)
