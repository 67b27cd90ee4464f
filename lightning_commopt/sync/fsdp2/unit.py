"""The comm object of one unit of FSDP2, which compresses its reduce-scatter.

FSDP2 lays out the gradients of a unit as ``(W, columns)``. Row ``r`` holds the shards of rank ``r``, concatenated over
the parameters, and each shard is padded with zeros to the size of the parameter's largest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module

from lightning_commopt.compat.fsdp import NotifyingComm, keeps_reduced
from lightning_commopt.compat.torch import foreach_copy_
from lightning_commopt.compressors.base import State, finish
from lightning_commopt.compressors.channel import Channel
from lightning_commopt.compressors.registry import compressor_name
from lightning_commopt.compressors.shards import ShardedCompressor, first_seed
from lightning_commopt.measure.recorder import issued_by
from lightning_commopt.sync.state import CheckpointError, fit_to
from lightning_commopt.text.validation import warn_once

if TYPE_CHECKING:
    from lightning_commopt.sync.fsdp2.gradients import Channels

SavedUnit = dict[str, Any]
"""The names of a unit's compressed parameters, and the compressor's state."""

SavedUnits = dict[str, SavedUnit]
"""The saved state of each unit, by the unit's name."""


class Column(NamedTuple):
    """A parameter of a unit, which is an attribute of its owner."""

    name: str  # its name in the model
    owner: Module
    attribute: str  # its name in the owner
    shape: torch.Size  # its shape without sharding
    dim: int  # the dimension in which it is cut into shards

    @property
    def is_compressed(self) -> bool:
        return len(self.shape) > 1

    def is_trained(self) -> bool:
        return bool(getattr(self.owner, self.attribute).requires_grad)

    def width(self, world_size: int) -> int:
        """Returns the number of elements of the largest shard."""
        size = self.shape[self.dim]
        return -(-size // world_size) * (self.shape.numel() // size) if size else 0

    def whole(self, rows: Tensor) -> Tensor:
        """Returns ``rows`` ``(W, width)``, in FSDP2's layout, in the shape of the parameter."""
        chunk = list(self.shape)
        chunk[self.dim] = -(-chunk[self.dim] // len(rows))
        return torch.cat([row.view(chunk) for row in rows], self.dim).narrow(self.dim, 0, self.shape[self.dim])

    def rows(self, whole: Tensor, world_size: int) -> Tensor:
        """Reverts `whole`; the padding of the last shards is zero."""
        size = self.shape[self.dim]
        missing = list(self.shape)
        missing[self.dim] = -(-size // world_size) * world_size - size
        filled = torch.cat([whole, whole.new_zeros(missing)], self.dim)
        return torch.stack([chunk.flatten() for chunk in filled.chunk(world_size, self.dim)])


def full_name(compressor: ShardedCompressor) -> str:
    """Returns the names in configurations of a compressor and of the compressor inside it.

    >>> from lightning_commopt.compressors import ShardedHierarchical, ShardedInt8
    >>> full_name(ShardedHierarchical(inner=ShardedInt8()))
    'hierarchical int8'
    """
    inner = getattr(compressor, "inner", None)
    return f"{compressor_name(compressor)}{f' {full_name(inner)}' if isinstance(inner, ShardedCompressor) else ''}"


def runs_of(columns: Sequence[Column], num_shards: int) -> list[tuple[int, bool]]:
    """Returns the runs of a row: numbers of adjacent elements, and whether these are compressed."""
    widths = [(column.width(num_shards), column.is_compressed) for column in columns]
    return [(sum(width for width, _ in run), key) for key, run in groupby(widths, lambda pair: pair[1])]


class CompressedUnit(NotifyingComm):
    """A comm object that compresses, and notifies of all messages of a collective as one, with their bytes."""

    @contextmanager
    def _notifying(self, operation: str, source: str, num_bytes: int) -> Iterator[None]:
        with issued_by(source):
            issued = None if self.listener is None else self.listener(operation, num_bytes)
            with self.around():
                yield
            if issued is not None:
                issued.end()


class UnitReduceScatter(CompressedUnit):
    """The comm object of one unit, for ``set_custom_reduce_scatter``.

    Args:
        compressor: compresses parameters of at least two dimensions.
        channels: the collectives of the units.
        index: number of the unit in the model.
        columns: all parameters of the unit, which are sharded, in the order in which FSDP2 lays them out.

    Attributes:
        name: the name of the unit, which is that of its first parameter.
        may_overlap: whether its reduce-scatters may run in a thread.
    """

    def __init__(
        self, compressor: ShardedCompressor, channels: Channels, index: int, columns: Sequence[Column]
    ) -> None:
        self.name = columns[0].name
        self.columns = tuple(columns)
        self._compressor = compressor
        self._source = f"{full_name(compressor)} reduce-scatter"
        self._channels = channels
        self.first_seed = first_seed(index, dist.get_rank())  # the rank in the group is not unique among replicas
        self._sharded: list[DTensor] = [getattr(column.owner, column.attribute) for column in columns]
        mesh = self._sharded[0].device_mesh
        self.group = mesh.get_group(mesh.ndim - 1)
        self.num_shards = self.group.size()
        self.device = torch.device(mesh.device_type)
        self.may_overlap = mesh.device_type == "cpu" and mesh.ndim == 1
        self._used: tuple[Column, ...] = ()
        self._runs: list[tuple[int, bool]] = []
        self._num_columns = 0
        self._state: State = {}
        self._restored: SavedUnit | None = None
        self._kept: dict[str, Tensor] = {}

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Writes the mean over all ranks of this rank's row of the input ``(W * columns,)`` to the output.

        The input is not changed. ``op`` is the sum, since `ShardedSync.attach` makes FSDP2 ask for it.
        """
        assert op == dist.ReduceOp.SUM
        assert not async_op
        channel, overlap = self._channels.of(group), self._channels.overlap
        rows = input_tensor.view(self.num_shards, -1)
        used = tuple(column for column in self.columns if column.is_trained())
        if used != self._used:
            if overlap is not None:
                overlap.wait()
            self._lay_out(used, rows.device)
        if self._num_columns == rows.shape[1]:
            runs = self._runs
        else:
            runs = [(rows.shape[1], False)]
            warn_once(
                f"comm_hook sends the gradients of the unit of {self.name} uncompressed in backwards that do not reach"
                " all of its parameters; set_reduce_scatter_unused_params(True) on the unit, where torch has it, avoids"
                " that."
            )
        state = self._state

        def task(channel: Channel) -> None:
            num_bytes = _message_bytes(rows, runs, self._compressor)
            with self._notifying("reduce_scatter", self._source, num_bytes):
                _reduce_scatter(rows, output_tensor, runs, self._compressor, state, channel)

        if overlap is not None and self._is_untouched(output_tensor):
            overlap.submit(task, output_tensor, self.group)  # FSDP2 may have another group of the same ranks
            return
        if overlap is not None:
            overlap.wait()
        task(channel)

    def _is_untouched(self, output: Tensor) -> bool:
        """Returns whether FSDP2 only makes views of the output, so that it may be filled later."""
        return self.may_overlap and all(
            getattr(column.owner, column.attribute) is parameter
            and parameter.grad is None
            and keeps_reduced(parameter, output.dtype)
            for column, parameter in zip(self.columns, self._sharded, strict=True)
        )

    def save(self) -> SavedUnit | None:
        """Returns the state of the compressor and the names of its parameters; None if there is no state yet."""
        if self._restored is not None or not self._state:
            return self._restored
        return {"names": self._compressed()[0], "state": self._state}

    def restore(self, saved: SavedUnit) -> None:
        self._restored = saved

    def residuals(self) -> dict[str, Tensor]:
        """Returns what this rank has not sent yet, by the name of the parameter and in its shape."""
        columns = {column.name: column for column in self.columns}
        rows = {**self._kept, **self._rows_of_state()}
        return {name: columns[name].whole(its_rows) for name, its_rows in rows.items()}

    def add_residuals(self, residuals: Mapping[str, Tensor]) -> None:
        """Adds the residuals of this unit's parameters to the next gradients."""
        if not self._compressor.claims.keeps_residual:
            return
        for column in self.columns:
            if column.name in residuals and column.is_compressed:
                self._kept[column.name] = column.rows(residuals[column.name], self.num_shards)

    def _lay_out(self, used: tuple[Column, ...], device: torch.device) -> None:
        """Lays out the compressed columns, in the first backward and after parameters were frozen or unfrozen."""
        self._kept |= self._rows_of_state()
        self._used, self._runs = used, runs_of(used, self.num_shards)
        self._num_columns = sum(width for width, _ in self._runs)
        numel = sum(width for width, is_compressed in self._runs if is_compressed)
        self._state = self._compressor.init(numel, self.num_shards, device, self.first_seed) if numel else {}
        names, widths = self._compressed()
        if self._restored is not None:
            restored, self._restored = self._restored, None
            if restored["names"] != names:
                raise CheckpointError(f"it was saved with other parameters than {', '.join(names)}")
            self._state = fit_to(restored["state"], self._state, device)
        elif any(name in self._kept for name in names):
            zeros = torch.zeros(self.num_shards, numel, device=device)
            for name, rows in zip(names, zeros.split(widths, 1), strict=True):
                if name in self._kept:
                    rows.copy_(self._kept.pop(name))
            self._compressor.set_residual(self._state, zeros)

    def _compressed(self) -> tuple[list[str], list[int]]:
        """Returns the names of the compressed parameters, and the widths of their columns."""
        columns = [column for column in self._used if column.is_compressed]
        return [column.name for column in columns], [column.width(self.num_shards) for column in columns]

    def _rows_of_state(self) -> dict[str, Tensor]:
        """Returns the residual ``(W, width)`` of each parameter in the state."""
        names, widths = self._compressed()
        residual = self._compressor.residual(self._state, sum(widths), self.num_shards)
        return {} if residual is None else dict(zip(names, residual.split(widths, 1), strict=True))


def _message_bytes(rows: Tensor, runs: Sequence[tuple[int, bool]], compressor: ShardedCompressor) -> int:
    world_size, num_columns = rows.shape
    compressed = sum([width for width, yes in runs if yes])
    sent = compressor.message_bytes(compressed, world_size) if compressed else 0
    return sent + world_size * (num_columns - compressed) * rows.element_size()


def _reduce_scatter(
    rows: Tensor,
    output: Tensor,
    runs: Sequence[tuple[int, bool]],
    compressor: ShardedCompressor,
    state: State,
    channel: Channel,
) -> None:
    """Averages this rank's row of ``rows`` ``(W, columns)`` over all ranks into ``output`` ``(columns,)``.

    ``runs`` are numbers of adjacent columns, and whether ``compressor`` takes them; see `runs_of`.
    """
    widths, lanes = [width for width, _ in runs], channel.lanes()
    parts = list(zip(rows.split(widths, 1), output.split(widths), [yes for _, yes in runs], strict=True))
    compressed = [(columns, mean) for columns, mean, yes in parts if yes]
    others = [(columns, mean) for columns, mean, yes in parts if not yes]
    rounds = pending = exact = None
    if compressed:
        rounds = compressor.rounds([part for part, _ in compressed], [mean for _, mean in compressed], state, lanes[0])
        pending = next(rounds)
    if others:
        other_widths = [part.shape[1] for part, _ in others]
        message = lanes[1].scratch("uncompressed", (channel.size, sum(other_widths)), rows.dtype, rows.device)
        foreach_copy_(message.split(other_widths, 1), [part for part, _ in others])
        with issued_by("uncompressed reduce-scatter"):
            exact = lanes[1].reduce_scatter(message)
    if rounds is not None:
        finish(rounds, pending)
    if exact is not None:
        foreach_copy_([mean for _, mean in others], exact.wait().div_(channel.size).split(other_widths))
