"""Shards any module over ranks, block by block, with FSDP2."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn import Module

from lightning_commopt.compat.lightning import PACKAGES
from lightning_commopt.plan import OptionError
from lightning_commopt.text.validation import warn_once

_DATA_PARALLEL = "data_parallel"
"""The name of the data-parallel dimension in Lightning's ``device_mesh``."""
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def shard(
    module: Module,
    mesh: DeviceMesh | None = None,
    *,
    blocks: type[Module] | tuple[type[Module], ...] | int,
    replicated: bool = False,
    **fsdp: Any,
) -> None:
    """Shards parameters, gradients and the optimizer's state of ``module`` over the ranks of ``mesh``, in place.

    Call it in ``configure_model``: ``shard(self, self.device_mesh, blocks=Block)``. Each block becomes a unit, whose
    parameters are gathered when its forward and its backward begin, and freed after them. Parameters in no block form
    one more unit, which is gathered in the forward of ``module``, or in ``training_step`` and the other steps if it is
    a LightningModule without a forward and without manual optimization. A module that is sharded already is not
    changed, so that ``configure_model`` may run again.

    Args:
        module: a module that is not sharded; it may be on the meta device.
        mesh: mesh of data-parallel ranks, or of replicas and shards (HSDP). Only the data-parallel dimension of
            Lightning's ``device_mesh`` is used. None for all ranks.
        blocks: the classes of the modules that become units; or the minimum number of parameters of a unit, with which
            units are found bottom-up. Weights that are used outside of the forward of their module must not be in a
            block.
        replicated: keep the gathered parameters from forward to backward, which gathers once per step instead of twice
            and takes the memory of all parameters. Gradients and the optimizer's state are still sharded.
        fsdp: further options of ``fully_shard``, such as ``mp_policy``.

    Raises:
        OptionError: ``blocks`` is neither, or ``module`` contains no module of these classes.
    """
    if isinstance(module, FSDPModule):
        return
    units = _units(module, blocks)
    if mesh is None:
        device = "cuda" if "nccl" in dist.get_backend() else "cpu"
        mesh = init_device_mesh(device, (dist.get_world_size(),))
    elif _DATA_PARALLEL in (mesh.mesh_dim_names or ()):
        _warn_if_alone(module, mesh)
        mesh = mesh[_DATA_PARALLEL]
    if replicated:
        fsdp["reshard_after_forward"] = False
    for unit in (*units, module):
        fully_shard(unit, mesh=mesh, **fsdp)
    if _has_steps_only(module):
        for step in _STEPS:
            register_fsdp_forward_method(module, step)


def _warn_if_alone(module: Module, mesh: DeviceMesh) -> None:
    """Warns if every rank would train by itself, as with sizes of "auto" on one node, where all are tensor-parallel."""
    num_ranks = mesh.size()
    if num_ranks == 1 or mesh[_DATA_PARALLEL].size() > 1 or any(isinstance(p, DTensor) for p in module.parameters()):
        return
    warn_once(
        "shard() averages no gradients here: the data-parallel dimension of the mesh has one rank, the tensor-parallel"
        f" one has {num_ranks}, and no parameter is tensor-parallel. Give the strategy data_parallel_size={num_ranks}"
        " and tensor_parallel_size=1."
    )


def _has_steps_only(module: Module) -> bool:
    """Returns whether ``module`` is a LightningModule without a forward that leaves backward to the Trainer."""
    owner = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
    is_lightnings = owner.__module__.startswith(tuple(f"{package}." for package in PACKAGES))
    return is_lightnings and bool(getattr(module, "automatic_optimization", False))


def _units(module: Module, blocks: object) -> list[Module]:
    """Returns the modules below ``module`` that become units, inner ones first."""
    if isinstance(blocks, int) and not isinstance(blocks, bool) and blocks > 0:
        uses = Counter(id(p) for part in module.modules() for p in part.parameters(recurse=False))
        return [unit for unit in _units_by_size(module, blocks, uses) if unit is not module]
    if not isinstance(blocks, type | tuple):
        raise OptionError(
            "blocks must be a module class, a tuple of module classes, or a number of parameters above 0, got"
            f" {blocks!r}"
        )
    parts = [part for part in module.modules() if isinstance(part, blocks) and part is not module]
    if not parts:
        raise OptionError(f"blocks={blocks!r}: {type(module).__name__} contains no module of this class")
    return parts[::-1]


def _units_by_size(module: Module, min_numel: int, uses: Counter[int]) -> Iterator[Module]:
    """Yields modules, inner ones first, with at least ``min_numel`` parameters that are in no unit yielded before.

    Args:
        module: the module to divide into units.
        min_numel: minimum number of parameters of a unit.
        uses: for the id of each parameter, the number of modules in ``module`` that it belongs to directly.
    """
    assigned: set[int] = set()

    def visit(part: Module) -> Iterator[Module]:
        for child in part.children():
            yield from visit(child)
        unassigned = [p for p in part.parameters() if id(p) not in assigned]
        uses_inside = Counter(id(p) for inner in part.modules() for p in inner.parameters(recurse=False))
        # Tied weights must be in one unit.
        has_all_uses = all(uses_inside[id(p)] == uses[id(p)] for p in unassigned)
        has_forward = type(part).forward is not Module.forward
        if has_forward and has_all_uses and sum(p.numel() for p in unassigned) >= min_numel:
            assigned.update(map(id, unassigned))
            yield part

    yield from visit(module)


def ranks_per_batch(strategy: object) -> int:
    """Returns how many ranks of a strategy that has its process group train on the same batches.

    These are the ranks of one tensor-parallel group, which are consecutive; without tensor parallelism it is 1.
    """
    mesh: DeviceMesh | None = getattr(strategy, "device_mesh", None)
    names = (mesh and mesh.mesh_dim_names) or ()
    if mesh is None or _DATA_PARALLEL not in names:
        return 1
    return mesh.size() // mesh.shape[names.index(_DATA_PARALLEL)]
