"""The exchange of one fragment: its difference from the global weights is averaged over the workers and moves these.

It runs in a thread over gloo while training continues, and in the host's memory, also for models on CUDA: compared with
links that are slow enough to need DiLoCo, the copy to the host costs nothing.
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
    """The global state of one fragment with ``n`` elements, in the host's memory.

    It is equal on all workers, except ``state`` and ``carried``.

    Attributes:
        fragment: the fragment.
        weights: ``(n,)`` the global weights, as of the last exchange.
        floats: means of the workers' floating-point buffers at that time, in their order in the fragment.
        integers: the first worker's other buffers at that time.
        momentum: ``(n,)`` the momentum of the outer optimizer; None without momentum.
        state: what the compressor keeps on this rank.
        carried: ``(n,)`` what this rank had not sent when the model was divided again; None if there is nothing.
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
        """Returns the state before the first exchange, from a model whose weights are equal on all workers."""
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
        """Replaces the global weights by the result of an exchange."""
        self.weights, self.floats, self.integers = arrived.weights, arrived.floats, arrived.integers


@dataclass(eq=False)
class LocalWeights:
    """A copy of one worker's fragment, ``(n,)`` and its buffers, in the host's memory; complete after `wait`.

    ``num_joins`` is the number of times that this rank had joined again, taking all global weights, before the copy.
    ``trained`` has the names of parameters that required a gradient in a step since the last exchange; None for all.
    """

    flat: Tensor
    floats: list[Tensor]
    integers: list[Tensor]
    _copied: torch.cuda.Event | None
    num_joins: int = 0
    trained: Collection[str] | None = None

    @classmethod
    def of(cls, fragment: Fragment) -> LocalWeights:
        """Starts to copy a fragment; on CUDA it does so in the current stream, without waiting for it."""
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
    """The result of an exchange, equal on all workers. It is applied ``overlap`` steps after the exchange began.

    Attributes:
        weights: ``(n,)`` the new global weights.
        floats: see `GlobalWeights`.
        integers: see `GlobalWeights`.
        reports: the report of each rank that took part.
        is_complete: whether all ranks took part, and none of them had missed an exchange.
        has_missed: whether the others made the exchange without this rank, which has no result then.
        joined: the global weights of all fragments before this exchange, if this rank takes part again after others
            have made exchanges without it; otherwise None.
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
    """All fragments' weights for a rank that has missed an exchange, at the end of a fit."""

    final: list[Arrived]  # results for the model
    joined: list[Arrived] | None  # the global weights, from which further training starts; None if the rank has them


class Exchange:
    """Averages fragments over the workers.

    Args:
        channel: collectives over all ranks, through a gloo group that nothing else uses; None for a single rank.
        compressor: compresses the differences; None to send them uncompressed.
        ranks: numbers of the channel's ranks, in their order; None for all ranks of the default group.
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
        """Called before the first exchange, with all fragments and with results that are not applied yet, by index."""

    @property
    def is_complete(self) -> bool:
        """Whether all ranks took part in the last exchange."""
        return True

    def watch_end(self) -> None:
        """Called before the exchanges at the end of a fit."""

    def finish(self, final: Sequence[GlobalWeights]) -> Finished | None:
        """Called with the weights at the end of a fit; returns what this rank must have instead, or None."""
        return None

    def run(
        self, global_state: GlobalWeights, local: LocalWeights, report: Report, step: int, outer: OuterSGD
    ) -> Arrived:
        """Exchanges one fragment. All ranks must call it in the same order.

        Args:
            global_state: the fragment's global state; its momentum and the compressor's state are updated.
            local: this worker's weights; their memory is reused for the new global weights.
            report: what this worker reports to the others.
            step: number of earlier exchanges of this fragment, for a new state of the compressor.
            outer: the outer optimizer, which moves the global weights.

        Raises:
            UnequalStepsError: another rank is in another batch, or has taken another number of steps.
        """
        local.wait()
        difference = torch.sub(global_state.weights, local.flat, out=local.flat)
        names = global_state.fragment.parameters
        trained = bytes(local.trained is None or name in local.trained for name in names)
        drift = float(torch.linalg.vector_norm(difference))
        reports = self._gather(replace(report, drift=drift, trained=zlib.crc32(trained)))
        if len({other.trained for other in reports}) > 1:
            trained = self._any_rank(trained)
        total = sum(other.samples for other in reports)
        if total and any(other.samples != report.samples for other in reports):
            difference.mul_(report.samples * len(reports) / total)
        if global_state.carried is not None:
            difference.add_(global_state.carried)
            global_state.carried = None
        if self._channel is not None and len(difference):  # all parameters of a fragment may be empty
            layout = global_state.fragment.layout
            if not global_state.state:
                global_state.state = self._compressor.init(layout, difference.device, step)
            finish(self._compressor.rounds(difference, layout, global_state.state, self._channel))
        _move(global_state, difference, trained, outer)
        return Arrived(difference, self._mean(local.floats), self._first(local.integers), reports)

    def unsent(self, global_state: GlobalWeights) -> Tensor | None:
        """Returns ``(n,)`` what this rank has not sent yet of a fragment; None if it keeps nothing."""
        residual = (
            self._compressor.residual(global_state.fragment.layout, global_state.state) if global_state.state else None
        )
        if residual is None or global_state.carried is None:
            return global_state.carried if residual is None else residual
        return residual + global_state.carried

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
        """Returns the element-wise maximum over all ranks."""
        if self._channel is None:
            return values
        numbers = torch.tensor([*values], dtype=torch.uint8, device="cpu")
        return bytes(self._channel.all_gather(numbers).wait().amax(0).tolist())

    def _mean(self, buffers: list[Tensor]) -> list[Tensor]:
        """Returns the means of floating-point buffers, computed in float64 so that equal values keep their bits."""
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


def _move(global_state: GlobalWeights, difference: Tensor, trained: bytes, outer: OuterSGD) -> None:
    """Writes a fragment's new weights over the mean difference ``(n,)``, and updates its momentum.

    ``trained`` has 1 for each parameter that was trained on any rank, and 0 for others. Momentum does not move
    parameters that were frozen on all ranks, as ``torch.optim.SGD`` skips parameters without a gradient. These get the
    mean of the ranks' weights, which differs from the global weights if ranks had mixed these with their own, or if
    hooks have changed them.
    """
    if global_state.momentum is None or all(trained):
        outer.move(global_state.weights, global_state.momentum, difference)
        return
    parts = (global_state.fragment.views(flat) for flat in (global_state.weights, global_state.momentum, difference))
    for is_trained, weights, momentum, part in zip(trained, *parts, strict=True):
        if is_trained:
            outer.move(weights, momentum, part)
        else:
            torch.sub(weights, part, out=part)


def _like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([x.numel() for x in tensors])
    return [part.view(x.shape).to(x.dtype) for part, x in zip(parts, tensors, strict=True)]
