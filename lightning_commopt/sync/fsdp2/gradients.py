"""The gradient sync of a model that FSDP2 shards: its units, their layouts and their collectives (torch >= 2.9)."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Replicate, Shard
from torch.nn import Module

from lightning_commopt.compat.fsdp import (
    comm_object,
    dtypes_of,
    forces_sum,
    has_own_divide_factor,
    order_of_gradients,
    parameters_of,
    units_of,
)
from lightning_commopt.compat.fsdp_calls import Around
from lightning_commopt.compat.torch import call_after_backward
from lightning_commopt.compressors.channel import Channel
from lightning_commopt.compressors.sharded_hierarchical import ShardedHierarchical
from lightning_commopt.compressors.shards import ShardedCompressor
from lightning_commopt.plan import OptionError
from lightning_commopt.plan.base import option_errors
from lightning_commopt.plan.sharded import check_available
from lightning_commopt.sync.executors import BucketFuture, WorkerThread
from lightning_commopt.sync.fsdp2.unit import Column, UnitReduceScatter
from lightning_commopt.sync.groups import BorrowedGroups, borrow_groups, shared_node_groups
from lightning_commopt.sync.state import CommState
from lightning_commopt.sync.unit_layout import UnitLayout
from lightning_commopt.sync.warm_up import prepare_kernels, run_on_shards
from lightning_commopt.text.validation import warn_once

_MAX_UNDER_WAY = 2
"""Number of units whose gradients may be in memory besides the current unit's: one is on the wire while the next one
waits. More would take memory without any gain, since the thread works on one at a time."""


class ShardedSync:
    """The gradient sync of a model that FSDP2 shards, with compressed reduce-scatters.

    Parameters of one dimension (biases, norms) travel uncompressed, since they are small and each element matters. The
    ``compressor`` is for all others.
    """

    def __init__(self, compressor: ShardedCompressor) -> None:
        self.compressor = compressor
        self.units: list[UnitReduceScatter] = []
        # The comm object that each unit had before `attach`, and whether its reductions were forced to be sums.
        self._replaced: dict[FSDPModule, tuple[Any, bool]] = {}
        self._channels = Channels()
        self._model_ref: weakref.ref[Module] | None = None  # the model of the last `attach`

    @property
    def wire_bytes(self) -> int:
        """Payload bytes of gradients that this rank has handed to reduce-scatters; see `Channel.bytes_sent`."""
        return self._channels.bytes_sent

    def attach(self, model: Module, *, ranks_per_node: int | None = None, timeout: timedelta | None = None) -> None:
        """Sets a comm object in each unit of ``model``, once all are sharded. All ranks must call it.

        The residuals of an earlier fit of the same model are added to its next gradients. ``ranks_per_node`` is the
        number of ranks that the launcher has started on each node, None for all ranks; ``timeout`` is the limit of
        collectives in groups that are created here, None for the backend's default.

        Raises:
            OptionError: torch is too old, a unit is sharded in a way that is not supported here, or ``ranks_per_node``
                does not divide its shards.
        """
        is_same_model = self._model_ref is not None and self._model_ref() is model
        earlier_residuals = self.residuals() if is_same_model else {}
        self._model_ref, self._channels.timeout = weakref.ref(model), timeout
        units = sharded_units(model)
        self.compressor = place_on_nodes(self.compressor, units, ranks_per_node)
        if isinstance(self.compressor, ShardedHierarchical):
            self._channels.ranks_per_node = self.compressor.ranks_per_node
        self.units = []
        for index, (module, columns) in enumerate(units):
            in_order = [columns[place] for place in order_of_gradients(module)]
            unit = UnitReduceScatter(self.compressor, self._channels, index, in_order, module)
            self._register(module, unit, replicas_and_shards(columns)[0])
        self.add_residuals(earlier_residuals)
        if not any(column.is_compressed for unit in self.units for column in unit.columns):
            uncompressed = "only parameters that are sent uncompressed: complex ones, and those of one dimension"
            content = uncompressed if self.units else "one shard"
            warn_once(f"comm_hook has no effect here: each unit of the model has {content}.")
        if self.units:  # compiled here, so that the first backward does not wait for the compiler
            device, dtypes = self.units[0].device, set().union(*map(dtypes_of, self._replaced))
            channels = {unit.num_shards: self._channels.of(unit.group) for unit in self.units}

            def run() -> None:
                for channel in channels.values():
                    run_on_shards(self.compressor, channel, dtypes, device)

            prepare_kernels(run, device, has_c_kernels=self.compressor.claims.has_c_kernels)

    def detach(self) -> None:
        """Restores the units' own reduce-scatters; the state stays for checkpoints and the model's next fit."""
        for module, (comm, is_sum) in self._replaced.items():
            module.set_custom_reduce_scatter(comm)
            module.set_gradient_divide_factor(None)  # type: ignore[arg-type]  # its default
            module.set_force_sum_reduction_for_comms(is_sum)
        self._replaced = {}
        if self._channels.overlap is not None:
            self._channels.overlap.close()
            self._channels.overlap = None

    def allow_overlap(self) -> None:
        """Lets reduce-scatters run beside backward on CPU. Backward waits for all of them. All ranks must call it."""
        groups = {unit.group: None for unit in self.units if unit.may_overlap}
        if groups:
            self._channels.overlap = Overlap(list(groups), self._channels)

    def trained_names(self) -> set[str]:
        """Returns the names of the parameters that are not frozen."""
        return {column.name for unit in self.units for column in unit.columns if column.is_trained()}

    def residuals(self) -> dict[str, Tensor]:
        """Returns this rank's residuals in float32, by parameter name and in the parameter's shape."""
        return self.state().all_residuals()

    def state(self) -> CommState[UnitLayout]:
        """Returns this rank's state between two backwards, without copying, for `restore` with as many ranks."""
        buckets = {index: unit.saved for index, unit in enumerate(self.units) if unit.saved is not None}
        residuals = {name: residual for unit in self.units for name, residual in unit.residuals.items()}
        num_syncs = max((unit.num_syncs for unit in self.units), default=0)
        is_common = not (buckets or residuals or self.compressor.claims.keeps_residual)
        return CommState(self.compressor, num_syncs, buckets, residuals, is_common=is_common)

    def restore(self, state: CommState[UnitLayout]) -> None:
        """Continues from a state that `state` has returned on this rank. Call it before the first backward."""
        for index, unit in enumerate(self.units):
            unit.resume(state.buckets.get(index), state.num_syncs)
        self.add_residuals(state.residuals)

    def add_residuals(self, residuals: Mapping[str, Tensor]) -> None:
        """Adds residuals to the next gradients. Call it before the first backward."""
        for unit in self.units:
            unit.add_residuals(residuals)

    def _register(self, module: FSDPModule, unit: UnitReduceScatter, num_replicas: int) -> None:
        if has_own_divide_factor(module):
            raise OptionError(
                f"comm_hook and set_gradient_divide_factor exclude each other; it was called on the unit of {unit.name}"
            )
        own = comm_object(module, "reduce_scatter"), forces_sum(module)
        with option_errors(f"comm_hook does not work with the unit of {unit.name}: "):
            module.set_custom_reduce_scatter(unit)  # type: ignore[arg-type]  # the base class is private
        # The comm object averages over the shards, so FSDP2 only needs to divide by the number of replicas.
        module.set_gradient_divide_factor(float(num_replicas))
        module.set_force_sum_reduction_for_comms(True)
        self.units.append(unit)
        self._replaced[module] = own


class Channels:
    """The collectives of the units of a model, and the thread that they may run in.

    Attributes:
        overlap: the thread, if there is one.
        ranks_per_node: if set, channels have parts within and across nodes of this number of consecutive ranks.
        timeout: limit of collectives within and across nodes; None for the backend's default.
    """

    def __init__(self) -> None:
        self.overlap: Overlap | None = None
        self.ranks_per_node: int | None = None
        self.timeout: timedelta | None = None
        self._by_group: dict[dist.ProcessGroup, Channel] = {}

    @property
    def bytes_sent(self) -> int:
        return sum(channel.bytes_sent for channel in self._by_group.values())

    def of(self, group: dist.ProcessGroup) -> Channel:
        """Returns the collectives over a group. With nodes, all ranks must make the first call for a group."""
        if group not in self._by_group:
            size = self.ranks_per_node
            nodes = () if size is None else shared_node_groups(group, size, self.timeout)
            self._by_group[group] = Channel(group, *nodes)
        return self._by_group[group]

    def of_borrowed(self, groups: BorrowedGroups) -> Channel:
        """Returns the collectives over borrowed groups."""
        return self._by_group.setdefault(groups.all_ranks, Channel(groups.all_ranks, groups.within, groups.across))


class Overlap:
    """A thread for reduce-scatters of CPU tensors beside backward; on CUDA, FSDP2's own streams do that.

    It has its own process groups. All ranks must make one at the same time.
    """

    def __init__(self, groups: list[dist.ProcessGroup], channels: Channels) -> None:
        self._executor = WorkerThread()
        self._borrowed: dict[dist.ProcessGroup, BorrowedGroups] = {
            group: borrow_groups(group, ranks_per_node=channels.ranks_per_node, timeout=channels.timeout)
            for group in groups
        }
        self._channels = {group: channels.of_borrowed(borrowed) for group, borrowed in self._borrowed.items()}
        self._under_way: deque[tuple[BucketFuture, Around]] = deque()

    def submit(self, task: Callable[[Channel], None], output: Tensor, group: dist.ProcessGroup, around: Around) -> None:
        """Starts a task that fills ``output`` before this backward ends; waits while too many tasks are under way.

        Waiting for the task takes place within ``around()``. Both this method and `wait` raise the exception of an
        earlier task.
        """

        def run() -> None:
            with torch.no_grad():
                task(self._channels[group])

        future = self._executor.future(output)
        self._executor.submit(run, [future])
        self._under_way.append((future, around))
        try:
            call_after_backward(self.wait)
        except RuntimeError:  # no backward is running, because the user has set up FSDP2 to reduce after it
            self.wait()
        self.wait(_MAX_UNDER_WAY)

    def wait(self, num_left: int = 0) -> None:
        while len(self._under_way) > num_left:
            future, around = self._under_way.popleft()
            with around():
                future.future.wait()

    def close(self) -> None:
        """Ends the thread, and returns the groups to the pool unless ranks may be out of step."""
        self._under_way.clear()
        if self._executor.close():
            for borrowed in self._borrowed.values():
                borrowed.return_to_pool()


def place_on_nodes(
    compressor: ShardedCompressor, units: Sequence[tuple[FSDPModule, list[Column]]], ranks_per_node: int | None
) -> ShardedCompressor:
    """Returns a compressor adapted to the nodes that the shards of ``units``, from `sharded_units`, are on.

    ``ranks_per_node`` is the number of ranks that the launcher has started on each node; None for all ranks. Raises an
    OptionError if the shards of a unit cannot be divided into these nodes.
    """
    if not isinstance(compressor, ShardedHierarchical):
        return compressor
    numbers_of_shards = [replicas_and_shards(columns)[1] for _, columns in units]
    with option_errors("comm_hook: "):
        return compressor.on_nodes(numbers_of_shards, ranks_per_node or dist.get_world_size())


def sharded_units(model: Module) -> list[tuple[FSDPModule, list[Column]]]:
    """Returns the units of a model that have several shards, with their parameters; may raise an OptionError."""
    check_available()
    names = {module: name for name, module in model.named_modules()}
    units = []
    for module in units_of(model):
        module.reshard()  # the last forward may have left its parameters gathered
        columns = list(_columns(module, names))
        if columns and replicas_and_shards(columns)[1] > 1:
            units.append((module, columns))
    return units


def _columns(module: FSDPModule, names: dict[Module, str]) -> Iterator[Column]:
    """Yields the parameters of a unit in the order in which FSDP2 gathers them."""
    for owner, attribute in parameters_of(module):
        parameter, name = getattr(owner, attribute), ".".join(filter(None, (names[owner], attribute)))
        *replicated, sharded = parameter.placements
        if type(sharded) is not Shard or not all(type(placement) is Replicate for placement in replicated):
            raise OptionError(
                f"comm_hook and param_hook support data parallelism only, but the placements of {name} are"
                f" {parameter.placements}: use fully_shard alone, over a mesh of shards or of replicas and shards"
            )
        yield Column(name, owner, attribute, parameter.shape, sharded.dim)


def replicas_and_shards(columns: Sequence[Column]) -> tuple[int, int]:
    """Returns the number of replicas of each shard, and the number of shards."""
    meshes = {column.parameter.device_mesh for column in columns}
    if len(meshes) > 1:
        raise OptionError(
            "comm_hook and param_hook need one mesh for all parameters of a unit, but the unit of"
            f" {columns[0].name} has several"
        )
    (mesh,) = meshes
    num_shards = mesh.size(mesh.ndim - 1)
    return mesh.size() // num_shards, num_shards
