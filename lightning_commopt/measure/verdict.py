"""Interprets the numbers of a fit in words: how much communication costs, and what is worth trying.

"At most ... times as fast" is the speed-up if the named time vanished and nothing else grew. It is not a promise. A
measure that cannot save 5 % of a step is not recommended. See `forecasts` for other plans.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_commopt.measure.forecasts import (
    MIN_SAVED_SHARE,
    Forecast,
    Present,
    exact_alternative,
    shorter_sharded_steps,
    shorter_steps,
    speedup,
    statistic_text,
)
from lightning_commopt.measure.operations import Operation
from lightning_commopt.measure.record import is_diloco
from lightning_commopt.measure.statistics import ratio
from lightning_commopt.text.formatting import byte_unit, short_percent, time_unit

_SMALL_BYTES = 2**16  # collectives of fewer bytes per step are assumed to be metrics, not gradients or weights
_DATA_DOMINATES = 0.2  # share of a step above which waiting for data, or for a check before it, gets a headline


class Costs(NamedTuple):
    """What one step costs: numbers of `Steps.statistics`."""

    step_s: float
    data_s: float
    comm_s: float
    exposed_s: float
    exposed_wait_s: float
    straggler_rank: float  # the rank that the others wait for; -1 if there is none
    straggler_slowdown: float

    def is_worth(self, saved_s: float) -> bool:
        """Returns whether saving a time is worth the effort."""
        return saved_s >= MIN_SAVED_SHARE * self.step_s

    def share(self, seconds: float) -> str:
        return short_percent(ratio(seconds, self.step_s))

    def bound_text(self, saved_s: float) -> str:
        """Returns a text for how much faster training would be if each step saved ``saved_s``."""
        bound = speedup(self.step_s, saved_s)
        return "faster by an unknown factor" if math.isnan(bound) else f"at most {bound:.2f} times as fast"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the numbers mean, in a sentence or two, and settings that are worth trying, the most promising first."""

    headline: str
    recommendations: tuple[str, ...]
    note: str = ""  # the statistic that predicted speed-ups refer to; empty without predictions


def verdict(
    metrics: Mapping[str, float],
    *,
    world_size: int,
    comm_hook: str,
    is_lossy: bool,
    operations: Sequence[Operation] = (),
    forecasts: Sequence[Forecast] = (),
) -> Verdict:
    """Returns the verdict on a fit: what communication costs, and what to do about it.

    Args:
        metrics: statistics of a whole fit or of a window, from `Steps.statistics`.
        world_size: number of ranks.
        comm_hook: name of the comm hook that averages the gradients; "none" for DDP's own all-reduce.
        is_lossy: whether the comm hook changes gradients.
        operations: the collectives of a step; empty if none were observed.
        forecasts: predictions of other settings, the more exact settings first. No other setting is recommended
            without one.
    """
    costs = Costs(**{name: metrics[name] for name in Costs._fields})
    # Before it waits for data, each batch waits for Lightning's check for SIGTERM, which no DataLoader shortens.
    checks_s = sum(operation.seconds or 0.0 for operation in operations if _is_check(operation))
    costs = costs._replace(data_s=max(0.0, costs.data_s - checks_s))
    present = Present(costs.step_s, costs.exposed_s, comm_hook, is_lossy)
    for_communication = [*_recommend_for_waiting(costs), *shorter_steps(present, forecasts)]
    data, exposed, bound = _recommend_for_data(costs), costs.share(costs.exposed_s), costs.bound_text(costs.exposed_s)
    if world_size == 1:
        headline, recommendations = "One rank: there are no gradients to synchronize.", data
    elif is_diloco(comm_hook):
        headline = _with_exchanges(costs, metrics)
        recommendations = [*_recommend_for_exchanges(costs, metrics, comm_hook), *data]
    elif not costs.comm_s > 0:
        headline, is_hidden = _without_sync(world_size, costs, operations)
        for_sharded = _for_sharded(comm_hook, operations)
        if forecasts and operations:
            # A compressor's arithmetic may cost time in which no collective is waited for.
            waited_s = math.nan if is_lossy else _waited_s(operations)
            for_sharded = shorter_sharded_steps(present._replace(exposed_s=waited_s), forecasts)
        recommendations = [*([] if is_hidden else for_sharded), *data]
    elif costs.straggler_rank >= 0:
        headline = (
            f"The other ranks wait for rank {costs.straggler_rank:.0f}, which computes"
            f" {short_percent(costs.straggler_slowdown)} longer than they do. No compression helps against that."
        )
        recommendations = [_recommend_for_straggler(costs), *data, *for_communication]
    elif data and costs.data_s > costs.exposed_s:
        headline = f"{costs.share(costs.data_s)} of the step waits for data, and {exposed} for communication."
        recommendations = [*data, *for_communication]
    elif costs.is_worth(costs.exposed_s):
        headline = f"{exposed} of the step waits for communication. If all of it were hidden: {bound}."
        recommendations = [*for_communication, *data]
    else:
        headline = f"Communication is hidden: {exposed} of the step waits for it. Without any: {bound}."
        recommendations = [*exact_alternative(present, forecasts), *data]
    return Verdict(
        headline=headline,
        recommendations=(*recommendations, *_recommend_for_operations(costs, operations)),
        note=statistic_text(forecasts) if costs.comm_s > 0 or operations else "",
    )


def _with_exchanges(costs: Costs, metrics: Mapping[str, float]) -> str:
    """Returns the headline for DiLoCo, whose exchanges take place after some steps only."""
    if not costs.comm_s > 0:
        return "No exchange has ended in these steps, so its cost is unknown: they are fewer than sync_every."
    waits = f"{costs.share(costs.exposed_s)} of the time waits for exchanges, the longest of which took"
    longest_s = metrics["comm_s_max"]
    longest = time_unit(longest_s).text(longest_s)
    if not costs.is_worth(costs.exposed_s):
        return f"{waits} {longest}. Without any: {costs.bound_text(costs.exposed_s)}."
    return f"{waits} {longest}. If all of it were hidden: {costs.bound_text(costs.exposed_s)}."


def _recommend_for_exchanges(costs: Costs, metrics: Mapping[str, float], comm_hook: str) -> list[str]:
    """Recommends what hides exchanges; all of it changes what is trained."""
    if not costs.comm_s > 0 or not costs.is_worth(costs.exposed_s):
        return []
    # Steps that do not wait, as the median step does not where exchanges are rare.
    step_s = metrics["step_s_p50"]
    num_steps = math.ceil(metrics["comm_s_max"] / step_s) if step_s > 0 else 1
    or_int4 = "" if comm_hook == "diloco_int4" else ', and comm_hook="int4" less in all'
    return [
        *_recommend_for_waiting(costs),
        f"overlap={num_steps} or more, with a sync_every= above it, lossy: this number of steps takes as long as the"
        " longest exchange.",
        "A larger sync_every=, lossy: the share shrinks in proportion. More fragments= send less at once"
        f"{or_int4}. Compare the loss at equal samples before you rely on any of these.",
    ]


def _without_sync(world_size: int, costs: Costs, operations: Sequence[Operation]) -> tuple[str, bool]:
    """Returns the headline for a strategy whose gradient sync cannot be observed as such, like FSDP2's.

    The second result is whether steps are known to wait so little for collectives that nothing needs to be done.
    """
    sharded = [
        operation for operation in operations if operation.phase in ("forward", "backward") and _is_of_model(operation)
    ]
    if not sharded:
        return f"No gradient sync was observed on {world_size} ranks, so its cost is unknown.", False
    num_calls = sum(operation.num_calls for operation in sharded)
    # Each receive is the other end of a send, which counts already.
    num_bytes = sum(operation.num_bytes for operation in sharded if operation.operation != "recv")
    issued = f"Forward and backward issue {num_calls:.3g} collectives per step, {byte_unit(num_bytes).text(num_bytes)}"
    exposed_s = _waited_s(sharded)
    if math.isnan(exposed_s):
        return f"{issued} in all. How long the step waits for them is not measured.", False
    waits = f"{costs.share(exposed_s)} of the step waits for them"
    if not costs.is_worth(exposed_s):
        return f"{issued} in all, and they are hidden: {waits}. Without any: {costs.bound_text(exposed_s)}.", True
    return f"{issued} in all, and {waits}. If all of it were hidden: {costs.bound_text(exposed_s)}.", False


def _is_of_model(operation: Operation) -> bool:
    """Returns whether a collective carries gradients or parameters: by its source if it is ours, else by its size."""
    names_them = any(word in operation.source for word in ("reduce-scatter", "all-gather"))
    return names_them or operation.num_bytes >= _SMALL_BYTES


def _waited_s(operations: Sequence[Operation]) -> float:
    """Returns how long a step waits for collectives in forward and backward; NaN if that was not observed."""
    known_s = [operation.exposed_s for operation in operations if operation.exposed_s is not None]
    return sum(known_s) if known_s else math.nan


def _for_sharded(comm_hook: str, operations: Sequence[Operation]) -> list[str]:
    """Recommends what to do if gradient sync cannot be observed as such, or does not take place."""
    if comm_hook == "none" and not any(operation.num_bytes >= _SMALL_BYTES for operation in operations):
        return [
            "self.manual_backward(loss) instead of loss.backward(), and outside of no_sync(), if this is manual"
            " optimization: DDP synchronizes no other gradients, so each rank trains different weights, unless your"
            " code averages them."
        ]
    scattered = [
        operation for operation in operations if operation.operation == "reduce_scatter" and not operation.source
    ]
    num_bytes = sum(operation.num_bytes for operation in scattered)
    if num_bytes >= _SMALL_BYTES:
        recommendations = [
            'CommOptModelParallel(comm_hook="int8"), lossy, if this is FSDP2 with torch 2.9 or newer:'
            f" {byte_unit(num_bytes).text(num_bytes)} in reduce-scatters become about a byte for each gradient."
        ]
        num_backwards = max(operation.num_phases for operation in scattered)
        if comm_hook == "ModelParallelStrategy" and num_backwards > 1:
            num_calls = sum(operation.num_calls for operation in scattered)
            recommendations.append(
                'CommOptModelParallel(accumulate_grads="unsharded"), exact but for the order of sums:'
                f" {num_calls:.3g} reduce-scatters per step, for every accumulated batch, become"
                f" {num_calls / num_backwards:.3g}; each rank then holds gradients as large as the model."
            )
        return recommendations
    if any(map(_is_of_model, operations)):
        return []
    return [
        'Trainer(strategy="commopt_ddp"), or Lightning\'s "ddp": their gradient sync can be observed. With other'
        " strategies the phases of a step are timed, and from torch 2.14 on the collectives of each."
    ]


def _recommend_for_operations(costs: Costs, operations: Sequence[Operation]) -> list[str]:
    """Recommends what to do about collectives that are not gradient sync."""
    recommendations = []
    for operation in operations:
        seconds = operation.seconds or 0.0
        if _is_check(operation) and (operation.num_calls > 1 or seconds >= _DATA_DOMINATES * costs.step_s):
            recommendations.append(
                f"Lightning's own check for SIGTERM before every batch, {operation.num_calls:.3g} per step,"
                f" is {costs.share(seconds)} of the step: sigterm_every_n_steps=10, of CommOptDDP and"
                " CommOptModelParallel, checks every tenth step."
            )
        elif (
            not operation.source
            and operation.phase in ("forward", "other")
            and operation.num_bytes < _SMALL_BYTES
            and costs.is_worth(seconds)
        ):
            remedy = "log less often, or without sync_dist, if it is metrics"
            if operation.operation == "broadcast":  # DDP broadcasts its buffers before each forward
                remedy = "broadcast_buffers=False, if these are DDP's buffers and ranks may keep their own"
            recommendations.append(
                f"{costs.share(seconds)} of the step is {operation.label} in {operation.phase},"
                f" {operation.num_calls:.3g} per step with {operation.num_bytes / operation.num_calls:.0f} bytes on"
                f" average: {remedy}."
            )
    return recommendations


def _is_check(operation: Operation) -> bool:
    return (operation.source, operation.operation, operation.phase) == ("lightning", "broadcast", "data")


def _recommend_for_straggler(costs: Costs) -> str:
    bound = costs.bound_text(costs.straggler_slowdown * (costs.step_s - costs.exposed_s))
    return (
        f"Look at rank {costs.straggler_rank:.0f} first: other programs on its cores or its GPU, clocks and"
        " temperature, its disk, larger batches, callbacks that only it runs. If it were as fast as the others:"
        f" {bound}."
    )


def _recommend_for_data(costs: Costs) -> list[str]:
    if not costs.data_s >= _DATA_DOMINATES * costs.step_s:
        return []
    return [
        f"DataLoader(num_workers=..., persistent_workers=True): {costs.share(costs.data_s)} of the step is spent"
        f" between two batches, which includes callbacks and loggers. Without: {costs.bound_text(costs.data_s)}."
    ]


def _recommend_for_waiting(costs: Costs) -> list[str]:
    is_most = costs.straggler_rank < 0 and costs.exposed_wait_s > costs.exposed_s / 2
    if not is_most or not costs.is_worth(costs.exposed_wait_s):
        return []
    return [
        "Use batches of the same size on all ranks, and run no other programs beside them:"
        f" {short_percent(costs.exposed_wait_s / costs.exposed_s)} of the exposed time is spent waiting for"
        " whichever rank arrives last, which no comm_hook shortens. Without:"
        f" {costs.bound_text(costs.exposed_wait_s)}."
    ]
