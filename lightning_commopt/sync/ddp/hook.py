"""The comm hook that drives a compressor in DDP, bucket by bucket.

DDP compares the annotations of a hook by identity and reads its ``__qualname__``. Therefore this module has no
``from __future__ import annotations``, and the hook is a bound method.
"""

import contextlib

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commopt.compat.torch import sparse_values
from lightning_commopt.compressors import Compressor, Layout, Rounds, State
from lightning_commopt.compressors.channel import Channel
from lightning_commopt.measure.observer import ARRIVE, END, SEND, START, BucketInfo, BucketSync, BucketSyncs, Observers
from lightning_commopt.sync.ddp.buckets import Bucket, BucketOrder, HeldBuckets, Relayout
from lightning_commopt.sync.executors import Executor
from lightning_commopt.sync.groups import BorrowedGroups
from lightning_commopt.sync.state import BucketStates, CommState, residuals_by_name
from lightning_commopt.text.formatting import list_some
from lightning_commopt.text.validation import warn_once


class GradientSyncError(RuntimeError):
    """Gradient sync failed; the message names the bucket and its parameters."""


class BucketHook:
    """Drives one compressor with DDP's buckets; `reduce` is the hook that DDP calls.

    Args:
        compressor: the compressor.
        channel: the collectives that it uses.
        names: names of the parameters that DDP synchronizes, by ``id``.
        executor: runs the gradient syncs.
        step: number of earlier gradient syncs.
        observers: notified of every bucket.
        groups: groups of ``channel`` that were borrowed for this hook, if any; `close` returns them.

    Attributes:
        lost: names of the parameters whose residuals `close` had to drop.
    """

    def __init__(
        self,
        compressor: Compressor,
        channel: Channel,
        names: dict[int, str],
        executor: Executor,
        step: int = 0,
        observers: Observers | None = None,
        groups: BorrowedGroups | None = None,
    ) -> None:
        self.compressor = compressor
        self._channel = channel
        self._names = names
        self._executor = executor
        self._groups = groups
        self._step = step
        self._observers = observers if observers is not None else Observers()
        self._layouts: dict[int, tuple[tuple[str, ...], Layout]] = {}
        self._order = BucketOrder(len(names))
        self._states: BucketStates = {}
        self._residuals: dict[str, Tensor] = {}
        self._relayout: Relayout | None = None
        self._under_way: set[int] = set()
        self.lost: tuple[str, ...] = ()

    def __getstate__(self) -> dict[str, object]:
        """Returns nothing, so that a copy is empty: DDP copies its list of hooks, but calls no hook of a copy."""
        return {}

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this rank has passed to collectives so far."""
        return self._channel.bytes_sent

    def reduce(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Starts to average one bucket; returns a future of its buffer, which then holds the average."""
        flat, parameters = bucket.buffer(), bucket.parameters()
        names = tuple(self._names[id(parameter)] for parameter in parameters)
        index, is_last = self._order.place(bucket.index(), bucket.is_last(), names)
        if index not in self._layouts or self._layouts[index][0] != names:
            self._layouts[index] = names, Layout.of(parameters, flat.dtype)
        sync = self._observers.ready(BucketInfo(index, sparse_values(flat).nbytes, names, is_last))
        item = Bucket(index, flat, self._layouts[index][1], names, self._step, sync)
        future = self._executor.future(flat)
        if self._relayout is None or not self._relayout.hold(item, future):
            self._executor.submit(lambda: self._sync(item), [future], lane=index)
        if is_last:
            self._step += 1
            self._sync_held()
        return future.future

    @property
    def has_only_resumed(self) -> bool:
        """Whether its states are from a checkpoint, and no gradient sync has used them yet."""
        return self._relayout is not None and self._relayout.is_unused

    def state(self) -> CommState:
        """Returns the state of the gradient syncs so far, without copying. Must be called between two backwards."""
        return CommState(self.compressor, self._step, dict(self._states), dict(self._residuals))

    def resume(self, buckets: BucketStates, residuals: dict[str, Tensor], step: int) -> None:
        """Continues from the state of another hook. All ranks must call it, between two backwards.

        Args:
            buckets: this rank's states of the same compressor, with the buckets that they belong to. These buckets are
                used even while DDP still has others.
            residuals: residuals that are in none of these states, by parameter name.
            step: number of earlier gradient syncs.
        """
        self._states, self._residuals, self._step = dict(buckets), dict(residuals), step
        self._protect_states()
        self._executor.protect(self._residuals)
        layouts = {index: (names, layout) for index, (names, layout, _) in buckets.items()}
        self._relayout = Relayout(layouts) if layouts else None

    def add_residuals(self, residuals: dict[str, Tensor]) -> None:
        """Adds residuals, which the `close` of another hook has returned, to the next gradients."""
        self._residuals.update(residuals)
        self._executor.protect(self._residuals)

    def close(self) -> dict[str, Tensor]:
        """Closes the executor, drops all states, and returns borrowed groups unless ranks may be out of step.

        Returns:
            This rank's residuals by parameter name. After a failure the residuals of buckets whose gradient sync did
            not end are left out, since they may be half updated.
        """
        if self._executor.close() and self._groups is not None:
            self._groups.return_to_pool()
        broken = [self._states.pop(index) for index in sorted(self._under_way) if index in self._states]
        if self.compressor.claims.keeps_residual:
            self.lost = tuple(name for names, _, _ in broken for name in names)
        self._retire_states()
        residuals, self._residuals = self._residuals, {}
        return residuals

    def _sync_held(self) -> None:
        if self._relayout is None:
            return
        held = self._relayout.end_backward()
        if self._relayout.is_over:
            self._relayout = None
        if held.buckets:
            self._executor.submit(lambda: self._sync_all(held), held.futures)

    def _sync_all(self, held: HeldBuckets) -> None:
        if held.saved:
            self._sync_as_saved(held)
        else:
            self._retire_states_alone()
            for bucket in held.buckets:
                self._sync(bucket)
        # These states were created in one lane, and later syncs use each of them in the lane of its bucket.
        self._protect_states()

    def _sync_as_saved(self, held: HeldBuckets) -> None:
        bytes_before = self._channel.bytes_sent
        all_syncs = BucketSyncs([bucket.sync for bucket in held.buckets])
        all_syncs.note(START)
        all_syncs.note(SEND)
        for bucket in held.laid_out_as_saved():
            self._sync(bucket)
        all_syncs.note(ARRIVE)
        for bucket in held.buckets:
            bucket.sync.note(END, self._channel.bytes_sent - bytes_before)
            bytes_before = self._channel.bytes_sent

    def _sync(self, bucket: Bucket) -> None:
        try:
            # Under manual optimization the user's autocast is on in the thread that calls the hook.
            with torch.no_grad(), torch.autocast(bucket.flat.device.type, enabled=False):
                bytes_before = self._channel.bytes_sent
                self._under_way.add(bucket.index)
                bucket.sync.note(START)
                _run(self._rounds(bucket), bucket.sync)
                self._under_way.remove(bucket.index)
                bucket.sync.note(END, self._channel.bytes_sent - bytes_before)
        except Exception as error:
            sync_error = GradientSyncError(
                f"gradient sync of bucket {bucket.index} failed ({type(error).__name__}: {error}); "
                f"its parameters: {list_some(bucket.names, 8)}"
            )
            # DDP formats it with the frames of this exception, but without those of its cause.
            raise sync_error.with_traceback(error.__traceback__) from error

    def _rounds(self, bucket: Bucket) -> Rounds:
        if bucket.is_compressible:
            state, residual = self._state_of(bucket), self._carried_residual(bucket)
            if residual is not None and not self.compressor.claims.keeps_residual:
                bucket.flat.add_(residual)
                residual = None
            return self.compressor.rounds(bucket.flat, bucket.layout, state, self._channel, residual)
        if bucket.flat.numel():
            kind = "sparse" if bucket.flat.is_sparse else str(bucket.flat.dtype).removeprefix("torch.")
            warn_once(
                f"comm_hook sends {kind} gradients uncompressed: it compresses only dense floating-point gradients."
            )
        return self._uncompressed_rounds(bucket.flat)

    def _uncompressed_rounds(self, flat: Tensor) -> Rounds:
        yield self._channel.all_reduce(flat.div_(self._channel.size))

    def _state_of(self, bucket: Bucket) -> State:
        if bucket.index in self._states:
            names, layout, state = self._states[bucket.index]
            if names == bucket.names and layout == bucket.layout:
                return state
            self._retire_states_alone()  # DDP has rebuilt its buckets
        state = self.compressor.init(bucket.layout, bucket.flat.device, bucket.step)
        self._states[bucket.index] = bucket.names, bucket.layout, state
        return state

    def _retire_states(self) -> None:
        """Drops the states, and keeps their residuals by parameter name."""
        self._residuals = residuals_by_name(self.compressor, self._states, self._residuals)
        self._states.clear()

    def _retire_states_alone(self) -> None:
        """Retires the states of all lanes from within a task."""
        with self._executor.alone():
            self._retire_states()
        self._executor.protect(self._residuals)

    def _protect_states(self) -> None:
        self._executor.protect([state for _, _, state in self._states.values()])

    def _carried_residual(self, bucket: Bucket) -> Tensor | None:
        """Removes and returns the residuals ``(n,)`` that dropped states have left for a bucket; None without any."""
        if not self._residuals or not any(name in self._residuals for name in bucket.names):
            return None
        residual = torch.zeros_like(bucket.flat)
        for name, part in zip(bucket.names, bucket.layout.split(residual), strict=True):
            if name in self._residuals:
                part.copy_(self._residuals.pop(name))
        return residual


def _run(rounds: Rounds, sync: BucketSync) -> None:
    """Runs ``rounds`` to its end. Collectives that overlap are noted as one message on the wire."""
    with contextlib.suppress(StopIteration):
        pending, is_sending = next(rounds), False
        while True:
            if not is_sending:
                sync.note(SEND)
            arrived, is_sending = pending.wait(), pending.is_followed
            if not is_sending:
                sync.note(ARRIVE)
            pending = rounds.send(arrived)
