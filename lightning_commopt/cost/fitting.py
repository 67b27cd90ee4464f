"""Fits the parts of a step to a run, so that the model reproduces the steps that the run has measured.

Parts that were measured alone take longer in training: other threads want the same cores, caches and memory. A fit
finds the one factor by which they do. What no factor explains is added to every step, whatever its plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from lightning_commopt.cost.predict import Costs, fixed_s, outcome_of
from lightning_commopt.cost.workload import Workload
from lightning_commopt.measure.link.link import Link
from lightning_commopt.plan import CommPlan

_MIN_FACTOR, _MAX_FACTOR = 1 / 4, 8.0
"""Limits of a plausible factor: beyond them the rest stays unexplained, or is added to the part that no plan changes. A
judgement: threads that share a core with others take a few times as long, and nothing takes less than a quarter of the
time that it takes alone."""

_NUM_HALVINGS = 16
"""Halvings of the range of factors, on a logarithmic scale, which find the factor to better than 0.01 %."""

_EXPOSED_SHARE = 0.02
"""Gradient sync counts as hidden if it exposes less than this share of a step, so that the step does not show how long
it took. A judgement: below it the noise of a median step is as large."""


class FittedParts(NamedTuple):
    """The parts of a step as they are in training."""

    workload: Workload
    link: Link
    costs: Costs
    arithmetic_factor: float = 1.0  # compressors take this many times as long in training as alone


def fit_to_step(parts: FittedParts, plan: CommPlan, step_s: float) -> FittedParts:
    """Returns the parts such that a step of ``plan`` takes ``step_s``, the measured median of a run with that plan.

    A run without compression shows the link at full load: its factor applies to all messages, and to arithmetic as far
    as the processor limits the link. A compressed run shows too few bytes for that: its factor applies to arithmetic,
    and to messages as far as they are the processor's work. The factor is from 1/4 to 8, and 1 where
    backward hides gradient sync. What the step takes beyond that is added to the part that no plan changes. A step that
    is shorter than its parts stays unexplained.
    """
    sync_s = step_s - fixed_s(parts.workload, parts.workload.num_ranks)
    stretched = _compressed_parts if plan.is_lossy else _uncompressed_parts
    fitted = _with_fitted_factor(sync_s, step_s, parts, plan, stretched)
    missing_s = max(0.0, step_s - _step_s(fitted, plan))
    workload = replace(fitted.workload, rest_s=fitted.workload.rest_s + missing_s)
    return fitted._replace(workload=workload)


def _step_s(parts: FittedParts, plan: CommPlan) -> float:
    workload, link, costs, _ = parts
    num_ranks = workload.num_ranks
    return fixed_s(workload, num_ranks) + outcome_of(plan, workload, link, costs, num_ranks).end_s


def _with_fitted_factor(
    sync_s: float,
    step_s: float,
    parts: FittedParts,
    plan: CommPlan,
    stretched: Callable[[FittedParts, float], FittedParts],
) -> FittedParts:
    """Returns the parts, changed by the one factor with which backward and gradient sync take ``sync_s``."""

    def is_slower(factor: float) -> bool:
        workload, link, costs, _ = stretched(parts, factor)
        return outcome_of(plan, workload, link, costs, workload.num_ranks).end_s > sync_s

    usual = outcome_of(plan, *parts[:3], parts.workload.num_ranks)
    if usual.end_s - usual.backward_s < _EXPOSED_SHARE * step_s:
        return parts
    low, high = _MIN_FACTOR, _MAX_FACTOR
    if is_slower(low):
        return stretched(parts, low)
    if not is_slower(high):
        return stretched(parts, high)
    for _ in range(_NUM_HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if is_slower(middle) else (middle, high)
    return stretched(parts, high)


def _uncompressed_parts(parts: FittedParts, factor: float) -> FittedParts:
    workload, link, costs, _ = parts
    arithmetic = 1 + (factor - 1) * min(1.0, _processor_s_per_byte(link) / max(link.s_per_byte, 1e-15))
    slower = {hook: cost.slower(arithmetic) for hook, cost in costs.items()}
    return FittedParts(workload, replace(link, s_per_byte=factor * link.s_per_byte), slower, arithmetic)


def _compressed_parts(parts: FittedParts, factor: float) -> FittedParts:
    workload, link, costs, _ = parts
    more = factor - 1
    s_per_byte = link.s_per_byte + more * min(link.s_per_byte, _processor_s_per_byte(link))
    stretched = replace(
        link,
        hop_s=link.hop_s + more * min(link.hop_s, link.cpu_s_per_message),
        s_per_byte=s_per_byte,
        # The other threads may leave the link alone in another plan: then it is as fast as the probe found it.
        low_ratio=min(link.low_ratio, link.s_per_byte / max(s_per_byte, 1e-15)),
    )
    return FittedParts(workload, stretched, {hook: cost.slower(factor) for hook, cost in costs.items()}, factor)


def _processor_s_per_byte(link: Link) -> float:
    """Returns the processor time for a byte on its way, of its sender and its receiver together."""
    return 2 * link.cpu_s_per_byte
