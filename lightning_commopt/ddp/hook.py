"""DDP's side of a compressor.

DDP compares the annotations of a hook by identity and reads its ``__qualname__``: hence no
``from __future__ import annotations`` here, and a bound method as the hook.
"""

import contextlib
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.collectives.channel import Channel, node_channel, twin_group
from lightning_commopt.compressors import Compressor, Layout, Rounds, State
from lightning_commopt.compressors.hierarchical import placed_on_nodes
from lightning_commopt.ddp.buckets import BucketOrder, synced_parameters
from lightning_commopt.ddp.executors import Driver, SideStream, WorkerThread
from lightning_commopt.ddp.resumed_layout import Bucket, Kept, Relayout
from lightning_commopt.ddp.state import BucketStates, CommState, owed_by_name
from lightning_commopt.kernels import c_library
from lightning_commopt.measure.observer import BucketInfo, BucketSync, BucketSyncs, Observers
from lightning_commopt.plan import OptionError
from lightning_commopt.validation import warn_once

_NAMES_IN_MESSAGE = 8


class GradientSyncError(RuntimeError):
    """An exchange failed; the message names the bucket and its parameters."""


class BucketHook:
    """Gives DDP's buckets to one compressor; `reduce` is the hook that DDP calls.

    Args:
        compressor: averages the buckets.
        channel: the ranks to exchange with.
        names: of the parameters whose gradients DDP exchanges, by ``id``.
        driver: runs the exchanges, in the order of the buckets.
        step: exchanges of whole gradients that were made before this hook came.
        observers: are told of every bucket.
    """

    def __init__(
        self,
        compressor: Compressor,
        channel: Channel,
        names: dict[int, str],
        driver: Driver,
        step: int = 0,
        observers: Observers | None = None,
    ) -> None:
        self._compressor = compressor
        self._channel = channel
        self._names = names
        self._driver = driver
        self._step = step
        self._observers = observers if observers is not None else Observers()
        self._layouts: dict[int, tuple[tuple[str, ...], Layout]] = {}
        self._order = BucketOrder(len(names))
        self._states: BucketStates = {}
        self._owed: dict[str, Tensor] = {}
        self._relayout: Relayout | None = None

    @property
    def compressor(self) -> Compressor:
        """What averages the buckets, with what it has been told of the nodes."""
        return self._compressor

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this rank has handed to collectives so far."""
        return self._channel.bytes_sent

    def reduce(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Starts to average one bucket.

        Args:
            state: unused; DDP hands over what was registered with the hook.
            bucket: this rank's gradients.

        Returns:
            A future of the bucket's buffer, which then holds the average.
        """
        flat, parameters = bucket.buffer(), bucket.parameters()
        names = tuple(self._names[id(parameter)] for parameter in parameters)
        index, is_last = self._order.place(bucket.index(), bucket.is_last(), names)
        if index not in self._layouts or self._layouts[index][0] != names:
            self._layouts[index] = names, Layout.of(parameters, flat.dtype)
        exchange = self._observers.ready(BucketInfo(index, _dense(flat).nbytes, names, is_last))
        job = Bucket(index, flat, self._layouts[index][1], names, self._step, exchange)
        promise = self._driver.promise(flat)
        if self._relayout is None or not self._relayout.keeps(job, promise):
            self._driver.submit(lambda: self._exchange_or_explain(job), [promise])
        if is_last:
            self._step += 1
            self._exchange_kept()
        return promise.future

    @property
    def has_only_resumed(self) -> bool:
        """Whether it has states from a checkpoint, and has not exchanged anything since."""
        return self._relayout is not None and self._relayout.is_unused

    def state(self) -> CommState:
        """Returns what the exchanges so far have left behind, not copied. Between two backwards only."""
        return CommState(self._compressor, self._step, dict(self._states), dict(self._owed))

    def resume(self, buckets: BucketStates, owed: dict[str, Tensor], step: int) -> None:
        """Goes on where another hook was. Between two backwards only; all ranks must call it.

        Args:
            buckets: states of the same compressor, for this rank. They are used as they are, in the buckets that they
                were made for, as long as DDP may still have others.
            owed: by parameter name, what this rank owes its peers besides.
            step: exchanges of whole gradients that were made before.
        """
        self._states, self._owed, self._step = dict(buckets), dict(owed), step
        layouts = {index: (names, layout) for index, (names, layout, _) in buckets.items()}
        self._relayout = Relayout(layouts) if layouts else None

    def owe(self, owed: dict[str, Tensor]) -> None:
        """Takes over what this rank owes its peers from another hook.

        Args:
            owed: by parameter name, as `close` gave it.
        """
        self._owed.update(owed)

    def close(self) -> dict[str, Tensor]:
        """Ends the driver and lets go of all states.

        Returns:
            What this rank still owes its peers, by parameter name: what error feedback held back. Nothing after
            an exchange has failed.
        """
        if not self._driver.close():
            self._channel.forget()
            return {}
        self._retire_states()
        owed, self._owed = self._owed, {}
        return owed

    def _exchange_kept(self) -> None:
        if self._relayout is None:
            return
        kept = self._relayout.end_backward()
        if self._relayout.is_over:
            self._relayout = None
        if kept.buckets:
            self._driver.submit(lambda: self._exchange_as_saved(kept), kept.promises)

    def _exchange_as_saved(self, kept: Kept) -> None:
        if not kept.saved:
            self._retire_states()
            for bucket in kept.buckets:
                self._exchange_or_explain(bucket)
            return
        bytes_before = self._channel.bytes_sent
        together = BucketSyncs([bucket.exchange for bucket in kept.buckets])
        together.start()
        together.send()
        for bucket in kept.laid_out_as_saved():
            self._exchange_or_explain(bucket)
        together.arrive()
        for bucket in kept.buckets:
            bucket.exchange.end(self._channel.bytes_sent - bytes_before)
            bytes_before = self._channel.bytes_sent

    def _exchange_or_explain(self, bucket: Bucket) -> None:
        try:
            # Under manual optimization the thread that calls the hook has the user's autocast on.
            with torch.no_grad(), torch.autocast(bucket.flat.device.type, enabled=False):
                self._exchange(bucket)
        except Exception as error:
            shown = ", ".join(bucket.names[:_NAMES_IN_MESSAGE])
            more = len(bucket.names) - _NAMES_IN_MESSAGE
            raise GradientSyncError(
                f"the exchange of gradient bucket {bucket.index} failed ({type(error).__name__}: {error}); "
                f"its parameters: {shown}{f' and {more} more' if more > 0 else ''}"
            ) from error

    def _exchange(self, bucket: Bucket) -> None:
        bytes_before = self._channel.bytes_sent
        bucket.exchange.start()
        _run(self._rounds(bucket), bucket.exchange)
        bucket.exchange.end(self._channel.bytes_sent - bytes_before)

    def _rounds(self, bucket: Bucket) -> Rounds:
        if bucket.is_compressible:
            return self._compressor.rounds(bucket.flat, bucket.layout, self._state_of(bucket), self._channel)
        kind = "sparse" if bucket.flat.is_sparse else str(bucket.flat.dtype).removeprefix("torch.")
        warn_once(f"comm_hook averages {kind} gradients as they are: it compresses dense floating-point ones.")
        return self._rounds_as_they_are(bucket.flat)

    def _rounds_as_they_are(self, flat: Tensor) -> Rounds:
        yield self._channel.all_reduce(flat.div_(self._channel.size))

    def _state_of(self, bucket: Bucket) -> State:
        if bucket.index in self._states:
            names, layout, state = self._states[bucket.index]
            if names == bucket.names and layout == bucket.layout:
                return state
            self._retire_states()  # DDP has laid out its buckets anew
        state = self._compressor.init(bucket.layout, bucket.flat.device, bucket.step)
        self._states[bucket.index] = bucket.names, bucket.layout, state
        self._hand_over_owed(bucket, state)
        return state

    def _retire_states(self) -> None:
        """Keeps of all states what is owed, by parameter."""
        self._owed = owed_by_name(self._compressor, self._states, self._owed)
        self._states.clear()

    def _hand_over_owed(self, bucket: Bucket, state: State) -> None:
        """Gives what is owed to the compressor, or to the gradients where the compressor never owes."""
        if not any(name in self._owed for name in bucket.names):
            return
        owed = torch.zeros_like(bucket.flat)
        for name, part in zip(bucket.names, bucket.layout.split(owed), strict=True):
            if name in self._owed:
                part.copy_(self._owed.pop(name))
        if not self._compressor.add_residual(bucket.layout, state, owed):
            bucket.flat.add_(owed)


def attach_bucket_hook(
    model: DistributedDataParallel,
    compressor: Compressor,
    timeout: timedelta | None,
    step: int = 0,
    local_world_size: int | None = None,
    observers: Observers | None = None,
) -> BucketHook:
    """Makes DDP average its gradients by ``compressor``. All ranks must call it.

    On CPU a thread runs every exchange to its end, so that all ranks issue the same collectives in the same order
    while backward goes on. It has a process group of its own, as the main thread may issue collectives meanwhile
    (SyncBatchNorm, metrics). On CUDA everything is enqueued from the hook on a side stream, over DDP's own group.

    Args:
        model: freshly wrapped; DDP takes one hook in its life.
        compressor: averages the buckets.
        timeout: after which a collective of the thread's group raises; None for the backend's default.
        step: exchanges of whole gradients that were made before.
        local_world_size: ranks on each node; None for what torchrun says, else all ranks.
        observers: are told of every bucket.

    Raises:
        OptionError: the model is on another kind of device, or nodes cannot be made of the ranks.
    """
    if model.device_type not in ("cpu", "cuda"):
        raise OptionError(f"comm_hook works on cpu and cuda, but the model is on {model.device_type}")
    group: dist.ProcessGroup = model.process_group
    world_size = dist.get_world_size(group)
    if local_world_size is None:
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    try:
        compressor, ranks_per_node = placed_on_nodes(compressor, world_size, local_world_size)
    except ValueError as error:
        raise OptionError(f"comm_hook: {error}") from error
    driver: Driver
    if model.device_type == "cpu":
        c_library.load()  # here, so that no backward waits for a compiler
        group, driver = twin_group(group, timeout), WorkerThread()
    else:
        driver = SideStream(model.device)
    channel = Channel(group) if ranks_per_node is None else node_channel(group, ranks_per_node, timeout)
    exchanged = {id(parameter) for parameter in synced_parameters(model)}
    names = {id(x): name for name, x in model.module.named_parameters() if id(x) in exchanged}
    hook = BucketHook(compressor, channel, names, driver, step, observers)
    model.register_comm_hook(None, hook.reduce)
    return hook


def _run(rounds: Rounds, exchange: BucketSync) -> None:
    """Drives ``rounds`` to its end; collectives that overlap count as one on the wire."""
    with contextlib.suppress(StopIteration):
        pending, is_sending = next(rounds), False
        while True:
            if not is_sending:
                exchange.send()
            arrived, is_sending = pending.wait(), pending.is_followed
            if not is_sending:
                exchange.arrive()
            pending = rounds.send(arrived)


def _dense(flat: Tensor) -> Tensor:
    return flat._values() if flat.is_sparse else flat
