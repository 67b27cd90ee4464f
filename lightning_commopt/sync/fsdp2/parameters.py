"""Sends parameters as int8 in FSDP2's all-gathers, through a comm object for each unit (torch >= 2.9)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module

from lightning_commopt.compat.fsdp import comm_object, dtypes_of
from lightning_commopt.compat.torch import foreach_copy_
from lightning_commopt.compressors.blockwise import BlockInt8
from lightning_commopt.compressors.channel import Channel
from lightning_commopt.compressors.kernels import blockwise
from lightning_commopt.compressors.kernels.blockwise_format import BlockFormat
from lightning_commopt.measure.recorder import issued_by
from lightning_commopt.sync.fsdp2.gradients import Channels, replicas_and_shards, sharded_units
from lightning_commopt.sync.fsdp2.unit import Column, CompressedUnit, runs_of
from lightning_commopt.sync.warm_up import SHARD_SIZES, floating_point, prepare_kernels
from lightning_commopt.text.validation import warn_once

_FORMAT = BlockFormat(8, BlockInt8.block_size)
"""Parameters are sent in the default format of `BlockInt8`."""


class GatheredParameters:
    """The all-gathers of a model that FSDP2 shards, with parameters of at least two dimensions as int8."""

    def __init__(self) -> None:
        self._channels = Channels()
        self._replaced: dict[FSDPModule, Any] = {}  # the comm object that each unit had before `attach`

    @property
    def wire_bytes(self) -> int:
        return self._channels.bytes_sent

    def attach(self, model: Module) -> None:
        """Sets a comm object in each unit of ``model``, once all are sharded. All ranks must call it."""
        for module, columns in sharded_units(model):
            comm = UnitAllGather(self._channels, columns)
            self._replaced[module] = comm_object(module, "all_gather")
            module.set_custom_all_gather(comm)  # type: ignore[arg-type]  # duck typing
        if self._replaced:  # compiled here, so that the first forward does not wait for the compiler
            device, dtypes = comm.device, set().union(*map(dtypes_of, self._replaced))
            prepare_kernels(lambda: round_samples(dtypes, device), device, option="param_hook")

    def detach(self) -> None:
        """Restores the units' own all-gathers."""
        for module, comm in self._replaced.items():
            module.set_custom_all_gather(comm)
        self._replaced = {}


class UnitAllGather(CompressedUnit):
    """The comm object of one unit, for ``set_custom_all_gather``.

    Forward and backward use parameters that were rounded to int8, in blocks that share a scale, identically on all
    ranks, while the optimizer keeps the exact ones. Parameters of one dimension are sent uncompressed. The ``columns``
    are in the order in which FSDP2 lays them out.

    This differs from the quantized weights of Wang et al., "ZeRO++" (arXiv:2306.10209), in that there is no second copy
    of the parameters within each node.
    """

    def __init__(self, channels: Channels, columns: Sequence[Column]) -> None:
        self._channels = channels
        self._name = columns[0].name
        self.device = torch.device(columns[0].parameter.device_mesh.device_type)
        _, self._num_shards = replicas_and_shards(columns)
        self._runs = runs_of(columns, self._num_shards)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Writes the rounded shards of all ranks to the output ``(W * columns,)``.

        The input ``(columns,)`` may be a part of the output. The result is a handle to wait for, or None if the
        collective has ended.
        """
        widths = [width for width, _ in self._runs]
        is_whole = input_tensor.numel() == sum(widths) and group.size() == self._num_shards
        if not is_whole or not input_tensor.is_floating_point():
            warn_once(f"param_hook: the unit of {self._name} is gathered uncompressed, because its layout has changed.")
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)
        rows = output_tensor.view(self._num_shards, -1)
        num_bytes = self._num_shards * self._message_bytes(input_tensor.element_size())
        with self._notifying("all_gather", "int8 all-gather", num_bytes):
            gather(input_tensor.split(widths), rows.split(widths, 1), self._runs, self._channels.of(group))
        return None

    def _message_bytes(self, element_bytes: int) -> int:
        compressed = sum([width for width, is_compressed in self._runs if is_compressed])
        exact = sum([width for width, is_compressed in self._runs if not is_compressed])
        return (_FORMAT.shard_bytes(compressed, 1) if compressed else 0) + exact * element_bytes


def gather(
    own: Sequence[Tensor], all_ranks: Sequence[Tensor], runs: Sequence[tuple[int, bool]], channel: Channel
) -> None:
    """Gathers runs of this rank's parameters, ``(s_i,)`` each, from all ranks.

    Args:
        own: this rank's runs, ``(s_i,)`` each.
        all_ranks: the results, ``(W, s_i)`` each; overwritten.
        runs: for each run ``s_i``, and whether it is compressed, which rounds it.
        channel: the collectives.
    """
    first, second = channel.lanes()
    pending = exact = None
    parts = list(zip(own, all_ranks, [is_compressed for _, is_compressed in runs], strict=True))
    if matrices := [part for part, _, is_compressed in parts if is_compressed]:
        flat = torch.cat(matrices)
        row_bytes = _FORMAT.shard_bytes(flat.numel(), 1)
        message = first.scratch("message", (1, row_bytes), torch.uint8, flat.device)
        blockwise.encode(flat, None, message, _FORMAT)
        with issued_by("int8 all-gather"):
            pending = first.all_gather(message.view(-1))
    if vectors := [part for part, _, is_compressed in parts if not is_compressed]:
        with issued_by("uncompressed all-gather"):
            exact = second.all_gather(torch.cat(vectors))
    if pending is not None:
        filled = _FORMAT.shard_numel(flat.numel(), 1)
        decoded = first.scratch("decoded", (channel.size * filled,), flat.dtype, flat.device)
        blockwise.decode(pending.wait(), decoded, _FORMAT)
        rounded = decoded.view(channel.size, filled)[:, : flat.numel()].split([part.numel() for part in matrices], 1)
        foreach_copy_([rows for _, rows, is_compressed in parts if is_compressed], rounded)
    if exact is not None:
        unchanged = exact.wait().split([part.numel() for part in vectors], 1)
        foreach_copy_([rows for _, rows, is_compressed in parts if not is_compressed], unchanged)


def round_samples(dtypes: Collection[torch.dtype], device: torch.device) -> None:
    """Rounds small shards that together need all kernels of `gather`, so that these are compiled."""
    for dtype in floating_point(dtypes):
        for numel in SHARD_SIZES:
            message = torch.empty(1, _FORMAT.shard_bytes(numel, 1), dtype=torch.uint8, device=device)
            blockwise.encode(torch.ones(numel, dtype=dtype, device=device), None, message, _FORMAT)
            decoded = torch.empty(_FORMAT.shard_numel(numel, 1), dtype=dtype, device=device)
            blockwise.decode(message, decoded, _FORMAT)
