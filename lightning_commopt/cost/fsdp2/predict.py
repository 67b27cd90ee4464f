"""How long the collectives of a step of FSDP2 take under a plan, beside what the step computes."""

from __future__ import annotations

from typing import NamedTuple

from lightning_commopt.cost.fsdp2.arithmetic import ShardCost, ShardCosts
from lightning_commopt.cost.fsdp2.links import Line, Lines
from lightning_commopt.cost.fsdp2.simulate import Piece, Task, backward_s
from lightning_commopt.cost.fsdp2.workload import AS_INT8, Exposure, ShardedWorkload, Unit
from lightning_commopt.plan.sharded import ShardedPlan


class World(NamedTuple):
    """The machines and the number of batches that a step is predicted for."""

    links: Lines
    costs: ShardCosts
    gather_cost: ShardCost  # the arithmetic of ``param_hook="int8"``
    num_ranks: int
    num_batches: int  # batches that are accumulated for a step


class Range(NamedTuple):
    """A time that is known up to its ends."""

    low_s: float
    high_s: float

    @property
    def middle_s(self) -> float:
        return (self.low_s + self.high_s) / 2


def communication_s(plan: ShardedPlan, work: ShardedWorkload, world: World) -> Range:
    """Returns how long the computation of a step waits for collectives, and for the compression of gradients.

    On CPU the two ends are the same: FSDP2's own collectives block the thread that issues them, and backward is
    simulated beside compressed reduce-scatters. On CUDA only waits in the run are known, see `_exposed_s`.
    """
    if world.num_ranks < 2:
        return Range(0.0, 0.0)
    num_reduced = num_reducing(plan, world.num_batches)
    if work.device != "cpu":
        pairs = zip((work.gathers, work.reduces), on_streams(plan, work, world), strict=True)
        gathers, reduces = (_exposed_s(known, seconds) for known, seconds in pairs)
        ends = zip(gathers, reduces, strict=True)
        return Range(*(world.num_batches * gathered + num_reduced * reduced for gathered, reduced in ends))
    gather_s = sum(
        sum(piece.seconds for piece in _gather(plan, work.units[unit], work, world)) for unit in work.forward
    )
    total_s = world.num_batches * (gather_s - work.backward_s)
    for num_backwards, reduces_gradients in ((num_reduced, True), (world.num_batches - num_reduced, False)):
        if num_backwards:
            tasks = _tasks(plan, work, world, reduces_gradients=reduces_gradients)
            total_s += num_backwards * backward_s(tasks, shares_core=work.shares_core, num_others=work.num_others)
    return Range(total_s, total_s)


def num_reducing(plan: ShardedPlan, num_batches: int) -> int:
    """Returns the batches of a step whose gradients are reduced."""
    return num_batches if plan.accumulate_grads == "sharded" else 1


def _tasks(plan: ShardedPlan, work: ShardedWorkload, world: World, *, reduces_gradients: bool) -> list[Task]:
    """Returns what a backward does on CPU."""
    tasks = []
    for operation, place, after_s in work.backward:
        unit = work.units[place]
        tasks.append(Task((Piece(after_s),)))
        if operation == "all_gather":
            tasks.append(Task(_gather(plan, unit, work, world)))
        elif reduces_gradients:
            tasks.append(Task(_reduce(plan, unit, work, world), is_handed_over=plan.comm_hook is not None))
    return tasks


def _gather(plan: ShardedPlan, unit: Unit, work: ShardedWorkload, world: World) -> tuple[Piece, ...]:
    """Returns the all-gather of a unit."""
    own, payload = world.links.all_gather, unit.parameters
    if plan.param_hook is None:
        return (_message(own, payload.num_bytes, world),)
    # NCCL has one all-gather for everybody; over gloo compressed parameters are exchanged directly.
    line = own if work.device != "cpu" else world.links.exchange
    return _compressed(
        line, payload.sent_bytes(AS_INT8, world.num_ranks), world.gather_cost, payload.matrix_bytes, world
    )


def _reduce(plan: ShardedPlan, unit: Unit, work: ShardedWorkload, world: World) -> tuple[Piece, ...]:
    """Returns the reduce-scatter of a unit."""
    hook, payload = plan.comm_hook, unit.gradients
    if hook is None:
        return (_message(world.links.reduce_scatter, payload.num_bytes, world),)
    sent_bytes = payload.sent_bytes(hook, world.num_ranks)
    return _compressed(world.links.exchange, sent_bytes, world.costs[hook], payload.matrix_bytes, world)


def _compressed(line: Line, sent_bytes: float, cost: ShardCost, matrix_bytes: float, world: World) -> tuple[Piece, ...]:
    before_s, after_s = cost.times_s(matrix_bytes) if matrix_bytes else (0.0, 0.0)
    return Piece(before_s), _message(line, sent_bytes, world), Piece(after_s)


def _message(line: Line, num_bytes: float, world: World) -> Piece:
    cpu_s = line.cpu_s(num_bytes, world.num_ranks)
    seconds = max(line.time_s(num_bytes, world.num_ranks), cpu_s, 1e-9)
    # gloo's own collectives keep the link busy in one direction at a time, or send more than an exchange does.
    link_share = min(1.0, world.links.exchange.s_per_byte / max(line.s_per_byte, 1e-15))
    return Piece(seconds, min(1.0, cpu_s / seconds), max(link_share, 0.01))


def on_streams(plan: ShardedPlan, work: ShardedWorkload, world: World) -> tuple[float, float]:
    """Returns the seconds of the all-gathers and of the reduce-scatters of a batch, on CUDA."""
    gathered = [*work.forward, *(call.unit for call in work.backward if call.operation == "all_gather")]
    reduced = [call.unit for call in work.backward if call.operation == "reduce_scatter"]
    return (
        sum(_seconds(_gather(plan, work.units[place], work, world)) for place in gathered),
        sum(_seconds(_reduce(plan, work.units[place], work, world)) for place in reduced),
    )


def _exposed_s(known: Exposure, seconds: float) -> Range:
    """Returns how long computation waits for collectives that take ``seconds`` in place of those in the run.

    What computation hides of them stays hidden, or shrinks as they do; what they take longer is waited for, or hidden.

    >>> _exposed_s(Exposure(seconds=4.0, exposed_s=2.0), 3.0), _exposed_s(Exposure(seconds=4.0, exposed_s=2.0), 5.0)
    (Range(low_s=1.0, high_s=1.5), Range(low_s=2.0, high_s=3.0))
    """
    change_s = seconds - known.seconds
    if change_s > 0:
        return Range(known.exposed_s, known.exposed_s + change_s)
    return Range(max(0.0, known.exposed_s + change_s), known.exposed_s * seconds / max(known.seconds, 1e-12))


def _seconds(pieces: tuple[Piece, ...]) -> float:
    return sum(piece.seconds for piece in pieces)
