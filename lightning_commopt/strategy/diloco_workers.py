"""WorkerExchanges: which ranks form one worker of DiLoCo, and the exchange and groups that connect the workers."""

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
    """Returns a plan's compressor, and the number of ranks per node if it needs groups within and across nodes.

    Raises:
        OptionError: the compressor does not fit the nodes.
    """
    if plan.comm_hook is None:
        return None, None
    if plan.comm_hook.claims.has_c_kernels:
        c_library.load()  # so that the first exchange does not wait for the compiler
    with option_errors("comm_hook: "):
        return place_on_nodes(plan.comm_hook, strategy.world_size, strategy.num_processes)


def exchange_of_all_ranks(
    compressor: Compressor | None, ranks_per_node: int | None, strategy: RunningStrategy
) -> tuple[Exchange, BorrowedGroups]:
    """Returns an exchange of all ranks, and its groups for the caller to return. All ranks must call it."""
    groups = borrow_groups(default_group(), ranks_per_node=ranks_per_node, timeout=strategy.timeout, backend="gloo")
    return Exchange(Channel(groups.all_ranks, groups.within, groups.across), compressor), groups


def keep_batch_norm_within(module: Module, within: dist.ProcessGroup | None) -> None:
    """Makes each SyncBatchNorm of a module use the group of a worker's ranks; ``within`` is None if that is one rank.

    Raises:
        OptionError: the module has a SyncBatchNorm, and ``within`` is None.
    """
    for part in module.modules():
        if isinstance(part, SyncBatchNorm):
            if within is None:
                raise OptionError(
                    "SyncBatchNorm synchronizes all ranks in every step, but DiLoCo trains them independently: use"
                    " BatchNorm, whose statistics the exchanges average, or in a Trainer inner='ddp', with which"
                    " SyncBatchNorm synchronizes the ranks of a node"
                )
            part.process_group = within


def refuse_shared_optimizers(optimizers: Iterable[object], worker: set[int]) -> None:
    """Raises an OptionError if an optimizer divides its steps among ranks outside of this rank's worker.

    ``torch.distributed.optim.ZeroRedundancyOptimizer`` does: each rank updates a part of the weights from its own
    gradients, for all ranks of its group.

    Args:
        optimizers: the optimizers of this rank.
        worker: the ranks that form one worker with this rank, itself included.
    """
    for optimizer in optimizers:
        group = getattr(optimizer, "process_group", None)
        if isinstance(group, dist.ProcessGroup) and not worker.issuperset(dist.get_process_group_ranks(group)):
            raise OptionError(
                f"{type(optimizer).__name__} divides each step among ranks that DiLoCo trains independently: use the"
                " optimizer class that it wraps, or a process_group with the ranks of one worker"
            )


def refuse_pruning(trainer: Trainer) -> None:
    """Raises an OptionError if a callback prunes the model.

    Workers would prune different weights, and the mean over workers would be zero only where all masks are.
    """
    if callbacks_of(trainer, "ModelPruning"):
        raise OptionError(
            "ModelPruning is not possible with DiLoCo: each worker would prune other weights. Prune before the fit,"
            " with torch.nn.utils.prune, or after it"
        )
