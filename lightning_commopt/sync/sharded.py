"""The gradient sync of a model that FSDP2 shards: which units it has, and how each is laid out (torch >= 2.9)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import Module

from lightning_commopt.compat.fsdp import (
    comm_objects,
    dtypes_of,
    has_all_reduce_hook,
    has_own_divide_factor,
    parameters_of,
    units_of,
)
from lightning_commopt.compressors.sharded import ShardedCompressor
from lightning_commopt.compressors.sharded_hierarchical import ShardedHierarchical
from lightning_commopt.plan import OptionError
from lightning_commopt.sync.sharded_overlap import Channels, Overlap
from lightning_commopt.sync.sharded_unit import Column, SavedUnits, UnitReduceScatter
from lightning_commopt.sync.warm_up import prepare_kernels, run_on_shards


class ShardedSync:
    """The gradient sync of a model that FSDP2 shards, with compressed reduce-scatters.

    Parameters of one dimension (biases, norms) travel uncompressed: they are few, and each of them matters. The
    ``compressor`` is for all others.
    """

    def __init__(self, compressor: ShardedCompressor) -> None:
        self.compressor = compressor
        self.units: list[UnitReduceScatter] = []
        self._replaced: dict[FSDPModule, Any] = {}  # by the module of a unit: its comm object before `attach`
        self._channels = Channels()

    @property
    def wire_bytes(self) -> int:
        """Payload bytes of gradients that this rank has handed to reduce-scatters; see `Channel.bytes_sent`."""
        return self._channels.bytes_sent

    def attach(self, model: Module, *, ranks_per_node: int | None = None, timeout: timedelta | None = None) -> None:
        """Gives each unit of ``model`` a comm object, once all are sharded. All ranks must call it.

        ``ranks_per_node`` is what the launcher started, None for all ranks; ``timeout`` is for collectives in groups
        that are made for this.

        Raises:
            OptionError: torch is too old, a unit is sharded in a way that is not supported here, or ``ranks_per_node``
                does not divide its shards.
        """
        residuals = self.residuals()  # of an earlier fit
        found = sharded_units(model)
        self._channels.timeout = timeout
        if isinstance(self.compressor, ShardedHierarchical):
            numbers_of_shards = [replicas_and_shards(columns)[1] for _, columns in found]
            try:
                self.compressor = self.compressor.on_nodes(numbers_of_shards, ranks_per_node or dist.get_world_size())
            except ValueError as error:
                raise OptionError(f"comm_hook: {error}") from error
            self._channels.ranks_per_node = self.compressor.ranks_per_node
        self.units = []
        for index, (modules, columns) in enumerate(found):
            unit = UnitReduceScatter(self.compressor, self._channels, index, columns)
            self._register(modules[0], unit, replicas_and_shards(columns)[0])
        self.add_residuals(residuals)
        if self.units:  # here, so that no backward waits for a compiler
            device, dtypes = self.units[0].device, set().union(*map(dtypes_of, self._replaced))
            channels = {unit.num_shards: self._channels.of(unit.group) for unit in self.units}

            def run() -> None:
                for channel in channels.values():
                    run_on_shards(self.compressor, channel, dtypes, device)

            prepare_kernels(run, device, has_c_kernels=self.compressor.claims.has_c_kernels)

    def detach(self) -> None:
        """Gives the units their own reduce-scatter back; the state stays for checkpoints and a further fit."""
        for module, comm in self._replaced.items():
            module.set_custom_reduce_scatter(comm)
            module.set_gradient_divide_factor(None)  # type: ignore[arg-type]  # its default
            module.set_force_sum_reduction_for_comms(False)
        self._replaced = {}
        if self._channels.overlap is not None:
            self._channels.overlap.close()
            self._channels.overlap = None

    def allow_overlap(self) -> None:
        """Lets reduce-scatters run beside backward on CPU; all end, or raise, before it. All ranks must call it."""
        groups = {unit.group: None for unit in self.units if unit.may_overlap}
        if groups:
            self._channels.overlap = Overlap(list(groups), self._channels)

    def residuals(self) -> dict[str, Tensor]:
        """Returns what this rank has not sent yet, in float32, by the name of the parameter and in its shape."""
        return {name: residual for unit in self.units for name, residual in unit.residuals().items()}

    def state(self) -> SavedUnits:
        """Returns this rank's state between two backwards, not copied, for `restore` with as many ranks."""
        return {unit.name: saved for unit in self.units if (saved := unit.save()) is not None}

    def restore(self, saved: SavedUnits) -> None:
        """Continues from what `state` has returned on this rank, before the first backward."""
        for unit in self.units:
            if unit.name in saved:
                unit.restore(saved[unit.name])

    def add_residuals(self, residuals: Mapping[str, Tensor]) -> None:
        """Adds what other ranks had not sent, as `residuals` returns it. Before the first backward."""
        for unit in self.units:
            unit.add_residuals(residuals)

    def _register(self, module: FSDPModule, unit: UnitReduceScatter, num_replicas: int) -> None:
        if has_own_divide_factor(module):
            raise OptionError(
                f"comm_hook and set_gradient_divide_factor exclude each other; it was called on the unit of {unit.name}"
            )
        own = next(comm for operation, comm in comm_objects(module) if operation == "reduce_scatter")
        try:
            module.set_custom_reduce_scatter(unit)  # type: ignore[arg-type]  # the base class is private
        except ValueError as error:
            raise OptionError(f"comm_hook does not work with the unit of {unit.name}: {error}") from error
        # The comm object averages over the shards; what is left to divide by are replicas.
        module.set_gradient_divide_factor(float(num_replicas))
        module.set_force_sum_reduction_for_comms(True)
        unit.may_overlap = unit.may_overlap and not has_all_reduce_hook(module)
        self.units.append(unit)
        self._replaced[module] = own


def check_available(option: str = "comm_hook") -> None:
    """Raises an OptionError that names the option if this torch has no comm objects."""
    needed = ("set_custom_reduce_scatter", "set_force_sum_reduction_for_comms", "set_gradient_divide_factor")
    if not all(hasattr(FSDPModule, name) for name in needed):
        raise OptionError(
            f"{option} of CommOptModelParallel needs torch >= 2.9, where FSDP2 takes other collectives, but torch"
            f" {torch.__version__} is installed"
        )


def sharded_units(model: Module) -> list[tuple[tuple[FSDPModule, ...], list[Column]]]:
    """Returns the units of a model that have several shards, with their parameters; or an OptionError."""
    check_available()
    names = {module: name for name, module in model.named_modules()}
    units = []
    for modules in units_of(model):
        for module in modules:
            module.reshard()  # what the last forward has gathered
        columns = list(_columns(modules[0], names))
        if columns and replicas_and_shards(columns)[1] > 1:
            units.append((modules, columns))
    return units


def _columns(module: FSDPModule, names: dict[Module, str]) -> Iterator[Column]:
    """Returns the parameters of a unit as FSDP2 lays them out."""
    for owner, attribute in parameters_of(module):
        parameter: DTensor = getattr(owner, attribute)
        name = ".".join(filter(None, (names[owner], attribute)))
        *replicated, sharded = parameter.placements
        if type(sharded) is not Shard or not all(type(each) is Replicate for each in replicated):
            raise OptionError(
                f"comm_hook works with data parallelism only, but {name} has the placements {parameter.placements}:"
                " shard with fully_shard alone, over a mesh of shards, or of replicas and shards"
            )
        yield Column(name, owner, attribute, parameter.shape, sharded.dim)


def replicas_and_shards(columns: Sequence[Column]) -> tuple[int, int]:
    """Returns how many ranks have the same shard, and how many shards there are."""
    meshes = {getattr(column.owner, column.attribute).device_mesh for column in columns}
    if len(meshes) > 1:
        raise OptionError(
            f"comm_hook needs one mesh for all parameters of a unit, but that of {columns[0].name} has several"
        )
    (mesh,) = meshes
    num_shards = mesh.size(mesh.ndim - 1)
    return mesh.size() // num_shards, num_shards
