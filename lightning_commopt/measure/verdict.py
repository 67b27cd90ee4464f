"""Interprets the numbers of a fit in words: how much communication costs, and what is worth trying.

"At most ... times as fast" is the speed-up if the named time vanished and nothing else grew; it is no promise. What
cannot save a twentieth of a step is not recommended.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_commopt.measure.costs import Costs
from lightning_commopt.measure.operations import Operation
from lightning_commopt.text.formatting import MILLISECONDS, byte_unit, short_percent

_PARAMETERWISE = ("NaiveDP", "InterleavedDP")
_GOOD_CAPS_MIB = (1, 2, 5, 10, 25, 50, 100, 200)
_ENOUGH_BUCKETS = 8
_SMALL_BUCKET_BYTES = 2**20
_SMALL_BYTES = 2**16  # of metrics
_DATA_DOMINATES = 0.2
_HARDLY_LOSSY = 0.1
"""Error bound above which the final metric may differ."""
_PARTS = ("", "", "half", "a third", "a quarter", "a fifth", "a sixth", "a seventh", "an eighth", "a ninth", "a tenth")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the numbers mean.

    Attributes:
        headline: a sentence or two.
        recommendations: settings worth trying, the most promising first.
    """

    headline: str
    recommendations: tuple[str, ...]


def verdict(
    metrics: Mapping[str, float],
    *,
    world_size: int,
    num_buckets: int,
    comm_hook: str,
    is_lossy: bool,
    operations: Sequence[Operation] = (),
    **advice: Any,
) -> Verdict:
    """Returns what communication costs, and what to do about it.

    Args:
        metrics: from `Steps.statistics`, of a whole fit or of a window.
        world_size: number of ranks.
        num_buckets: that the gradients travel in; 0 where none were observed.
        comm_hook: the name of what averages the gradients, "none" for DDP's own all-reduce.
        is_lossy: whether that changes them.
        operations: the collectives of a step; empty where none were observed.
        advice: compressors to try instead, see `Costs`; without it none is recommended.

    Raises:
        KeyError: a metric is missing.
    """
    costs = Costs.of(metrics, num_buckets=num_buckets, comm_hook=comm_hook, is_lossy=is_lossy, **advice)
    data, exposed, bound = _for_data(costs), costs.share(costs.exposed_s), costs.speedup_bound(costs.exposed_s)
    if world_size == 1:
        headline, recommendations = "One rank: there are no gradients to synchronize.", data
    elif not costs.comm_s > 0:
        headline = _without_sync(world_size, operations)
        observable = (
            'Trainer(strategy="commopt_ddp"), or Lightning\'s "ddp": their gradient sync can be observed. With other'
            " strategies the phases of a step are timed, and from torch 2.14 on the collectives of each."
        )
        recommendations = [observable, *data]
    elif costs.straggler_rank is not None:
        headline = (
            f"The other ranks wait for rank {costs.straggler_rank}, which computes"
            f" {short_percent(costs.straggler_slowdown)} longer than they do. No compression helps against that."
        )
        recommendations = [_for_straggler(costs), *data, *_for_communication(costs)]
    elif data and costs.data_s > costs.exposed_s:
        headline = f"{costs.share(costs.data_s)} of the step waits for data, and {exposed} for communication."
        recommendations = [*data, *_for_communication(costs)]
    elif costs.is_worth(costs.exposed_s):
        headline = f"{exposed} of the step waits for communication. If all of it were hidden: {bound}."
        recommendations = [*_for_communication(costs), *data]
    else:
        headline = f"Communication is hidden: {exposed} of the step waits for it. Without any: {bound}."
        recommendations = [*_without_compression(costs), *data]
    return Verdict(headline=headline, recommendations=(*recommendations, *_for_operations(costs, operations)))


def _without_sync(world_size: int, operations: Sequence[Operation]) -> str:
    """Returns the headline for a strategy whose gradient sync cannot be observed as such, as FSDP2's."""
    sharded = [one for one in operations if one.phase in ("forward", "backward") and one.num_bytes >= _SMALL_BYTES]
    if not sharded:
        return f"No gradient sync was observed on {world_size} ranks, so its cost is unknown."
    num_calls, num_bytes = sum(one.num_calls for one in sharded), sum(one.num_bytes for one in sharded)
    return (
        f"Forward and backward issue {num_calls:.3g} collectives a step, of {byte_unit(num_bytes).text(num_bytes)} in"
        " all. How long the step waits for them is not measured."
    )


def _for_operations(costs: Costs, operations: Sequence[Operation]) -> list[str]:
    """Recommends what to do about collectives that are not gradient sync."""
    found = []
    for one in operations:
        seconds = one.seconds or 0.0
        if one.source == "lightning" and one.operation == "broadcast" and one.num_calls > 1:
            found.append(
                f"{one.num_calls:.3g} broadcasts a step are Lightning's own check for SIGTERM before every batch"
                f" ({costs.share(seconds)} of the step): CommOptDDP(sigterm_every_n_steps=10) checks every tenth step."
            )
        elif one.phase in ("forward", "other") and one.num_bytes < _SMALL_BYTES and costs.is_worth(seconds):
            found.append(
                f"{costs.share(seconds)} of the step is {one.label} of {one.num_bytes / one.num_calls:.0f} bytes in"
                f" {one.phase}, {one.num_calls:.3g} times: log less often, or without sync_dist, if it is metrics."
            )
    return found


def _for_straggler(costs: Costs) -> str:
    bound = costs.speedup_bound(costs.straggler_slowdown * (costs.step_s - costs.exposed_s))
    return (
        f"Look at rank {costs.straggler_rank} first: other programs on its cores or its GPU, clocks and temperature,"
        " its disk, larger batches, callbacks that only it runs. If it were as fast as the others:"
        f" {bound}."
    )


def _for_data(costs: Costs) -> list[str]:
    if not costs.data_s >= _DATA_DOMINATES * costs.step_s:
        return []
    return [
        f"DataLoader(num_workers=..., persistent_workers=True): {costs.share(costs.data_s)} of the step is spent"
        f" between two batches, which includes callbacks and loggers. Without: {costs.speedup_bound(costs.data_s)}."
    ]


def _for_communication(costs: Costs) -> list[str]:
    """Returns what shortens the exposed communication, lossless first."""
    found = []
    if (
        costs.straggler_rank is None
        and costs.exposed_wait_s > costs.exposed_s / 2
        and costs.is_worth(costs.exposed_wait_s)
    ):
        found.append(
            "Use batches of the same size on all ranks, and run no other programs beside them:"
            f" {short_percent(costs.exposed_wait_s / costs.exposed_s)} of the exposed time is spent waiting for"
            " whichever rank arrives last, which no comm_hook shortens. Without:"
            f" {costs.speedup_bound(costs.exposed_wait_s)}."
        )
    found += [*_for_buckets(costs), *_for_compression(costs)]
    saved_s = 0.75 * costs.sending_s
    if costs.is_worth(saved_s):
        found.append(
            "Trainer(accumulate_grad_batches=4), or four times its present value: gradients are synchronized a quarter"
            f" as often; {costs.speedup_bound(saved_s)}. They stay exact, but a step takes four times the samples,"
            " which changes training."
        )
    return found


def _without_compression(costs: Costs) -> list[str]:
    if not costs.is_lossy:
        return []
    return [
        f'comm_hook="none": "{costs.comm_hook}" is lossy, and compression takes'
        f" {MILLISECONDS.text(costs.compression_s)} of a step ({costs.share(costs.compression_s)}). Without it"
        f" {costs.compression_ratio:.1f} times the bytes travel, which backward may hide as well: compare both."
    ]


def _for_buckets(costs: Costs) -> list[str]:
    """Returns more buckets where they would hide much, and fewer where they are tiny."""
    if not costs.num_buckets or not costs.is_worth(costs.sending_s):
        return []
    if costs.comm_hook in _PARAMETERWISE:
        return ["strategy=CommOptDDP(), lossless: gradients travel in buckets, not one by one."]
    num_mib = costs.gradient_bytes / 2**20
    cap_mib = max([cap for cap in _GOOD_CAPS_MIB if cap * _ENOUGH_BUCKETS <= num_mib], default=_GOOD_CAPS_MIB[0])
    num_with_cap = num_mib / cap_mib
    setting, about = f"bucket_cap_mb={cap_mib}, lossless", f"about {max(2, math.ceil(num_with_cap))} buckets"
    if costs.num_buckets < _ENOUGH_BUCKETS:
        if not costs.is_worth(costs.hideable_s) or num_with_cap < 2 * costs.num_buckets:
            return []
        late = f"of {costs.num_buckets} buckets, the first starts late"
        if costs.num_buckets == 1:
            late = "the only bucket starts when backward is over"
        hideable = MILLISECONDS.text(costs.hideable_s)
        return [
            f"{setting}: {late}; {about} would start earlier. Backward can hide at most {hideable} more:"
            f" {costs.speedup_bound(costs.hideable_s)}."
        ]
    if costs.gradient_bytes / costs.num_buckets < _SMALL_BUCKET_BYTES and num_with_cap <= costs.num_buckets / 2:
        mib = f"{num_mib / costs.num_buckets:.2g}"
        return [
            f"{setting}: each of {costs.num_buckets} buckets of {mib} MiB pays the latency of a collective; {about} are"
            " enough."
        ]
    return []


def _for_compression(costs: Costs) -> list[str]:
    """Returns compressors to try; a cheaper one where compression takes most of the communication."""
    if not costs.is_worth(costs.sending_s):
        return []
    if costs.is_lossy and costs.compression_s > costs.comm_s / 2:
        return [_cheaper_compression(costs)]
    found, saved_before_s = [], 0.0
    for other in costs.alternatives:
        if other["is_last_resort"]:
            if costs.transfer_s > 2 * costs.backward_s:
                found.append(_try_compressor(costs, other, costs.sending_s))
            continue
        saved_s = min(costs.sending_s, (1 - other["share"]) * costs.transfer_s)
        if costs.is_worth(saved_s - saved_before_s):
            found.append(_try_compressor(costs, other, saved_s))
        saved_before_s = saved_s
    return found


def _cheaper_compression(costs: Costs) -> str:
    if not costs.milder:
        cheaper = 'comm_hook="none", lossless'
    elif costs.cheaper_with:
        cheaper = f'comm_hook="{costs.milder}", or {costs.cheaper_with}, both lossy'
    else:
        cheaper = f'comm_hook="{costs.milder}", lossy, or "none"'
    comm, compression = MILLISECONDS.text(costs.comm_s), MILLISECONDS.text(costs.compression_s)
    return f"{cheaper}: of {comm} of communication {compression} are compression."


def _try_compressor(costs: Costs, other: Mapping[str, Any], saved_s: float) -> str:
    """Recommends one of `Costs.alternatives`."""
    if other["is_last_resort"]:
        transfer, backward = MILLISECONDS.text(costs.transfer_s), MILLISECONDS.text(costs.backward_s)
        reason = f"collectives take {transfer} and backward computes for {backward}, which is too short to hide them"
    else:
        reason = f"{_in_words(other['share'])} the bytes{' that travel now' if costs.is_lossy else ''}"
    compare = "" if other["error_bound"] <= _HARDLY_LOSSY else " Compare the final metric as well."
    return f'comm_hook="{other["name"]}", lossy: {reason}; {costs.speedup_bound(saved_s)}.{compare}'


def _in_words(share: float) -> str:
    """Returns a share as people say it.

    >>> _in_words(0.5), _in_words(0.26), _in_words(0.14), _in_words(0.01), _in_words(0.7)
    ('half', 'about a quarter of', 'about a seventh of', '1.0 % of', '70 % of')
    """
    num = round(1 / share)
    if not 2 <= num < len(_PARTS):
        return f"{short_percent(share)} of"
    part = _PARTS[num] if num == 2 else f"{_PARTS[num]} of"
    return part if share == 1 / num else f"about {part}"
