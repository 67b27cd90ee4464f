"""The comm object of one unit of FSDP2, which compresses its reduce-scatter.

FSDP2 lays out the gradients of a unit as ``(W, columns)``. Row ``r`` holds the shards of rank ``r``, concatenated over
the parameters, and each shard is padded with zeros to the size of the parameter's largest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module

from lightning_commopt.compat.fsdp import has_all_reduce_hook, keeps_reduced
from lightning_commopt.compat.fsdp_calls import NotifyingComm
from lightning_commopt.compat.torch import foreach_copy_
from lightning_commopt.compressors.base import State, finish
from lightning_commopt.compressors.channel import Channel
from lightning_commopt.compressors.registry import compressor_name
from lightning_commopt.compressors.shards import ShardedCompressor, first_seed
from lightning_commopt.measure.recorder import issued_by
from lightning_commopt.sync.gather import map_tensors
from lightning_commopt.sync.state import residuals_by_name
from lightning_commopt.sync.unit_layout import UnitLayout, shard_numel
from lightning_commopt.text.validation import warn_once

if TYPE_CHECKING:
    from lightning_commopt.sync.fsdp2.gradients import Channels

SavedUnit = tuple[tuple[str, ...], UnitLayout, State]
"""The names of a unit's compressed parameters, their layout, and the compressor's state."""


class Column(NamedTuple):
    """A parameter of a unit, which is an attribute of the module ``owner``."""

    name: str  # name of the parameter in the model
    owner: Module
    attribute: str  # name of the parameter in ``owner``
    shape: torch.Size  # shape without sharding
    dim: int  # dimension in which the parameter is sharded

    @property
    def parameter(self) -> DTensor:
        """The parameter; it is sharded unless its unit is gathered."""
        parameter: DTensor = getattr(self.owner, self.attribute)
        return parameter

    @property
    def is_compressed(self) -> bool:
        return len(self.shape) > 1 and not self.parameter.is_complex()

    def is_trained(self) -> bool:
        return self.parameter.requires_grad

    def width(self, num_shards: int) -> int:
        """Returns the number of elements in the largest shard."""
        return shard_numel(self.shape, self.dim, num_shards)


def layout_of(columns: Sequence[Column], num_shards: int) -> UnitLayout:
    """Returns the layout of rows that contain only these parameters."""
    return UnitLayout(tuple(x.shape for x in columns), tuple(x.dim for x in columns), num_shards)


def full_name(compressor: ShardedCompressor) -> str:
    """Returns the registered names of a compressor and of the compressors inside it.

    >>> from lightning_commopt.compressors import ShardedHierarchical, ShardedInt8
    >>> full_name(ShardedHierarchical(inner=ShardedInt8()))
    'hierarchical int8'
    """
    inner = getattr(compressor, "inner", None)
    return f"{compressor_name(compressor)}{f' {full_name(inner)}' if isinstance(inner, ShardedCompressor) else ''}"


def runs_of(columns: Sequence[Column], num_shards: int) -> list[tuple[int, bool]]:
    """Returns the runs of a row: the number of adjacent elements, and whether they are compressed."""
    widths = [(column.width(num_shards), column.is_compressed) for column in columns]
    return [(sum(width for width, _ in run), key) for key, run in groupby(widths, lambda pair: pair[1])]


class CompressedUnit(NotifyingComm):
    """A comm object that compresses, and reports all messages of a collective to its listener as a single one."""

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

    The ``compressor`` is used for parameters of at least two dimensions. The ``columns`` are all parameters of the
    unit, sharded, in the order in which FSDP2 lays out their gradients.

    Attributes:
        name: the name of the unit, which is that of its first parameter.
        may_overlap: whether its reduce-scatters may run in a thread.
    """

    def __init__(
        self,
        compressor: ShardedCompressor,
        channels: Channels,
        index: int,
        columns: Sequence[Column],
        module: FSDPModule,
    ) -> None:
        self.name = columns[0].name
        self.columns, self._module = tuple(columns), module
        self._compressor = compressor
        self._source = f"{full_name(compressor)} reduce-scatter"
        self._channels = channels
        self.first_seed = first_seed(index, dist.get_rank())  # the rank in the group is not unique among replicas
        self._sharded = [column.parameter for column in columns]
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
        self.num_syncs = 0
        self.residuals: dict[str, Tensor] = {}  # residuals that are not in the state, by parameter name

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Writes the mean over all ranks of this rank's row of the input ``(W * columns,)`` to the output.

        The input is not changed. ``op`` is always SUM, because `ShardedSync.attach` makes FSDP2 pass it.
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
        self.num_syncs += 1
        carried = None
        if self._num_columns == rows.shape[1]:
            runs = self._runs
            carried = self._take_residual([column for column in used if not column.is_compressed], rows.device)
        else:
            runs = [(rows.shape[1], False)]
            warn_once(
                f"comm_hook sends the gradients of the unit of {self.name} uncompressed in backwards that do not reach"
                " all of its parameters. set_reduce_scatter_unused_params(True) on the unit avoids that, if your torch"
                " has it."
            )
        state = self._state

        def task(channel: Channel) -> None:
            num_bytes = _message_bytes(rows, runs, self._compressor)
            with self._notifying("reduce_scatter", self._source, num_bytes):
                _reduce_scatter(rows, output_tensor, runs, self._compressor, state, channel, carried)

        if overlap is not None and self.may_overlap:
            # All ranks must use the thread's group, also those where gradients were left over from before.
            overlap.submit(task, output_tensor, self.group, self.around)
            if not self._is_untouched(output_tensor):
                overlap.wait()
            return
        if overlap is not None:
            overlap.wait()
        task(channel)

    def _is_untouched(self, output: Tensor) -> bool:
        """Returns whether FSDP2 only creates views of the output, so that it may be filled later."""
        return not has_all_reduce_hook(self._module) and all(
            column.parameter is parameter and parameter.grad is None and keeps_reduced(parameter, output.dtype)
            for column, parameter in zip(self.columns, self._sharded, strict=True)
        )

    @property
    def saved(self) -> SavedUnit | None:
        """The compressor's state, not copied; None if there is none."""
        if self._restored is not None or not self._state:
            return self._restored
        columns = [column for column in self._used if column.is_compressed]
        return tuple(column.name for column in columns), layout_of(columns, self.num_shards), self._state

    def resume(self, saved: SavedUnit | None, num_syncs: int) -> None:
        """Replaces the state, between two backwards, and drops all residuals; `add_residuals` may follow."""
        self._restored, self.num_syncs = saved, num_syncs
        self.residuals, self._state, self._used = {}, {}, ()

    def add_residuals(self, residuals: Mapping[str, Tensor]) -> None:
        """Adds the residuals of this unit's parameters to the next gradients."""
        keeps_residual = self._compressor.claims.keeps_residual
        for column in self.columns:
            if column.name in residuals and (keeps_residual or not column.is_compressed):
                self.residuals[column.name] = residuals[column.name]

    def _lay_out(self, used: tuple[Column, ...], device: torch.device) -> None:
        """Determines which columns are compressed: in the first backward, and after parameters were (un)frozen."""
        saved, self._restored = self.saved, None
        columns = [column for column in used if column.is_compressed]
        names, layout = tuple(column.name for column in columns), layout_of(columns, self.num_shards)
        self._used, self._runs = used, runs_of(used, self.num_shards)
        self._num_columns = sum(width for width, _ in self._runs)
        if any(column.parameter.is_complex() for column in used):
            warn_once("comm_hook sends complex gradients uncompressed: it compresses only floating-point gradients.")
        if saved is not None and saved[:2] == (names, layout):
            self._state = saved[2]
            return
        if saved is not None:
            _protect([saved[2], self.residuals])
            self.residuals = residuals_by_name(self._compressor, {0: saved}, self.residuals)
        seed = self.first_seed + self.num_syncs
        self._state = self._compressor.init(layout.numel, self.num_shards, device, seed) if columns else {}
        residual = self._take_residual(columns, device)
        if residual is not None:
            self._compressor.set_residual(self._state, residual)

    def _take_residual(self, columns: Sequence[Column], device: torch.device) -> Tensor | None:
        """Removes and returns the residuals of some parameters, ``(W, s)`` float32; None if there are none."""
        taken = {x.name: self.residuals.pop(x.name) for x in columns if x.name in self.residuals}
        if not taken:
            return None
        _protect(taken)
        wholes = [taken.get(x.name, torch.zeros(x.shape, device=device)).to(device, torch.float32) for x in columns]
        return layout_of(columns, self.num_shards).join(wholes)


def _protect(value: object) -> None:
    """Keeps the memory of tensors from another stream until the current one is done, also if the host frees them."""

    def record(tensor: Tensor) -> None:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))

    map_tensors(record, value)


def _message_bytes(rows: Tensor, runs: Sequence[tuple[int, bool]], compressor: ShardedCompressor) -> int:
    world_size, num_columns = rows.shape
    compressed = sum([width for width, is_compressed in runs if is_compressed])
    sent = compressor.message_bytes(compressed, world_size) if compressed else 0
    return sent + world_size * (num_columns - compressed) * rows.element_size()


def _reduce_scatter(
    rows: Tensor,
    output: Tensor,
    runs: Sequence[tuple[int, bool]],
    compressor: ShardedCompressor,
    state: State,
    channel: Channel,
    carried: Tensor | None = None,
) -> None:
    """Averages this rank's row of ``rows`` ``(W, columns)`` over all ranks into ``output`` ``(columns,)``.

    ``runs`` has the number of adjacent columns of the same kind, and whether ``compressor`` compresses them.
    ``carried`` is a residual for the other columns.
    """
    widths, lanes = [width for width, _ in runs], channel.lanes()
    parts = list(zip(rows.split(widths, 1), output.split(widths), runs, strict=True))
    compressed = [(columns, mean) for columns, mean, (_, is_compressed) in parts if is_compressed]
    others = [(columns, mean) for columns, mean, (_, is_compressed) in parts if not is_compressed]
    rounds = pending = exact = None
    if compressed:
        rounds = compressor.rounds([part for part, _ in compressed], [mean for _, mean in compressed], state, lanes[0])
        pending = next(rounds)
    if others:
        other_widths = [part.shape[1] for part, _ in others]
        message = lanes[1].scratch("uncompressed", (channel.size, sum(other_widths)), rows.dtype, rows.device)
        foreach_copy_(message.split(other_widths, 1), [part for part, _ in others])
        if carried is not None:
            message.add_(carried)
        with issued_by("uncompressed reduce-scatter"):
            exact = lanes[1].reduce_scatter(message)
    if rounds is not None:
        finish(rounds, pending)
    if exact is not None:
        foreach_copy_([mean for _, mean in others], exact.wait().div_(channel.size).split(other_widths))
