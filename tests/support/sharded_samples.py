"""A run of FSDP2 whose times follow from a simple model, and what is predicted from."""

from __future__ import annotations

from typing import Any

from lightning_commopt.compressors.sharded import ShardedBf16, ShardedInt8
from lightning_commopt.cost.fsdp2.arithmetic import ShardCost
from lightning_commopt.cost.fsdp2.basis import ShardedBasis
from lightning_commopt.cost.fsdp2.links import Line, Lines, Load, ShardLinks
from lightning_commopt.cost.fsdp2.workload import Call, Payload, ShardedWorkload, Unit
from lightning_commopt.plan.sharded import ShardedPlan

MB = 10**6
INT8, BF16 = ShardedInt8(), ShardedBf16()
S_PER_BYTE = 1e-8
"""Time of a byte in an exchange. FSDP2's own all-gather takes twice that, and its reduce-scatter three times."""

NO_LOAD = Load({})
NO_COST = ShardCost(0.0, 0.0, 0.0, 0.0)
UNIT = Unit("w", Payload(2 * MB, 0, 4), Payload(2 * MB, 0, 4))  # 8 MB, of which a rank sends 4 MB to the other one
EXCHANGE_S = 4 * MB * S_PER_BYTE
COMPUTE_S = 0.1
"""Computation before each collective of backward."""


def line(ratio: float, **changed: Any) -> Line:
    return Line(0.0, ratio * S_PER_BYTE, 0.0, 0.0, True)._replace(**changed)


def links() -> ShardLinks:
    return ShardLinks(expected=Lines(line(2), line(3), line(1, is_ring=False)), source="a sample").in_training(NO_LOAD)


def basis(plan: ShardedPlan | None = None, **changed: Any) -> ShardedBasis:
    """Returns the basis of a step that computes 0.7 s outside of collectives and backward, with two units."""
    backward = [("all_gather", 1), ("reduce_scatter", 1), ("all_gather", 0), ("reduce_scatter", 0)]
    options: dict[str, Any] = {
        "units": (UNIT, UNIT),
        "forward": (0, 1),
        "backward": tuple(Call(operation, unit, COMPUTE_S) for operation, unit in backward),
        "step_s": 0.7 + 4 * COMPUTE_S + 4 * 2 * EXCHANGE_S + 2 * 3 * EXCHANGE_S,
        "once_s": 0.2,
        "num_ranks": 2,
    }
    work = ShardedWorkload(**{**options, **changed})
    costs = dict.fromkeys((BF16, INT8), NO_COST)
    return ShardedBasis(
        plan=plan or ShardedPlan(), workload=work, links=links(), costs=dict(costs), gather_cost=NO_COST
    )
