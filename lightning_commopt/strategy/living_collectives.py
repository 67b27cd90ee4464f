"""LivingCollectives: collectives of Lightning's Trainer that continue without ranks that have died or are frozen."""

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
from lightning_commopt.sync.gather import values_of_all_ranks
from lightning_commopt.watch.waiting import print_now

_T = TypeVar("_T")


class LivingCollectives(StartedAsDDP):
    """The part of a strategy that replaces Lightning's collectives by those of `LivingRanks`.

    `_let_ranks_fail` replaces them. The replacements stay after the fit, because the program may call collectives after
    it, for example in ``trainer.save_checkpoint``. Collectives over a group that the caller passes are not replaced.

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
        """Whether a fit continues without ranks that fail."""
        return self._patience_s is not None

    def _let_ranks_fail(self) -> None:
        """Lets a fit of several ranks continue without those that fail from now on. All ranks must call it."""
        assert self._patience_s is not None
        timeout_s = self.timeout.total_seconds()
        self._living = LivingRanks.of_all_ranks(patience_s=self._patience_s, timeout_s=timeout_s, log=self._log_text)
        self._has_agreed_on_signal = False
        self._guards.let_ranks_fail(self, self._living, self._pop_agreement_on_signal)
        assert self.lightning_module is not None
        _gather_metrics_over_living(self.lightning_module, self._living)

    def _pop_agreement_on_signal(self) -> bool:
        """Returns whether the exchanges since the last call have reported a signal."""
        has_agreed, self._has_agreed_on_signal = self._has_agreed_on_signal, False
        return has_agreed

    def _equalize(self, tensors: Sequence[Tensor]) -> None:
        """Gives all ranks the values of the first rank, in place. All ranks must call it."""
        if self.world_size > 1:
            equalize(tensors, self._living)

    def _gather_objects(self, own: _T) -> list[_T]:
        """Returns the objects of all ranks in their order; with ``patience_s`` those of the ranks that live."""
        if self._living is None:
            return values_of_all_ranks(own)
        return [*self._living.objects(own, "a gather").values()]

    def _log_text(self, text: str) -> None:
        print_now(f"[rank {self.global_rank}] DiLoCo: {text}")

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self._living is None:
            super().barrier(*args, **kwargs)
        else:  # the name that Lightning passes is dropped: torch ignores it, so callers may pass different ones
            self._living.barrier()

    def broadcast(self, obj: _T, src: int = 0) -> _T:
        """Returns the object of rank ``src``, or of the first living rank if rank ``src`` does not live."""
        if self._living is None:
            return super().broadcast(obj, src)
        objects = self._living.objects(obj, "a broadcast")
        return objects[src] if src in objects else next(iter(objects.values()))

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor over the ranks in place; with ``patience_s`` over the ranks that live."""
        if self._living is None or not _is_default_group(group) or not isinstance(tensor, Tensor):
            return super().reduce(tensor, group, reduce_op)
        return tensor.copy_(reduced(self._living.tensors(tensor, "a reduction").values(), reduce_op))

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self._living is None:
            return super().reduce_boolean_decision(decision, all)
        decisions = self._living.objects(bool(decision), "a decision").values()
        return False not in decisions if all else True in decisions

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Returns ``(W, ...)``, the tensors of all W ranks in order; with ``patience_s`` those of the living ranks."""
        if self._living is None or not _is_default_group(group):
            return super().all_gather(tensor, group, sync_grads)
        if sync_grads:
            raise OptionError(
                "all_gather with sync_grads=True is not possible with patience_s: its backward would wait for all ranks"
            )
        return torch.stack([*self._living.tensors(tensor, "an all-gather").values()])


def _is_default_group(group: Any) -> bool:
    return group is None or group is dist.group.WORLD


class _GatherOverLiving:
    """Gathers the states of a torchmetric over the living ranks, and after `LivingRanks.close` over the process group.

    Copies of the metric share this object. A pickled metric is restored without it, since another process has no part
    in these collectives.
    """

    def __init__(self, living: LivingRanks) -> None:
        self._living = living

    def __call__(self, value: Tensor, group: Any = None) -> list[Tensor]:
        if self._living.is_closed:
            torchmetrics: Any = import_module("torchmetrics.utilities.distributed")
            return list(torchmetrics.gather_all_tensors(value, group))
        return [*self._living.tensors(value, "a metric").values()]

    def __deepcopy__(self, memo: dict[int, Any]) -> _GatherOverLiving:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def _gather_metrics_over_living(module: Module, living: LivingRanks) -> None:
    """Makes torchmetrics in a module gather over the living ranks if they have no ``dist_sync_fn`` and no group."""
    if "torchmetrics" not in sys.modules:
        return
    metric_class: Any = sys.modules["torchmetrics"].Metric
    for part in module.modules():
        if isinstance(part, metric_class) and part.process_group is None:
            metric: Any = part
            if metric.dist_sync_fn is None or isinstance(metric.dist_sync_fn, _GatherOverLiving):
                metric.dist_sync_fn = _GatherOverLiving(living)
