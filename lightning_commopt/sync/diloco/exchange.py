"""The exchange of one fragment: its difference is averaged over the workers, and the global weights move.

It runs in a thread of its own over gloo, in the host's memory also for models on CUDA: beside links that are slow
enough for DiLoCo the copy costs nothing, and training goes on beside it.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lightning_commopt.compat.torch import foreach_copy_
from lightning_commopt.compressors import Compressor, State
from lightning_commopt.compressors.all_reduce import UNCOMPRESSED
from lightning_commopt.compressors.base import finish
from lightning_commopt.compressors.channel import Channel
from lightning_commopt.sync.diloco.fragments import Fragment
from lightning_commopt.sync.diloco.outer import OuterSGD
from lightning_commopt.sync.diloco.report import BETWEEN_BATCHES, Report, check_same_step


@dataclass(eq=False)
class GlobalWeights:
    """The global state of one fragment, in the host's memory, equal on all workers; ``n`` elements.

    Attributes:
        weights: ``(n,)`` the global weights at the last exchange.
        floats: means of the workers' floating-point buffers then, in their order in the fragment.
        integers: the other buffers of the first worker then.
        momentum: ``(n,)`` of the outer optimizer; None without one.
        state: what the compressor keeps on this rank.
        carried: ``(n,)`` what an earlier division of the model had left unsent on this rank; None if there is nothing.
    """

    fragment: Fragment
    weights: Tensor
    floats: list[Tensor]
    integers: list[Tensor]
    momentum: Tensor | None
    state: State = field(default_factory=dict)
    carried: Tensor | None = None

    @classmethod
    def of(cls, fragment: Fragment, outer: OuterSGD) -> GlobalWeights:
        """Returns the state before the first exchange, of weights that are equal on all workers."""
        local = LocalWeights.of(fragment)
        local.wait()
        return cls(fragment, local.flat, local.floats, local.integers, outer.new_buffer(local.flat))

    def tensors(self) -> list[Tensor]:
        """Returns the global values of the fragment's ``tensors()``."""
        return [*self.fragment.views(self.weights), *self.floats, *self.integers]

    def arrived(self) -> Arrived:
        """Returns these global weights as if an exchange had brought them."""
        return Arrived(self.weights, self.floats, self.integers, [])

    def take(self, arrived: Arrived | GlobalWeights) -> None:
        """Makes what an exchange has brought the global weights."""
        self.weights, self.floats, self.integers = arrived.weights, arrived.floats, arrived.integers


@dataclass(eq=False)
class LocalWeights:
    """A copy of one worker's fragment in the host's memory, complete after `wait`.

    ``num_joins`` is how often the model had been given all global weights before, and ``trained`` has the names of the
    parameters that required a gradient in a step since the last exchange; None if they do not matter.
    """

    flat: Tensor
    floats: list[Tensor]
    integers: list[Tensor]
    _copied: torch.cuda.Event | None
    num_joins: int = 0
    trained: Collection[str] | None = None

    @classmethod
    def of(cls, fragment: Fragment) -> LocalWeights:
        """Begins to copy; on CUDA in the current stream, without waiting for it."""
        flat = fragment.new_flat()
        foreach_copy_(fragment.views(flat), fragment.real_parameters(), non_blocking=True)
        floats, integers = _on_host(fragment.floats), _on_host(fragment.integers)
        copied = torch.cuda.Event() if flat.is_pinned() else None
        if copied is not None:
            copied.record()
        return cls(flat, floats, integers, copied)

    def wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()


def _on_host(buffers: Mapping[str, Tensor]) -> list[Tensor]:
    copies = [torch.empty_like(x, device="cpu", pin_memory=x.is_cuda) for x in buffers.values()]
    for copy, x in zip(copies, buffers.values(), strict=True):
        copy.copy_(x, non_blocking=True)
    return copies


@dataclass(eq=False)
class Arrived:
    """What an exchange has brought, the same on all workers, which is applied ``overlap`` steps after it began.

    Attributes:
        weights: ``(n,)`` the new global weights.
        floats: see `GlobalWeights`.
        integers: see `GlobalWeights`.
        reports: one of each rank that took part.
        is_complete: whether all ranks took part, and none of them had missed an exchange.
        has_missed: whether the others have gone on without this rank, which has got nothing.
        joined: the global weights of all fragments before this exchange, if this rank takes part again after others
            went on without it; otherwise None.
    """

    weights: Tensor
    floats: list[Tensor]
    integers: list[Tensor]
    reports: list[Report]
    is_complete: bool = True
    has_missed: bool = False
    joined: list[Arrived] | None = None


@dataclass(frozen=True, eq=False)
class Finished:
    """What a rank gets at the end of a fit that has missed an exchange: weights to show, and to train on from."""

    final: list[Arrived]
    joined: list[Arrived] | None


class Exchange:
    """Averages fragments over the workers.

    Args:
        channel: collectives over all ranks, of a gloo group that nothing else uses; None for a single rank.
        compressor: how differences travel; None for uncompressed.
        ranks: numbers of the channel's ranks, in their order; None for all of the default group.
    """

    def __init__(
        self, channel: Channel | None, compressor: Compressor | None, ranks: Sequence[int] | None = None
    ) -> None:
        self._channel, self._ranks = channel, ranks
        self._compressor = UNCOMPRESSED if compressor is None else compressor

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this rank has handed to collectives so far."""
        return 0 if self._channel is None else self._channel.bytes_sent

    def begin(self, fragments: Sequence[GlobalWeights], arrived: Mapping[int, Arrived]) -> None:
        """Is told all fragments before their first exchange, and what has arrived of some and is not applied yet."""

    @property
    def is_complete(self) -> bool:
        """Whether all ranks took part in the last exchange."""
        return True

    def watch_end(self) -> None:
        """Is told that the exchanges at the end of a fit follow."""

    def finish(self, final: Sequence[GlobalWeights]) -> Finished | None:
        """Is given the weights at the end of a fit; returns what this rank must have instead, or None."""
        return None

    def run(self, of: GlobalWeights, local: LocalWeights, report: Report, step: int, outer: OuterSGD) -> Arrived:
        """Exchanges one fragment. All ranks must call it in the same order.

        Args:
            of: the global state, whose momentum and compressor's state are updated.
            local: this worker's weights, whose memory the new global weights take.
            report: what this worker tells the others.
            step: number of earlier exchanges of this fragment, for a new state of the compressor.
            outer: moves the global weights.

        Raises:
            UnequalStepsError: another rank is in another batch, or has taken another number of steps.
        """
        local.wait()
        difference = torch.sub(of.weights, local.flat, out=local.flat)
        names = of.fragment.parameters
        trained = bytes(local.trained is None or name in local.trained for name in names)
        drift = float(torch.linalg.vector_norm(difference))
        reports = self._gather(replace(report, drift=drift, trained=zlib.crc32(trained)))
        if len({other.trained for other in reports}) > 1:
            trained = self._any_rank(trained)
        total = sum(other.samples for other in reports)
        if total and any(other.samples != report.samples for other in reports):
            difference.mul_(report.samples * len(reports) / total)
        if of.carried is not None:
            difference.add_(of.carried)
            of.carried = None
        if self._channel is not None and len(difference):  # all parameters of a fragment may be empty
            layout = of.fragment.layout
            if not of.state:
                of.state = self._compressor.init(layout, difference.device, step)
            finish(self._compressor.rounds(difference, layout, of.state, self._channel))
        _move(of, difference, trained, outer)
        return Arrived(difference, self._mean(local.floats), self._first(local.integers), reports)

    def unsent(self, of: GlobalWeights) -> Tensor | None:
        """Returns ``(n,)`` what this rank has not sent of a fragment yet; None if nothing is kept."""
        residual = self._compressor.residual(of.fragment.layout, of.state) if of.state else None
        if residual is None or of.carried is None:
            return of.carried if residual is None else residual
        return residual + of.carried

    def any_rank(self, value: bool) -> bool:
        """Returns whether ``value`` is true on any rank. All ranks must call it."""
        return any(report.samples for report in self._gather(Report(float(value))))

    def meet(self, num_steps: int, value: bool) -> bool:
        """Returns whether ``value`` is true on any rank, between two batches. All ranks must call it.

        Raises:
            UnequalStepsError: another rank begins an exchange, since it has taken more steps.
        """
        return any(other.samples for other in self._gather(Report(value, num_steps=num_steps, batch=BETWEEN_BATCHES)))

    def meet_at_end(self, num_steps: int, values: Sequence[bool]) -> list[bool]:
        """Returns which of some values are true on any rank, at the end of a training. All ranks must call it.

        Raises:
            UnequalStepsError: another rank begins an exchange, since it has taken more steps.
        """
        self._gather(Report(0.0, num_steps=num_steps))
        return [*map(bool, self._any_rank(bytes(values)))]

    def _gather(self, report: Report) -> list[Report]:
        if self._channel is None:
            return [report]
        rows = self._channel.all_gather(report.to_tensor()).wait()
        reports = [Report(*row) for row in rows.tolist()]
        check_same_step(reports, self._ranks)
        return reports

    def _any_rank(self, values: bytes) -> bytes:
        """Returns the largest of each value on any rank."""
        if self._channel is None:
            return values
        numbers = torch.tensor([*values], dtype=torch.uint8, device="cpu")
        return bytes(self._channel.all_gather(numbers).wait().amax(0).tolist())

    def _mean(self, buffers: list[Tensor]) -> list[Tensor]:
        """Returns the means of floating-point buffers, in float64 so that equal ones keep their bits."""
        if self._channel is None or not buffers:
            return buffers
        flat = torch.cat([x.reshape(-1).double() for x in buffers])
        self._channel.all_reduce(flat).wait()
        return _like(flat.div_(self._channel.size), buffers)

    def _first(self, buffers: list[Tensor]) -> list[Tensor]:
        if self._channel is None or not buffers:
            return buffers
        flat = torch.cat([x.contiguous().view(-1).view(torch.uint8) for x in buffers])
        row = self._channel.all_gather(flat).wait()[0]
        parts = row.split([x.nbytes for x in buffers])
        return [part.clone().view(x.dtype).view(x.shape) for part, x in zip(parts, buffers, strict=True)]


def _move(of: GlobalWeights, difference: Tensor, trained: bytes, outer: OuterSGD) -> None:
    """Puts a fragment's new weights in the place of the mean difference ``(n,)``, and updates its momentum.

    ``trained`` has 1 for each parameter that was trained on any rank, and 0 for others. Momentum moves no parameter
    that was frozen on all ranks, as ``torch.optim.SGD`` skips one without a gradient. It gets the mean of the ranks'
    weights: the global weights, unless ranks had mixed them with their own or hooks have changed them.
    """
    if of.momentum is None or all(trained):
        outer.move(of.weights, of.momentum, difference)
        return
    parts = (of.fragment.views(flat) for flat in (of.weights, of.momentum, difference))
    for is_trained, weights, momentum, part in zip(trained, *parts, strict=True):
        if is_trained:
            outer.move(weights, momentum, part)
        else:
            torch.sub(weights, part, out=part)


def _like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([x.numel() for x in tensors])
    return [part.view(x.shape).to(x.dtype) for part, x in zip(parts, tensors, strict=True)]
