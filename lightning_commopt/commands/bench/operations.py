"""Torch's collectives: how to call each on the shared memory, and what it must return.

torch's all_reduce, broadcast and reduce work in place; out of place the message is copied first, as a caller would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commopt.commands.bench import pattern
from lightning_commopt.commands.bench.groups import Memory, Ranks
from lightning_commopt.measure.link.bench_result import Case

_REDOPS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


@dataclass(frozen=True)
class Call:
    """A case that can be run.

    Attributes:
        run: makes one call, which is done when the current stream is. A plain collective is torch's function with
            positional arguments: Python's overhead is visible in small messages, a keyword is 1 % of 8 bytes over gloo.
        fill: prepares the memory for a call whose result is checked.
        num_wrong: returns the number of wrong elements on this rank after such a call.
    """

    run: Callable[[], object]
    fill: Callable[[], None]
    num_wrong: Callable[[], int]


def prepare(case: Case, ranks: Ranks, memory: Memory, root: int) -> Call:
    """Returns a collective's case, ready to run; ``root`` is the index of the root in its scope."""
    dtype = getattr(torch, case.dtype)
    first, second = memory.views(dtype, case.size_bytes // dtype.itemsize)
    job = _Job(case, ranks, root, send=first, recv=second if case.place == "out" else first)
    return Call(_in_order(*job.calls()), lambda: pattern.fill(job.send, ranks.index), job.num_wrong)


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
        """Returns torch's functions to call, in order."""
        send, recv, group, redop = (
            self.send,
            self.recv,
            self.ranks.group,
            _REDOPS.get(self.case.redop, dist.ReduceOp.SUM),
        )
        root, operation = self.ranks.members[self.root], self.case.operation
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
        """Returns the number of wrong elements on this rank."""
        ranks, redop, count = self.ranks, self.case.redop, self.case.count
        match self.case.operation:
            case "all_gather" | "all_to_all" as operation:
                starts = [rank * count if operation == "all_gather" else self.own.start for rank in range(ranks.size)]
                parts = zip(self.recv.split(count), starts, strict=True)
                return sum(pattern.num_wrong(part, [rank], offset=at) for rank, (part, at) in enumerate(parts))
            case "send_recv":
                return pattern.num_wrong(self.recv, [(ranks.index - 1) % ranks.size])
            case "broadcast":
                return pattern.num_wrong(self.recv, [self.root])
            case "reduce_scatter":
                return pattern.num_wrong(self.reduced_part, range(ranks.size), redop, self.own.start)
            case "reduce" if ranks.index != self.root:
                return 0
        return pattern.num_wrong(self.recv, range(ranks.size), redop)


def _in_order(*calls: Callable[[], object]) -> Callable[[], object]:
    """Returns a function that makes these calls; a single one is returned as it is."""
    if len(calls) == 1:
        return calls[0]

    def run() -> None:
        for call in calls:
            call()

    return run
