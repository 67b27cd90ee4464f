"""Averaging gradients parameter by parameter, without buckets: after backward, or while it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn import Module, Parameter
from torch.utils.hooks import RemovableHandle

from lightning_commopt.compat.lightning import MisconfigurationException
from lightning_commopt.compat.torch import ignored_names
from lightning_commopt.measure.observer import ARRIVE, END, SEND, START, BucketInfo, BucketSync, Observers
from lightning_commopt.text.formatting import list_some

_NAMES_IN_MESSAGE = 8


class ParameterSync(ABC):
    """Averages the gradients of a module over all ranks, each with an all-reduce of its own.

    Those parameters take part in a backward that require a gradient when it begins, without those that DDP is set to
    ignore. As DDP does, every rank multiplies its gradient by the reciprocal of the number of ranks, and the products
    are summed in place. Observers see every gradient as a bucket that holds nothing else; ``bytes_sent`` is the payload
    of the all-reduces so far.
    """

    def __init__(self, module: Module, group: dist.ProcessGroup, observers: Observers) -> None:
        ignored = ignored_names(module)
        self._named = [_Named(*item) for item in module.named_parameters() if item[0] not in ignored]
        self._group = group
        self._reciprocal = 1 / dist.get_world_size(group)
        self._observers = observers
        self.bytes_sent = 0

    @abstractmethod
    def around_backward(self) -> AbstractContextManager[None]:
        """Returns a context manager for one backward; when it has been left, the gradients are averages."""

    def close(self) -> None:  # noqa: B027 - those that hold none have nothing to do
        """Releases the parameters."""

    def _active(self) -> tuple[int, ...]:
        """Returns the positions of the parameters that require a gradient now."""
        return tuple([index for index, named in enumerate(self._named) if named.parameter.requires_grad])

    def _ready(self, place: int, index: int, gradient: Tensor, *, is_last: bool) -> BucketSync:
        """Reports the next parameter and its position among all that are averaged."""
        return self._observers.ready(BucketInfo(place, gradient.nbytes, (self._named[index].name,), is_last))

    def _all_reduce(self, gradient: Tensor, sync: BucketSync | None) -> dist.Work:
        if sync is not None:
            sync.note(START)
        gradient.mul_(self._reciprocal)
        if sync is not None:
            sync.note(SEND)
        self.bytes_sent += gradient.nbytes
        return self._group.allreduce([gradient])


class AfterBackward(ParameterSync):
    """When backward is over, averages one gradient after another and waits for each."""

    @contextmanager
    def around_backward(self) -> Generator[None, None, None]:
        yield
        active = self._active()
        _refuse_missing([self._named[i].name for i in active if self._named[i].parameter.grad is None])
        gradients = [_values(self._named[index]) for index in active]
        syncs: Sequence[BucketSync | None] = [None] * len(active)
        if self._observers:
            syncs = [
                self._ready(place, index, gradient, is_last=place == len(active) - 1)
                for place, (index, gradient) in enumerate(zip(active, gradients, strict=True))
            ]
        for gradient, sync in zip(gradients, syncs, strict=True):
            self._all_reduce(gradient, sync).wait()
            if sync is not None:
                sync.note(ARRIVE)
                sync.note(END, gradient.nbytes)


class WhileBackwardRuns(ParameterSync):
    """Starts to average each gradient when backward has computed it, and waits for all when backward is over.

    All ranks must send in one order, and their graphs may differ. The first backward follows the reverse order of the
    parameters; from then on it is the order in which they came on rank 0, which DDP does with its buckets too. A
    parameter that comes early waits for its turn.
    """

    def __init__(self, module: Module, group: dist.ProcessGroup, observers: Observers) -> None:
        super().__init__(module, group, observers)
        self._handles: dict[int, RemovableHandle] = {}
        self._orders: dict[tuple[int, ...], list[int]] = {}  # by which parameters are active
        self._backward: _Backward | None = None

    @contextmanager
    def around_backward(self) -> Generator[None, None, None]:
        active = self._active()
        for index in active:
            if index not in self._handles:
                hook = partial(self._on_gradient, index)
                self._handles[index] = self._named[index].parameter.register_post_accumulate_grad_hook(hook)
        backward = self._backward = _Backward(self._orders.get(active) or list(reversed(active)))
        try:
            yield
        finally:
            self._backward = None
        _refuse_missing([self._named[index].name for index in active if index not in backward.landed])
        for work, seen in backward.pending:
            work.wait()
            if seen is not None:
                seen.wait()
        if active and active not in self._orders:
            self._orders[active] = self._order_of_rank_0(list(backward.landed))

    def close(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def _on_gradient(self, index: int, parameter: Tensor) -> None:
        backward = self._backward
        if backward is None:
            return
        if index in backward.landed:
            raise MisconfigurationException(
                f"the gradient of {self._named[index].name!r} came twice in one backward, which reentrant checkpointing"
                " and several calls of backward in one do, when it may have been sent already. Use NaiveDP, or"
                " torch.utils.checkpoint with use_reentrant=False."
            )
        backward.landed[index] = None
        while (place := len(backward.pending)) < len(backward.order) and backward.order[place] in backward.landed:
            backward.pending.append(self._send(place, backward.order[place], len(backward.order)))

    def _send(self, place: int, index: int, num_active: int) -> tuple[dist.Work, Future[None] | None]:
        gradient = _values(self._named[index])
        if not self._observers:
            return self._all_reduce(gradient, None), None
        sync = self._ready(place, index, gradient, is_last=place == num_active - 1)
        work = self._all_reduce(gradient, sync)

        def finish(done: Future[Any]) -> None:
            done.value()  # raises what the all-reduce has raised
            sync.note(ARRIVE)
            sync.note(END, gradient.nbytes)

        # The future's callback runs as soon as the all-reduce is done; on CUDA, in a stream that waits for it.
        return work, work.get_future().then(finish)

    def _order_of_rank_0(self, landed: list[int]) -> list[int]:
        order = torch.tensor(landed, device=self._named[landed[0]].parameter.device)
        dist.broadcast(order, src=0, group=self._group)
        return order.tolist()


class _Named(NamedTuple):
    name: str
    parameter: Parameter


@dataclass
class _Backward:
    """A backward that runs: the order in which to send, what has its gradient, and each all-reduce and its report."""

    order: list[int]
    landed: dict[int, None] = field(default_factory=dict)
    pending: list[tuple[dist.Work, Future[None] | None]] = field(default_factory=list)


def _values(named: _Named) -> Tensor:
    """Returns a parameter's gradient as a tensor that shares its memory and that a collective takes."""
    gradient = named.parameter.grad
    assert gradient is not None
    if gradient.layout != torch.strided:
        raise MisconfigurationException(
            f"{named.name!r} has a sparse gradient, and NaiveDP and InterleavedDP sync dense ones only. Use"
            " CommOptDDP, or sparse=False in the embedding."
        )
    gradient = gradient.detach()
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient)
    if gradient.is_contiguous():
        return gradient
    in_order_of_memory = gradient.permute(sorted(range(gradient.dim()), key=gradient.stride, reverse=True))
    assert in_order_of_memory.is_contiguous(), "autograd lays gradients out densely"
    return in_order_of_memory


def _refuse_missing(names: Sequence[str]) -> None:
    """Refuses a backward that has left parameters without a gradient."""
    if names:
        raise MisconfigurationException(
            f"backward gave no gradient to {list_some(names, _NAMES_IN_MESSAGE)}: these parameters were not"
            " used in producing the loss. If that is intended, use CommOptDDP(find_unused_parameters=True), or freeze"
            " them with requires_grad_(False); NaiveDP and InterleavedDP sync every parameter in every step."
        )
