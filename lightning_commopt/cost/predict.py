"""Predicts the time of a step under a plan, with an interval and its assumptions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Generic, TypeVar

from typing_extensions import NamedTuple

from lightning_commopt.compressors import Compressor
from lightning_commopt.compressors.base import PIECE_NUMEL
from lightning_commopt.compressors.registry import compressor_name
from lightning_commopt.cost.buckets import buckets_of, layout_of
from lightning_commopt.cost.compressor_cost import CompressorCost, own_average
from lightning_commopt.cost.simulate import Job, Outcome, Phase, simulate
from lightning_commopt.cost.workload import Gradient, Workload
from lightning_commopt.measure.link.link import Link
from lightning_commopt.plan import CommPlan, Plan
from lightning_commopt.text.validation import check_integer

MODEL_ERROR = 0.05
"""The model's error over a step has this standard deviation where it does not extrapolate. It is about the mean
absolute error of predictions in the network lab, see ``docs/evidence/predict.md``."""

COST_RATIO = 1.5
"""The arithmetic of a compressor in training lies within this ratio of that on scratch buckets. Chosen on the MLP of
``benchmarks/prediction_matrix.py``, such that 95 % intervals held 92 to 98 % of its steps."""

LEAST_SHARE = 0.25
"""No interval goes below this share of the expected step, unless computing takes less. Of 1545 predicted steps in
``benchmarks/results`` none took less than 0.38 of what was expected, but their links were seen or probed."""

_LEAST_SHARE_OF_ALL = 0.05
"""No interval goes below this share of the expected step at all, as noise must not make a step take no time."""

Costs = Mapping[Compressor | None, CompressorCost]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A step under a plan."""

    step_s: float  # expected
    low_s: float  # lower end of the 95 % interval
    high_s: float  # upper end
    exposed_s: float  # time in which backward has nothing left to compute and waits for gradient sync
    reasons: tuple[str, ...] = ()  # assumptions behind it, in words


_Plan = TypeVar("_Plan", bound=Plan)


class Candidate(NamedTuple, Generic[_Plan]):
    """A plan, and what it would take."""

    plan: _Plan
    prediction: Prediction


class Errors(NamedTuple):
    """By how much longer a step takes if what it was predicted from is off, in seconds; negative for shorter."""

    fast_link_s: float
    slow_link_s: float
    fast_arithmetic_s: float
    slow_arithmetic_s: float


def predict(
    plan: CommPlan,
    workload: Workload,
    link: Link,
    costs: Costs,
    *,
    num_ranks: int | None = None,
    fitted: tuple[CommPlan, Errors] | None = None,
) -> Prediction:
    """Predicts the median step. Only the buckets and the compressor of the plan count.

    A compressor without ``costs`` is assumed to compute nothing. ``num_ranks=None`` stands for the workload's own.
    ``fitted`` is the plan that workload, link and costs were fitted to, whose step is known, and its errors. An error
    of the link counts only as far as it changes the difference to that plan; so does one of arithmetic with the same
    compressor.

    Raises:
        ValueError: ``num_ranks`` is below 1.
    """
    num_ranks = workload.num_ranks if num_ranks is None else num_ranks
    check_integer("num_ranks", num_ranks, at_least=1)
    num_bytes = _sent_bytes(plan, workload, num_ranks)
    planned_link = link.for_bytes(num_bytes)
    expected = outcome_of(plan, workload, planned_link, costs, num_ranks)
    step_s = fixed_s(workload, num_ranks) + expected.end_s
    reasons = _reasons(plan, workload, link, costs, num_ranks)
    is_extrapolated = planned_link is not link
    if is_extrapolated:
        measured = f"the run sent {(link.seen_bytes or 0.0) / 1e6:.3g} MB in a step"
        reasons = (
            *reasons,
            f"{measured}, and plans that send up to {num_bytes / 1e6:.3g} MB are extrapolated from that",
        )
    errors = errors_of(plan, workload, planned_link, costs, num_ranks)
    if fitted is not None:
        errors = _relative_errors(
            fitted, errors, has_same_hook=plan.comm_hook == fitted[0].comm_hook, is_seen=not is_extrapolated
        )
    of_model_s = 2 * math.hypot(MODEL_ERROR * step_s, workload.spread_s)
    less_s = math.hypot(of_model_s, min(0.0, *errors[:2]), min(0.0, *errors[2:]))
    more_s = math.hypot(of_model_s, max(0.0, *errors[:2]), max(0.0, *errors[2:]))
    return Prediction(
        step_s=step_s,
        low_s=max(step_s - less_s, least_s(step_s, fixed_s(workload, num_ranks) + workload.backward_s)),
        high_s=step_s + more_s,
        exposed_s=max(0.0, expected.end_s - expected.backward_s),
        reasons=reasons,
    )


def least_s(step_s: float, computing_s: float) -> float:
    """Returns the least time that the interval of a step may have, whose computing alone takes ``computing_s``."""
    return min(LEAST_SHARE * step_s, max(_LEAST_SHARE_OF_ALL * step_s, (1 - 2 * MODEL_ERROR) * computing_s))


def errors_of(plan: CommPlan, workload: Workload, link: Link, costs: Costs, num_ranks: int) -> Errors:
    """Returns by how much a step changes at the ends of the link's interval, and of `COST_RATIO` for arithmetic."""
    expected_s = outcome_of(plan, workload, link, costs, num_ranks).end_s
    links = (link.times(link.low_ratio), link.times(link.high_ratio))
    own = {plan.comm_hook: costs[plan.comm_hook]} if plan.comm_hook in costs else {}
    others = ({hook: cost.slower(ratio) for hook, cost in own.items()} for ratio in (1 / COST_RATIO, COST_RATIO))
    ends_s = [outcome_of(plan, workload, other, own, num_ranks).end_s for other in links]
    ends_s += [outcome_of(plan, workload, link, other, num_ranks).end_s for other in others]
    return Errors(*(end_s - expected_s for end_s in ends_s))


def _relative_errors(fitted: tuple[CommPlan, Errors], errors: Errors, *, has_same_hook: bool, is_seen: bool) -> Errors:
    """Returns the errors of the difference between a step and the one that the parts were fitted to.

    An error of the link changes both steps, unless this one sends far more than was seen. So does an error of the
    arithmetic if both have the same compressor; the arithmetic of two compressors has independent errors.
    """
    own = fitted[1]
    differences = [error - own_error for error, own_error in zip(errors, own, strict=True)]
    of_link = differences[:2] if is_seen else errors[:2]
    if has_same_hook:
        of_arithmetic = differences[2:]
    else:
        of_arithmetic = [
            -math.hypot(errors.fast_arithmetic_s, own.slow_arithmetic_s),
            math.hypot(errors.slow_arithmetic_s, own.fast_arithmetic_s),
        ]
    return Errors(*of_link, *of_arithmetic)


def _sent_bytes(plan: CommPlan, workload: Workload, num_ranks: int) -> float:
    """Returns the payload that a rank sends in a step, in terms of an all-reduce."""
    hook = plan.comm_hook
    if hook is None or num_ranks == 1:
        return workload.gradient_bytes
    return sum(hook.wire_bytes(layout_of(bucket), num_ranks) for bucket in buckets_of(plan, workload.gradients))


def fixed_s(workload: Workload, num_ranks: int) -> float:
    """Returns the part of a step outside of the synchronized backward.

    It includes the wait for the last rank: the expected largest of one normal deviation for each rank.
    """
    deviation_s = workload.spread_s
    if workload.num_ranks > 1:
        deviation_s = workload.straggler_s / expected_largest(workload.num_ranks)
    return workload.data_s + workload.forward_s + workload.rest_s + deviation_s * expected_largest(num_ranks)


def jobs_of(
    plan: CommPlan, buckets: Sequence[Sequence[Gradient]], link: Link, costs: Costs, num_ranks: int, device: str
) -> list[Job]:
    """Returns what gradient sync has to do for some buckets of a backward."""
    hook = plan.comm_hook
    cost = (costs.get(hook) if hook is not None else None) or own_average()
    jobs = []
    for index, bucket in enumerate(buckets):
        gradient_bytes = sum(gradient.num_bytes for gradient in bucket)
        ready_s = max(gradient.ready_s for gradient in bucket)
        numel = gradient_bytes // bucket[0].itemsize
        num_pieces = max(1, math.ceil(numel / PIECE_NUMEL)) if device == "cpu" and hook is not None else 1
        # Payload is counted in terms of an all-reduce, as in `BucketSpan.wire_bytes`.
        sent = gradient_bytes if hook is None else hook.wire_bytes(layout_of(bucket), num_ranks)
        phases = _phases(cost, gradient_bytes / num_pieces, sent / num_pieces, link, num_ranks)
        jobs += [Job(index, ready_s, phases)] * num_pieces
    return jobs


def outcome_of(plan: CommPlan, workload: Workload, link: Link, costs: Costs, num_ranks: int) -> Outcome:
    """Returns a simulated backward; see `predict` for the arguments."""
    if num_ranks == 1:
        return Outcome(workload.backward_s, ())
    buckets = buckets_of(plan, workload.gradients)
    jobs = jobs_of(plan, buckets, link, costs, num_ranks, workload.device)
    is_gloos_own = workload.device == "cpu" and plan.comm_hook is None  # two threads, which share the connections
    return simulate(
        jobs,
        workload.backward_s,
        shares_core=workload.shares_core,
        overlaps_buckets=is_gloos_own or workload.device == "cuda",
        shares_link=is_gloos_own,
        num_others=workload.num_others,
    )


def _phases(cost: CompressorCost, gradient_bytes: float, sent: float, link: Link, num_ranks: int) -> tuple[Phase, ...]:
    phases = []
    for stage in cost.stages:
        compute_s = stage.fixed_s + stage.s_per_byte * gradient_bytes
        if compute_s > 0:
            phases.append(Phase(False, compute_s, 1.0))
        if stage.operation:
            num_bytes = stage.share * sent
            duration_s = link.time_s(stage.operation, num_bytes, num_ranks)
            cpu_s = link.cpu_s(stage.operation, num_bytes, num_ranks)
            phases.append(Phase(True, max(duration_s, cpu_s), min(1.0, cpu_s / max(duration_s, cpu_s, 1e-12))))
    return tuple(phases)


def expected_largest(num: int) -> float:
    """Returns the expected largest of ``num`` standard normal numbers, to about 1 %.

    Source: Blom, "Statistical Estimates and Transformed Beta-Variables", 1958.
    """
    return NormalDist().inv_cdf((num - 0.375) / (num + 0.25)) if num > 1 else 0.0


def _reasons(plan: CommPlan, workload: Workload, link: Link, costs: Costs, num_ranks: int) -> tuple[str, ...]:
    reasons = [f"link: {link.source}"] if link.source else []
    if not workload.is_per_gradient:
        reasons.append("gradients are assumed to become ready evenly between two buckets")
    if plan.comm_hook is not None and plan.comm_hook not in costs:
        reasons.append(f"the arithmetic of {compressor_name(plan.comm_hook)} was not measured and counts as 0 s")
    if num_ranks != workload.num_ranks:
        reasons.append(
            f"{workload.num_ranks} ranks were measured; more hops, and more ranks to wait for, are calculated"
        )
    return tuple(reasons)
