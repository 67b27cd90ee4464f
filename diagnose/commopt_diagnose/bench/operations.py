"""Makes cases ready to run: calls of torch's collectives and comm hooks on shared memory, with a check of results.

torch's all_reduce, broadcast and reduce work in place; out of place the message is copied first, as a caller would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from commopt_diagnose.bench.cases import has_nodes
from commopt_diagnose.bench.result import Case
from lightning_commopt.compressors import Compressor, Layout, compressor_from_config
from lightning_commopt.compressors.base import finish
from lightning_commopt.compressors.channel import Channel
from lightning_commopt.compressors.hierarchical import place_on_nodes
from lightning_commopt.compressors.kernels import c_library
from lightning_commopt.sync.groups import borrow_groups

_REDOPS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
# `fill` has the reasons for a prime period and for few, small values in a checked message.
_PERIOD, _NUM_VALUES = 1021, 3
_CHUNK = 4096 * _PERIOD  # elements that are filled or compared at once, which bounds the extra memory
_STEP = 1_000_000  # a step after any ``start_step``, so that a compressor compresses from the first call on
_TILE_NUMEL = 65_521  # a prime: no two blocks of a compressor are equal


@dataclass(frozen=True)
class Ranks:
    """The ranks of a case: their group, their global ranks, and this rank's index in the group."""

    group: dist.ProcessGroup
    members: tuple[int, ...]
    index: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Ranks:
        return cls(group, tuple(dist.get_process_group_ranks(group)), dist.get_rank(group))

    @property
    def size(self) -> int:
        return len(self.members)

    def member(self, index: int) -> int:
        """Returns the global rank at ``index`` modulo their number."""
        return self.members[index % self.size]


def ranks_by_scope(ranks_per_node: int) -> tuple[dict[str, Ranks], Channel]:
    """Returns the ranks of each scope, and a channel over all ranks. All ranks must call it."""
    world = dist.group.WORLD
    assert isinstance(world, dist.ProcessGroup)
    world_size = dist.get_world_size()
    if not has_nodes(world_size, ranks_per_node):
        return {"all": Ranks.of(world)}, Channel(world)
    borrowed = borrow_groups(world, ranks_per_node=ranks_per_node)
    within, across = borrowed.within, borrowed.across
    assert within is not None
    assert across is not None
    scopes = {"all": Ranks.of(world), "node": Ranks.of(within), "across": Ranks.of(across)}
    return scopes, Channel(world, within, across)


def views(memory: Sequence[Tensor], dtype: torch.dtype, numel: int) -> Sequence[Tensor]:
    """Returns the beginning of both buffers in ``memory``, ``(num_bytes,)`` uint8 each, as ``(numel,)``."""
    return [buffer[: numel * dtype.itemsize].view(dtype) for buffer in memory]


class Call(NamedTuple):
    """A case that can be run."""

    # Makes one call, which is done when the current stream is. A plain collective is torch's function with positional
    # arguments, as Python's overhead shows in small messages: a keyword takes 1 % of the time of 8 bytes over gloo.
    run: Callable[[], object]
    fill: Callable[[], None]  # prepares the memory for a call whose result is checked
    num_wrong: Callable[[], int]  # returns the number of wrong elements on this rank after such a call


def prepare(case: Case, ranks: Ranks, memory: Sequence[Tensor], root: int) -> Call:
    """Returns a collective's case, ready to run; ``root`` is the index of the root in its scope."""
    dtype = getattr(torch, case.dtype)
    first, second = views(memory, dtype, case.size_bytes // dtype.itemsize)
    job = _Job(case, ranks, root, send=first, recv=second if case.place == "out" else first)
    calls = job.calls()
    run = calls[0] if len(calls) == 1 else lambda: [call() for call in calls]
    return Call(run, lambda: fill(job.send, ranks.index), job.num_wrong)


@dataclass(frozen=True)
class _Job:
    """A case on this rank: ``send`` and ``recv`` are ``(n,)``, the whole message; in place they are the same."""

    case: Case
    ranks: Ranks
    root: int
    send: Tensor
    recv: Tensor

    @property
    def own(self) -> slice:
        """Slice of this rank's part of a message."""
        return slice(self.ranks.index * self.case.count, (self.ranks.index + 1) * self.case.count)

    @property
    def reduced_part(self) -> Tensor:
        """Where reduce_scatter writes this rank's part."""
        is_apart = self.case.operation == "reduce_scatter" and self.case.place == "out"
        return self.recv[: self.case.count] if is_apart else self.recv[self.own]

    def calls(self) -> list[Callable[[], object]]:
        send, recv, group, operation = self.send, self.recv, self.ranks.group, self.case.operation
        root, redop = self.ranks.members[self.root], _REDOPS.get(self.case.redop, dist.ReduceOp.SUM)
        copies = [] if self.case.place == "in" else [partial(recv.copy_, send)]
        if operation == "all_reduce":
            return [*copies, partial(dist.all_reduce, recv, redop, group)]
        if operation == "broadcast":
            return [*(copies if self.ranks.index == self.root else ()), partial(dist.broadcast, recv, root, group)]
        if operation in ("reduce", "reduce_broadcast"):
            broadcasts = [partial(dist.broadcast, recv, root, group)] if operation == "reduce_broadcast" else []
            return [*copies, partial(dist.reduce, recv, root, redop, group), *broadcasts]
        if operation in ("reduce_scatter", "reduce_scatter_all_gather"):
            part = self.reduced_part
            gathers = [partial(dist.all_gather_into_tensor, recv, part, group)] if operation != "reduce_scatter" else []
            return [partial(dist.reduce_scatter_tensor, part, send, redop, group), *gathers]
        if operation == "all_gather":
            return [partial(dist.all_gather_into_tensor, recv, send[self.own], group)]
        if operation == "all_to_all":
            return [partial(dist.all_to_all_single, recv, send, group=group)]
        assert operation == "send_recv", operation
        target, source = self.ranks.member(self.ranks.index + 1), self.ranks.member(self.ranks.index - 1)
        both = [dist.P2POp(dist.irecv, recv, source, group=group), dist.P2POp(dist.isend, send, target, group=group)]
        return [lambda: [work.wait() for work in dist.batch_isend_irecv(both)]]

    def num_wrong(self) -> int:
        ranks, redop, count = self.ranks, self.case.redop, self.case.count
        match self.case.operation:
            case "all_gather" | "all_to_all" as operation:
                starts = [rank * count if operation == "all_gather" else self.own.start for rank in range(ranks.size)]
                parts = zip(self.recv.split(count), starts, strict=True)
                return sum(num_wrong(part, [rank], offset=at) for rank, (part, at) in enumerate(parts))
            case "send_recv":
                return num_wrong(self.recv, [(ranks.index - 1) % ranks.size])
            case "broadcast":
                return num_wrong(self.recv, [self.root])
            case "reduce_scatter":
                return num_wrong(self.reduced_part, range(ranks.size), redop, self.own.start)
            case "reduce" if ranks.index != self.root:
                return 0
        return num_wrong(self.recv, range(ranks.size), redop)


def fill(part: Tensor, rank: int, offset: int = 0) -> None:
    """Fills ``part`` ``(n,)`` with a rank's numbers from ``offset`` in its message on.

    Every rank has its own integers, small enough for exact sums in every dtype, with a prime period: an element at the
    wrong offset is noticed.
    """
    table = _table(rank, offset).to(part.device, part.dtype)
    for chunk in part.split(_CHUNK):
        whole = len(chunk) // _PERIOD * _PERIOD
        chunk[:whole].view(-1, _PERIOD).copy_(table)
        chunk[whole:].copy_(table[: len(chunk) - whole])


def num_wrong(part: Tensor, ranks: Sequence[int], redop: str = "sum", offset: int = 0) -> int:
    """Returns how many elements of ``part`` ``(n,)`` differ from the ranks' numbers, reduced, from ``offset`` on."""
    tables = torch.stack([_table(rank, offset) for rank in ranks])
    reduced = tables.sum(0) if redop == "sum" else tables.amin(0) if redop == "min" else tables.amax(0)
    expected = reduced.to(part.dtype).to(part.device)
    wrong = 0
    for chunk in part.split(_CHUNK):
        whole = len(chunk) // _PERIOD * _PERIOD
        wrong += int((chunk[:whole].view(-1, _PERIOD) != expected).sum())
        wrong += int((chunk[whole:] != expected[: len(chunk) - whole]).sum())
    return wrong


def _table(rank: int, offset: int) -> Tensor:
    """Returns one period ``(1021,)`` of a rank's numbers."""
    index = (torch.arange(_PERIOD, device="cpu") + offset) % _PERIOD
    return (index * index + index // 7 + rank * (index % 2 + 1)) % _NUM_VALUES


def compressor_of(comm_hook: Any) -> Compressor:
    """Returns the compressor; ValueError if it is unknown, has a wrong option, or is "none", which is not a hook."""
    try:
        compressor = compressor_from_config(comm_hook)
    except (ValueError, TypeError) as error:
        raise ValueError(f"--comm-hook: {error}") from None
    if compressor is None:
        raise ValueError("--comm-hook none is DDP's own all-reduce: name the collective all_reduce instead")
    return compressor


def prepare_hook(case: Case, ranks: Ranks, channel: Channel, memory: Sequence[Tensor], ranks_per_node: int) -> Call:
    """Returns a comm hook's case over all ranks, ready to run; the bucket is one matrix, as square as possible.

    Raises:
        ValueError: the comm hook is unknown, or does not support these ranks.
    """
    compressor, _ = place_on_nodes(compressor_of(case.comm_hook), ranks.size, ranks_per_node)
    if compressor.claims.has_c_kernels:
        c_library.load()
    dtype = getattr(torch, case.dtype)
    flat, other = views(memory, dtype, case.count)
    num_rows = next(rows for rows in range(math.isqrt(case.count), 0, -1) if case.count % rows == 0)
    shape = torch.Size((num_rows, case.count // num_rows))
    layout = Layout((shape,), ((shape[1], 1),), dtype)
    state = compressor.init(layout, flat.device, _STEP)

    def run() -> None:
        with torch.no_grad():
            finish(compressor.rounds(flat, layout, state, channel))

    generator = torch.Generator().manual_seed(ranks.index)
    tile = torch.randn(_TILE_NUMEL, generator=generator, device="cpu").to(flat)

    def fill() -> None:
        for part in flat.split(_TILE_NUMEL):
            part.copy_(tile[: len(part)])

    def num_unlike_first() -> int:
        other.copy_(flat)
        dist.broadcast(other, ranks.members[0], group=ranks.group)
        return int((other != flat).sum())

    return Call(run, fill, num_unlike_first)
