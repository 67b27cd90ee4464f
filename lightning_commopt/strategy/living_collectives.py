"""LivingCollectives: the collectives of Lightning's Trainer go on without ranks that have died or are frozen."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from lightning_commopt.plan import DiLoCoPlan, OptionError
from lightning_commopt.strategy.started import StartedAsDDP
from lightning_commopt.sync.diloco.equalize import equalize
from lightning_commopt.sync.diloco.living import LivingRanks, reduced
from lightning_commopt.sync.diloco.rounds import Rounds
from lightning_commopt.watch.waiting import print_now

_T = TypeVar("_T")


class LivingCollectives(StartedAsDDP):
    """The part of a strategy that gives Lightning the collectives of `LivingRanks` from `_let_ranks_fail` on.

    They stay after the fit, for what follows it in the Trainer and in the program, as for ``trainer.save_checkpoint``.
    Those over a group that the caller names stay the group's.

    Attributes:
        rounds: the exchanges of the fit; None outside of one.
    """

    rounds: Rounds | None
    _plan: DiLoCoPlan
    _living: LivingRanks | None = None
    _patience_s: float | None
    _has_agreed_on_signal = False

    @property
    def lets_ranks_fail(self) -> bool:
        """Whether a fit goes on without ranks that fail."""
        return self._patience_s is not None

    def _let_ranks_fail(self) -> None:
        """Lets a fit of several ranks go on without those that fail; before, they end it. All ranks must call it."""
        assert self._patience_s is not None
        timeout_s = self.timeout.total_seconds()
        self._living = LivingRanks.of_all_ranks(patience_s=self._patience_s, timeout_s=timeout_s, log=self._log_text)
        self._has_agreed_on_signal = False
        self._guards.let_ranks_fail(self, self._living, self._take_agreement)
        assert self.lightning_module is not None
        _redirect_metrics(self.lightning_module, self._living)

    def _take_agreement(self) -> bool:
        """Returns whether the exchanges since the last call have brought word of a signal."""
        has_agreed, self._has_agreed_on_signal = self._has_agreed_on_signal, False
        return has_agreed

    def _equalize(self, tensors: Sequence[Tensor]) -> None:
        """Gives all ranks the values of the first one, in place. All ranks must call it."""
        if self.world_size > 1:
            equalize(tensors, self._living)

    def _objects_of_ranks(self, mine: _T) -> list[_T]:
        """Returns the objects of all ranks in their order; with ``patience_s`` of those that live."""
        if self._living is not None:
            return [*self._living.objects(mine, "a gather").values()]
        everyone = [mine] * self.world_size
        dist.all_gather_object(everyone, mine)
        return everyone

    def _log_text(self, text: str) -> None:
        print_now(f"[rank {self.global_rank}] DiLoCo: {text}")

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self._living is None:
            super().barrier(*args, **kwargs)
        else:  # torch's has no name, so that ranks may give it different ones
            self._living.barrier()

    def broadcast(self, obj: _T, src: int = 0) -> _T:
        """Returns the object of rank ``src``, or that of the first rank which lives if that one does not."""
        if self._living is None:
            return super().broadcast(obj, src)
        objects = self._living.objects(obj, "a broadcast")
        return objects[src] if src in objects else next(iter(objects.values()))

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor over the ranks in place; with ``patience_s`` over those that live."""
        if self._living is None or not _is_default(group) or not isinstance(tensor, Tensor):
            return super().reduce(tensor, group, reduce_op)
        return tensor.copy_(reduced(self._living.tensors(tensor, "a reduction").values(), reduce_op))

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self._living is None:
            return super().reduce_boolean_decision(decision, all)
        decisions = self._living.objects(bool(decision), "a decision").values()
        return False not in decisions if all else True in decisions

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Returns ``(W, ...)``, the tensors of the ranks in their order; with ``patience_s`` of those that live."""
        if self._living is None or not _is_default(group):
            return super().all_gather(tensor, group, sync_grads)
        if sync_grads:
            raise OptionError("all_gather with sync_grads=True is not possible with patience_s: ranks would wait in it")
        return torch.stack([*self._living.tensors(tensor, "an all-gather").values()])


def _is_default(group: Any) -> bool:
    return group is None or group is dist.group.WORLD


class _MetricGather:
    """Gathers the states of a torchmetric over the living while there are any; a copy of the metric has it, too.

    A metric that is pickled is one without it.
    """

    def __init__(self, living: LivingRanks) -> None:
        self._living = living

    def __call__(self, value: Tensor, group: Any = None) -> list[Tensor]:
        if self._living.is_closed:
            torchmetrics: Any = import_module("torchmetrics.utilities.distributed")
            return list(torchmetrics.gather_all_tensors(value, group))
        return [*self._living.tensors(value, "a metric").values()]

    def __deepcopy__(self, memo: dict[int, Any]) -> _MetricGather:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def _redirect_metrics(module: Module, living: LivingRanks) -> None:
    """Makes the torchmetrics in a module gather over the living, but for those that gather in a way of their own."""
    if "torchmetrics" not in sys.modules:
        return
    metric_class: Any = sys.modules["torchmetrics"].Metric
    for part in module.modules():
        if isinstance(part, metric_class) and part.process_group is None:
            metric: Any = part
            if metric.dist_sync_fn is None or isinstance(metric.dist_sync_fn, _MetricGather):
                metric.dist_sync_fn = _MetricGather(living)
