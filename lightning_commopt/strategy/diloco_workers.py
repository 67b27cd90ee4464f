"""WorkerExchanges: which ranks are one worker of DiLoCo, and over what the workers exchange."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.nn import Module, SyncBatchNorm

from lightning_commopt.compat.lightning import callbacks_of
from lightning_commopt.compressors import Compressor
from lightning_commopt.compressors.all_reduce import UNCOMPRESSED
from lightning_commopt.compressors.channel import Channel
from lightning_commopt.compressors.hierarchical import Hierarchical, place_on_nodes
from lightning_commopt.compressors.kernels import c_library
from lightning_commopt.plan import DiLoCoPlan, OptionError
from lightning_commopt.plan.base import option_errors
from lightning_commopt.strategy.living_collectives import LivingCollectives
from lightning_commopt.sync.diloco.exchange import Exchange
from lightning_commopt.sync.diloco.patient import PatientExchange
from lightning_commopt.sync.groups import BorrowedGroups, borrow_groups, default_group
from lightning_commopt.sync.strategies import RunningStrategy
from lightning_commopt.text.validation import warn_once

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class WorkerExchanges(LivingCollectives):
    """The part of a strategy that makes the exchange of a fit and the group of ranks that form one worker."""

    _groups: BorrowedGroups | None = None

    def _make_exchange(self) -> Exchange:
        """Returns the exchange of a fit. All ranks must call it."""
        if self.world_size == 1:
            if self._patience_s is not None:
                warn_once(f"patience_s={self._patience_s:g} has no effect: there is only one process.")
            return exchange_alone(self._plan)
        compressor, ranks_per_node = placed_compressor(self._plan, self)
        if self._is_inner and ranks_per_node is None:
            ranks_per_node = self.num_processes
            compressor = Hierarchical(inner=compressor or UNCOMPRESSED, ranks_per_node=ranks_per_node)
        if self._living is not None and self._patience_s is not None:
            return PatientExchange.of_all_ranks(
                compressor,
                patience_s=self._patience_s,
                timeout_s=self.timeout.total_seconds(),
                log=self._log_text,
                listener=self._living.listener,
            )
        exchange, self._groups = exchange_of_all_ranks(compressor, ranks_per_node, self)
        return exchange

    @property
    def _is_inner(self) -> bool:
        return self._plan.inner is not None and self.num_processes > 1

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        size = self.num_processes if self._is_inner else 1
        first = self.global_rank - self.global_rank % size
        refuse_shared_optimizers(self.optimizers, {*range(first, first + size)})

    def _node_group(self) -> dist.ProcessGroup | None:
        """Returns a group of the ranks of this node if they form one worker. All ranks must call it."""
        if not self._is_inner:
            return None
        nodes = [[*range(first, first + self.num_processes)] for first in range(0, self.world_size, self.num_processes)]
        group, _ = dist.new_subgroups_by_enumeration(nodes, timeout=self.timeout)
        assert isinstance(group, dist.ProcessGroup)
        return group


def exchange_alone(plan: DiLoCoPlan) -> Exchange:
    """Returns the exchange of a single rank, which sends nothing."""
    if plan.comm_hook is not None:
        warn_once("comm_hook has no effect: there is only one process.")
    return Exchange(None, None)


def placed_compressor(plan: DiLoCoPlan, strategy: RunningStrategy) -> tuple[Compressor | None, int | None]:
    """Returns the compressor of a plan, and the ranks of a node if it needs groups within and across nodes.

    Raises:
        OptionError: the compressor does not fit the nodes.
    """
    if plan.comm_hook is None:
        return None, None
    if plan.comm_hook.claims.has_c_kernels:
        c_library.load()  # no exchange should wait for a compiler
    with option_errors("comm_hook: "):
        return place_on_nodes(plan.comm_hook, strategy.world_size, strategy.num_processes)


def exchange_of_all_ranks(
    compressor: Compressor | None, ranks_per_node: int | None, strategy: RunningStrategy
) -> tuple[Exchange, BorrowedGroups]:
    """Returns an exchange that all ranks take part in, and its groups, which are borrowed. All ranks must call it."""
    groups = borrow_groups(default_group(), ranks_per_node=ranks_per_node, timeout=strategy.timeout, backend="gloo")
    return Exchange(Channel(groups.all_ranks, groups.within, groups.across), compressor), groups


def keep_batch_norm_within(module: Module, within: dist.ProcessGroup | None) -> None:
    """Makes each SyncBatchNorm of a module use the group of a worker's ranks.

    Raises:
        OptionError: there is one, and a worker is a single rank.
    """
    for part in module.modules():
        if isinstance(part, SyncBatchNorm):
            if within is None:
                raise OptionError(
                    "SyncBatchNorm couples all ranks in every step, which DiLoCo must not: use BatchNorm, whose"
                    " statistics the exchanges average, or in a Trainer inner='ddp', with which it couples the ranks of"
                    " a node"
                )
            part.process_group = within


def refuse_shared_optimizers(optimizers: Iterable[object], worker: set[int]) -> None:
    """Raises an OptionError if a step of an optimizer sets weights on ranks that are not of this rank's worker.

    As one of ``torch.distributed.optim.ZeroRedundancyOptimizer`` does, by this rank's gradients alone.
    """
    for optimizer in optimizers:
        group = getattr(optimizer, "process_group", None)
        if isinstance(group, dist.ProcessGroup) and not worker.issuperset(dist.get_process_group_ranks(group)):
            raise OptionError(
                f"{type(optimizer).__name__} divides each step among ranks that DiLoCo trains apart: use the optimizer"
                " that it is made with, or a process_group of the ranks of one worker"
            )


def refuse_pruning(trainer: Trainer) -> None:
    """Raises an OptionError if a callback prunes the model: the mean over workers has the zeros of no mask."""
    if callbacks_of(trainer, "ModelPruning"):
        raise OptionError(
            "ModelPruning is not possible with DiLoCo: each worker would prune other weights. Prune before the fit,"
            " with torch.nn.utils.prune, or after it"
        )
