"""PatientExchange: exchanges that continue without a rank that is late or dead, and let it join again when it comes.

An attempt works on copies of what it changes. Its results count only if all ranks that take part report success, so
that a fragment moves on all of them or on none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commopt.compressors import Compressor
from lightning_commopt.sync.diloco.errors import MembersError
from lightning_commopt.sync.diloco.exchange import Arrived, Exchange, Finished, GlobalWeights, LocalWeights
from lightning_commopt.sync.diloco.fragments import Fragment
from lightning_commopt.sync.diloco.members import FIRST_MESH, Attempt, Members
from lightning_commopt.sync.diloco.mesh import Mesh
from lightning_commopt.sync.diloco.outer import OuterSGD
from lightning_commopt.sync.diloco.pulse import Listener
from lightning_commopt.sync.diloco.report import Report
from lightning_commopt.sync.gather import map_tensors
from lightning_commopt.sync.store import key_space

_MAX_TRIES = 3
"""Maximum number of attempts among the same ranks. If so many have failed although all of these ranks came to each, the
reason is not a rank that has died or is frozen, but a message that takes longer than ``patience_s``, or a bug."""

_READY = "ready"


_Tried = tuple[GlobalWeights, Arrived, list[GlobalWeights] | None]
"""The result of an attempt on this rank, which counts if all ranks succeed: the global state of the fragment after the
exchange, the result for the model, and the global states of all fragments before the exchange if this rank joins, or
else None."""


class PatientExchange(Exchange):
    """Averages fragments over the ranks that arrive in time.

    Args:
        members: decides which ranks take part.
        store: part of a store for the addresses of connections.
        compressor: compresses the differences; None to send them uncompressed.
        patience_s: seconds that a message may take.
    """

    def __init__(
        self, members: Members, store: dist.Store, compressor: Compressor | None, *, patience_s: float
    ) -> None:
        super().__init__(None, compressor)
        self._members, self._store, self._patience_s = members, store, patience_s
        self._mesh: Mesh | None = None
        self._sent: Counter[str] = Counter()
        self._fragments: Sequence[GlobalWeights] = ()
        # The latest results by fragment. The model has them only from the step on in which they are applied.
        self._latest: dict[Fragment, Arrived] = {}
        self._mesh_name = FIRST_MESH
        self._mesh_of_state: dict[Fragment, str] = {}
        self._num_joins = 0

    @classmethod
    def of_all_ranks(
        cls,
        compressor: Compressor | None,
        *,
        patience_s: float,
        timeout_s: float,
        log: Callable[[str], None],
        listener: Listener | None = None,
    ) -> PatientExchange:
        """Returns an exchange among the ranks of the default group. All ranks must call it. See `Members`."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        options: dict[str, Any] = {"patience_s": patience_s, "timeout_s": timeout_s, "log": log, "listener": listener}
        members = Members(key_space("diloco_members"), rank, world_size, **options)
        return cls(members, key_space("diloco_meshes"), compressor, patience_s=patience_s)

    @property
    def bytes_sent(self) -> int:
        return self._sent["half_bytes"] // 2

    def begin(self, fragments: Sequence[GlobalWeights], arrived: Mapping[int, Arrived]) -> None:
        self._fragments, self._mesh_of_state, self._num_joins = fragments, {}, 0
        self._latest = {fragments[index].fragment: latest for index, latest in arrived.items()}

    def any_rank(self, value: bool) -> bool:
        return self._members.any_member(value)

    def run(
        self, global_state: GlobalWeights, local: LocalWeights, report: Report, step: int, outer: OuterSGD
    ) -> Arrived:
        """Exchanges one fragment among the ranks that arrive in time; see `Exchange.run`.

        Raises:
            MembersError: see `Members.meet`; or `_MAX_TRIES` attempts among the same ranks have failed.
        """
        local.wait()
        tries: Counter[tuple[int, ...]] = Counter()
        while (attempt := self._members.meet()) is not None:
            tried, cause = None, None
            try:
                tried = self._try(attempt, global_state, local, report, step, outer)
            except RuntimeError as error:
                cause = error
            if self._members.conclude(attempt, is_success=tried is not None):
                assert tried is not None
                arrived = self._accept(global_state, *tried)
                arrived.is_complete = self.is_complete and not attempt.joiners
                return arrived
            tries[attempt.members] += 1
            if tries[attempt.members] == _MAX_TRIES:
                raise MembersError(
                    f"an exchange among ranks {[*attempt.members]} has failed {_MAX_TRIES} times, although all of them"
                    f" were there: a message may take longer than patience_s={self._patience_s:g}, or one of them has"
                    " raised an error"
                ) from cause
        return replace(global_state.arrived(), is_complete=False, has_missed=True)

    def finish(self, final: Sequence[GlobalWeights]) -> Finished | None:
        """Sends the weights at the end of a fit to ranks that have missed an exchange since `watch_end`.

        Raises:
            MembersError: the others have ended the fit without this rank; or see `Members.meet`.
        """
        if self._members.are_complete:
            return None
        while (attempt := self._members.meet(wait_for_all=True)) is not None:
            received, is_success = None, False
            steady = [rank for rank in attempt.members if rank in self._members.steady]
            source = steady[0] if steady else attempt.leader
            others = [rank for rank in attempt.members if rank != source]
            try:
                self._connect(attempt)
                received = self._transfer(attempt, [*self._latest_state(), *final], source, others)
                is_success = True
            except RuntimeError:  # the attempt is concluded as a failure, and repeated with the remaining ranks
                pass
            if self._members.conclude(attempt, is_success=is_success):
                if received is None:
                    return None
                number, joins = len(self._fragments), self._members.rank in attempt.joiners
                joined = self._join(received[:number]) if joins else None
                return Finished([x.arrived() for x in received[number:]], joined)
        raise MembersError(
            f"rank {self._members.rank} was too late for the end of the fit: the others ended it with global weights"
            " that this rank does not have"
        )

    @property
    def is_complete(self) -> bool:
        return self._members.are_all_current

    def watch_end(self) -> None:
        self._members.watch_steadiness()

    def _try(
        self,
        attempt: Attempt,
        global_state: GlobalWeights,
        local: LocalWeights,
        report: Report,
        step: int,
        outer: OuterSGD,
    ) -> _Tried:
        self._connect(attempt)
        received = self._transfer(attempt, self._latest_state(), attempt.leader, attempt.joiners)
        own = local.num_joins == self._num_joins and received is None
        before = self._before(global_state, received, keeps_state=own)
        if own:
            local = replace(local, flat=local.flat.clone())
        else:  # the local weights were trained from global weights that have been dropped
            local = LocalWeights(before.weights.clone(), before.floats, before.integers, None, trained=())
            report = replace(report, samples=0.0)
        exchange = Exchange(self._mesh, self._compressor, attempt.members)
        arrived = exchange.run(before, local, report, step, outer)
        return before, arrived, received

    def _before(
        self, global_state: GlobalWeights, received: list[GlobalWeights] | None, *, keeps_state: bool
    ) -> GlobalWeights:
        """Returns a copy of a fragment's global state, for an attempt to change."""
        if received is not None:
            update = next(new for new in received if new.fragment is global_state.fragment)
            return replace(update, momentum=None if global_state.momentum is None else update.momentum)
        before = replace(global_state, state=map_tensors(torch.clone, global_state.state))
        if global_state.momentum is not None:
            before.momentum = global_state.momentum.clone()
        if not keeps_state:
            before.take(self._latest[global_state.fragment])
            before.state = {}
        elif before.state and self._mesh_of_state.get(global_state.fragment, FIRST_MESH) != self._mesh_name:
            # A compressor's state may have parts that ranks share, so all members start new ones. What is unsent
            # belongs to this rank alone and is kept.
            before.carried = self.unsent(before)
            before.state = {}
        return before

    def _accept(
        self, global_state: GlobalWeights, after: GlobalWeights, arrived: Arrived, received: list[GlobalWeights] | None
    ) -> Arrived:
        if received is not None:
            arrived.joined = self._join(received)
        global_state.momentum, global_state.state, global_state.carried = after.momentum, after.state, after.carried
        if any(global_state is other for other in self._fragments):  # false for copies, which the end of a fit uses
            self._latest[global_state.fragment] = arrived
            self._mesh_of_state[global_state.fragment] = self._mesh_name
        return arrived

    def _join(self, received: Sequence[GlobalWeights]) -> list[Arrived]:
        self._num_joins += 1
        for old, new in zip(self._fragments, received, strict=True):
            old.momentum, old.state, old.carried = new.momentum, {}, None
            self._latest[old.fragment] = new.arrived()
        return [self._latest[old.fragment] for old in self._fragments]

    def _latest_state(self) -> list[GlobalWeights]:
        current = [replace(global_state) for global_state in self._fragments]
        for global_state in current:
            global_state.take(self._latest.get(global_state.fragment, global_state))
        return current

    def _connect(self, attempt: Attempt) -> None:
        if self._mesh is None or self._mesh_name != attempt.mesh:
            self._mesh = None
            store = dist.PrefixStore(f"mesh/{attempt.mesh}", self._store)
            rank, timeout_s = self._members.rank, self._patience_s
            self._mesh = Mesh(store, rank, attempt.members, timeout_s=timeout_s, sent=self._sent)
            self._mesh_name = attempt.mesh

    def _transfer(
        self, attempt: Attempt, state: Sequence[GlobalWeights], source: int, to: Sequence[int]
    ) -> list[GlobalWeights] | None:
        """Sends global states, with momenta, from member ``source`` to others; returns them there, else None."""
        mesh, rank = self._mesh, self._members.rank
        assert mesh is not None
        received = None
        if rank == source:
            for other in to:
                tensors = [x for global_state in state for x in _tensors(global_state)]
                mesh.send(tensors, other, lambda: self._members.tell_progress(attempt))
        elif rank in to:
            arrived = iter(mesh.receive([x for global_state in state for x in _tensors(global_state)], source))
            received = [_like(global_state, arrived) for global_state in state]
            self._members.tell(attempt, _READY)
        self._members.wait_for(to, attempt, _READY)
        return received


def _tensors(global_state: GlobalWeights) -> list[Tensor]:
    return [
        global_state.weights,
        *([] if global_state.momentum is None else [global_state.momentum]),
        *global_state.floats,
        *global_state.integers,
    ]


def _like(global_state: GlobalWeights, tensors: Iterator[Tensor]) -> GlobalWeights:
    """Returns a global state from the next tensors, in the order of `_tensors`, without a compressor's state."""
    weights = next(tensors)
    momentum = None if global_state.momentum is None else next(tensors)
    floats, integers = [next(tensors) for _ in global_state.floats], [next(tensors) for _ in global_state.integers]
    return GlobalWeights(global_state.fragment, weights, floats, integers, momentum)
