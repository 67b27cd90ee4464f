"""Each collective as torch has it: how to call it on the shared memory, and what must come of it.

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
            positional arguments: what Python adds shows in small messages, a keyword as 1 % of 8 bytes over gloo.
        fill: prepares the memory for a call whose result is checked.
        num_wrong: of this rank's elements after such a call.
    """

    run: Callable[[], object]
    fill: Callable[[], None]
    num_wrong: Callable[[], int]


@dataclass(frozen=True)
class _Job:
    """A case on this rank: ``send`` and ``recv`` are ``(n,)``, the whole message; in place they are the same."""

    case: Case
    ranks: Ranks
    root: int
    send: Tensor
    recv: Tensor

    @property
    def is_root(self) -> bool:
        return self.ranks.index == self.root

    @property
    def own(self) -> slice:
        """Where this rank's part is in a message that is divided."""
        return slice(self.ranks.index * self.case.count, (self.ranks.index + 1) * self.case.count)

    def copies(self) -> list[Callable[[], object]]:
        """Returns what goes before a call that works in place only: a copy where the case is out of place."""
        return [] if self.case.place == "in" else [partial(self.recv.copy_, self.send)]

    def all_reduce(self, tensor: Tensor) -> Callable[[], object]:
        return partial(dist.all_reduce, tensor, _REDOPS[self.case.redop], self.ranks.group)

    def reduce(self, tensor: Tensor) -> Callable[[], object]:
        root, redop = self.ranks.members[self.root], _REDOPS[self.case.redop]
        return partial(dist.reduce, tensor, root, redop, self.ranks.group)

    def broadcast(self, tensor: Tensor) -> Callable[[], object]:
        return partial(dist.broadcast, tensor, self.ranks.members[self.root], self.ranks.group)

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> Callable[[], object]:
        return partial(dist.reduce_scatter_tensor, part, whole, _REDOPS[self.case.redop], self.ranks.group)

    def all_gather(self, whole: Tensor, part: Tensor) -> Callable[[], object]:
        return partial(dist.all_gather_into_tensor, whole, part, self.ranks.group)

    def fill_own(self) -> None:
        pattern.fill(self.send, self.ranks.index)

    def wrong(self, part: Tensor, offset: int = 0) -> int:
        return pattern.num_wrong(part, range(self.ranks.size), self.case.redop, offset)


def prepare(case: Case, ranks: Ranks, memory: Memory, root: int) -> Call:
    """Returns a collective's case, ready to run.

    Args:
        case: of a collective.
        ranks: of its scope.
        memory: of at least the message.
        root: index of the rank that broadcasts, or that receives what is reduced.
    """
    dtype = getattr(torch, case.dtype)
    first, second = memory.views(dtype, case.size_bytes // dtype.itemsize)
    job = _Job(case, ranks, root, send=first, recv=second if case.place == "out" else first)
    return _PREPARE[case.operation](job)


def _in_turn(*calls: Callable[[], object]) -> Callable[[], object]:
    """Returns a function that makes these calls; a single one is returned as it is."""
    if len(calls) == 1:
        return calls[0]

    def run() -> None:
        for call in calls:
            call()

    return run


def _all_reduce(job: _Job) -> Call:
    run = _in_turn(*job.copies(), job.all_reduce(job.recv))
    return Call(run, job.fill_own, lambda: job.wrong(job.recv))


def _reduce(job: _Job) -> Call:
    run = _in_turn(*job.copies(), job.reduce(job.recv))
    return Call(run, job.fill_own, lambda: job.wrong(job.recv) if job.is_root else 0)


def _reduce_broadcast(job: _Job) -> Call:
    run = _in_turn(*job.copies(), job.reduce(job.recv), job.broadcast(job.recv))
    return Call(run, job.fill_own, lambda: job.wrong(job.recv))


def _broadcast(job: _Job) -> Call:
    copies = job.copies() if job.is_root else []
    run = _in_turn(*copies, job.broadcast(job.recv))
    return Call(run, job.fill_own, lambda: pattern.num_wrong(job.recv, [job.root]))


def _reduce_scatter(job: _Job) -> Call:
    part = job.recv[job.own] if job.case.place == "in" else job.recv[: job.case.count]
    return Call(job.reduce_scatter(part, job.send), job.fill_own, lambda: job.wrong(part, job.own.start))


def _reduce_scatter_all_gather(job: _Job) -> Call:
    part = job.recv[job.own]
    run = _in_turn(job.reduce_scatter(part, job.send), job.all_gather(job.recv, part))
    return Call(run, job.fill_own, lambda: job.wrong(job.recv))


def _all_gather(job: _Job) -> Call:
    part = job.send[job.own]

    def num_wrong() -> int:
        parts = enumerate(job.recv.split(job.case.count))
        return sum(pattern.num_wrong(each, [rank], offset=rank * job.case.count) for rank, each in parts)

    return Call(job.all_gather(job.recv, part), job.fill_own, num_wrong)


def _all_to_all(job: _Job) -> Call:
    def num_wrong() -> int:
        parts = enumerate(job.recv.split(job.case.count))
        return sum(pattern.num_wrong(each, [rank], offset=job.own.start) for rank, each in parts)

    run = partial(dist.all_to_all_single, job.recv, job.send, group=job.ranks.group)
    return Call(run, job.fill_own, num_wrong)


def _send_recv(job: _Job) -> Call:
    ranks = job.ranks
    target, source = ranks.member(ranks.index + 1), ranks.member(ranks.index - 1)
    both = [
        dist.P2POp(dist.irecv, job.recv, source, group=ranks.group),
        dist.P2POp(dist.isend, job.send, target, group=ranks.group),
    ]

    def run() -> None:
        for work in dist.batch_isend_irecv(both):
            work.wait()

    return Call(run, job.fill_own, lambda: pattern.num_wrong(job.recv, [(ranks.index - 1) % ranks.size]))


_PREPARE: dict[str, Callable[[_Job], Call]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_to_all": _all_to_all,
    "send_recv": _send_recv,
    "reduce_broadcast": _reduce_broadcast,
    "reduce_scatter_all_gather": _reduce_scatter_all_gather,
}
