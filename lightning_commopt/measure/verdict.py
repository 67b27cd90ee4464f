"""What the numbers of a fit mean, in words: how much communication costs, and what is worth trying.

Nothing is promised: "at most ... times as fast" is what it would be if the named time fell away whole, and nothing else
grew. What cannot save a twentieth of a step is not named.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from lightning_commopt.measure.costs import Costs
from lightning_commopt.text.formatting import MILLISECONDS, short_percent


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the numbers mean.

    Attributes:
        headline: a sentence or two.
        recommendations: what is worth trying, in the order in which to try it; each names the setting. Empty where
            nothing is.
    """

    headline: str
    recommendations: tuple[str, ...]


def verdict(
    metrics: Mapping[str, float], *, world_size: int, num_buckets: int, comm_hook: str, is_lossy: bool
) -> Verdict:
    """Says what communication costs, and what to do about it.

    Args:
        metrics: what `Steps.statistics` gives, of a whole fit or of a window.
        world_size: number of ranks.
        num_buckets: that the gradients travel in; 0 where none were observed.
        comm_hook: the name of what averages the gradients, "none" for DDP's own all-reduce.
        is_lossy: whether that changes them.

    Returns:
        The verdict.

    Raises:
        KeyError: a metric is missing.
    """
    costs = Costs.of(metrics, num_buckets=num_buckets, comm_hook=comm_hook, is_lossy=is_lossy)
    data = for_data(costs)
    if world_size == 1:
        situation, recommendations = "one rank", data
    elif not costs.comm_s > 0:
        situation, recommendations = "not observed", [RECOMMENDATIONS["observable strategy"], *data]
    elif costs.straggler_rank is not None:
        situation, recommendations = "straggler", [*for_straggler(costs), *data, *for_communication(costs)]
    elif data and costs.data_s > costs.exposed_s:
        situation, recommendations = "data", [*data, *for_communication(costs)]
    elif costs.is_worth(costs.exposed_s):
        situation, recommendations = "exposed", [*for_communication(costs), *data]
    else:
        situation, recommendations = "hidden", [*for_hidden_communication(costs), *data]
    headline = HEADLINES[situation].format(
        world_size=world_size,
        rank=costs.straggler_rank,
        slowdown=short_percent(costs.straggler_slowdown),
        data=costs.share(costs.data_s),
        exposed=costs.share(costs.exposed_s),
        bound=costs.speedup_bound(costs.exposed_s),
    )
    return Verdict(headline=headline, recommendations=tuple(recommendations))


# Names of ours, then those of torch's hooks.
_PARAMETERWISE = ("NaiveDP", "InterleavedDP")
_CASTS = ("bf16", "fp16", "bf16_compress_hook", "fp16_compress_hook")
_LOW_RANK = ("powersgd", "alternating_powersgd", "powerSGD_hook", "batched_powerSGD_hook")
_GOOD_CAPS_MIB = (1, 2, 5, 10, 25, 50, 100, 200)
_ENOUGH_BUCKETS = 8
_SMALL_BUCKET_BYTES = 2**20
_DATA_DOMINATES = 0.2


def for_straggler(costs: Costs) -> list[str]:
    """Recommends to look at the rank that the others wait for, if there is one."""
    if costs.straggler_rank is None:
        return []
    lost_s = costs.straggler_slowdown * (costs.step_s - costs.exposed_s)
    return [RECOMMENDATIONS["straggler"].format(rank=costs.straggler_rank, bound=costs.speedup_bound(lost_s))]


def for_data(costs: Costs) -> list[str]:
    """Recommends workers of the data loader where data takes much of a step."""
    if not costs.data_s >= _DATA_DOMINATES * costs.step_s:
        return []
    return [RECOMMENDATIONS["data"].format(data=costs.share(costs.data_s), bound=costs.speedup_bound(costs.data_s))]


def for_communication(costs: Costs) -> list[str]:
    """Recommends what shortens the exposed communication, lossless first."""
    uneven = _for_uneven_steps(costs) if costs.straggler_rank is None else []
    return [*uneven, *_for_buckets(costs), *_for_compression(costs), *_for_accumulation(costs)]


def for_hidden_communication(costs: Costs) -> list[str]:
    """Recommends to turn lossy compression off where nothing is exposed."""
    if not costs.is_lossy:
        return []
    text = RECOMMENDATIONS["no compression"].format(
        comm_hook=costs.comm_hook,
        compression=MILLISECONDS.text(costs.compression_s),
        compression_share=costs.share(costs.compression_s),
        ratio=f"{costs.compression_ratio:.1f}",
    )
    return [text]


def _for_uneven_steps(costs: Costs) -> list[str]:
    """For exposed time that is mostly waiting, now for one rank and now for another."""
    if costs.exposed_wait_s <= costs.exposed_s / 2 or not costs.is_worth(costs.exposed_wait_s):
        return []
    wait, bound = short_percent(costs.exposed_wait_s / costs.exposed_s), costs.speedup_bound(costs.exposed_wait_s)
    return [RECOMMENDATIONS["uneven steps"].format(wait=wait, bound=bound)]


def _for_buckets(costs: Costs) -> list[str]:
    """More buckets where they would hide much, and fewer where they are tiny."""
    if not costs.num_buckets or not costs.is_worth(costs.sending_s):
        return []
    if costs.comm_hook in _PARAMETERWISE:
        return [RECOMMENDATIONS["use buckets"]]
    num_mib = costs.gradient_bytes / 2**20
    cap_mib = max([cap for cap in _GOOD_CAPS_MIB if cap * _ENOUGH_BUCKETS <= num_mib], default=_GOOD_CAPS_MIB[0])
    num_with_cap = num_mib / cap_mib
    if costs.num_buckets < _ENOUGH_BUCKETS:
        if not costs.is_worth(costs.hideable_s) or num_with_cap < 2 * costs.num_buckets:
            return []
        text = RECOMMENDATIONS["split bucket" if costs.num_buckets == 1 else "more buckets"]
    elif costs.gradient_bytes / costs.num_buckets < _SMALL_BUCKET_BYTES and num_with_cap <= costs.num_buckets / 2:
        text = RECOMMENDATIONS["fewer buckets"]
    else:
        return []
    text = text.format(
        cap=cap_mib,
        num_buckets=costs.num_buckets,
        num_with_cap=max(2, math.ceil(num_with_cap)),
        mib=f"{num_mib / costs.num_buckets:.2g}",
        hideable=MILLISECONDS.text(costs.hideable_s),
        bound=costs.speedup_bound(costs.hideable_s),
    )
    return [text]


def _for_compression(costs: Costs) -> list[str]:
    """A compressor, another one, or a cheaper one."""
    if not costs.is_worth(costs.sending_s):
        return []
    if costs.is_lossy and costs.compression_s > costs.comm_s / 2:
        return [_cheaper_compression(costs)]
    half_s, three_quarters_s, most_s = (min(costs.sending_s, share * costs.transfer_s) for share in (0.5, 0.75, 0.86))
    saved_s = {}
    if not costs.is_lossy and costs.is_worth(half_s):
        saved_s["bf16"] = half_s
    if not costs.is_lossy and costs.is_worth(three_quarters_s - half_s):
        saved_s["int8"] = three_quarters_s
    if not costs.is_lossy and costs.is_worth(most_s - three_quarters_s):
        saved_s["int4"] = most_s
    if costs.comm_hook == "int8" and costs.is_worth(0.9 * half_s):
        saved_s["int4 after int8"] = 0.9 * half_s
    if costs.comm_hook in _CASTS and costs.is_worth(half_s):
        saved_s["int8 after a cast"] = half_s
    if costs.comm_hook not in _LOW_RANK and costs.transfer_s > 2 * costs.backward_s:
        saved_s["powersgd"] = costs.sending_s
    times = {"transfer": MILLISECONDS.text(costs.transfer_s), "backward": MILLISECONDS.text(costs.backward_s)}
    return [RECOMMENDATIONS[name].format(bound=costs.speedup_bound(saved), **times) for name, saved in saved_s.items()]


def _cheaper_compression(costs: Costs) -> str:
    if costs.comm_hook in _CASTS:
        text = RECOMMENDATIONS["cheaper than a cast"]
    else:
        text = RECOMMENDATIONS["cheaper than low rank" if costs.comm_hook in _LOW_RANK else "cheaper"]
    return text.format(comm=MILLISECONDS.text(costs.comm_s), compression=MILLISECONDS.text(costs.compression_s))


def _for_accumulation(costs: Costs) -> list[str]:
    """Fewer gradient syncs."""
    saved_s = 0.75 * costs.sending_s
    return (
        [RECOMMENDATIONS["accumulation"].format(bound=costs.speedup_bound(saved_s))] if costs.is_worth(saved_s) else []
    )


HEADLINES: Final = {
    "one rank": "One rank: there are no gradients to synchronize.",
    "not observed": "No gradient sync was observed on {world_size} ranks, so its cost is unknown.",
    "straggler": (
        "The other ranks wait for rank {rank}, which computes {slowdown} longer than they do. No compression helps"
        " against that."
    ),
    "data": "{data} of the step waits for data, and {exposed} for communication.",
    "exposed": "{exposed} of the step waits for communication. If all of it were hidden: {bound}.",
    "hidden": "Communication is hidden: {exposed} of the step waits for it. Without any: {bound}.",
}

RECOMMENDATIONS: Final = {
    "observable strategy": (
        'Trainer(strategy="commopt_ddp"), or Lightning\'s "ddp": their gradient sync can be observed. With other'
        " strategies only the phases of a step are timed."
    ),
    "straggler": (
        "Look at rank {rank} first: other programs on its cores or its GPU, clocks and temperature, its disk, larger"
        " batches, callbacks that only it runs. If it were as fast as the others: {bound}."
    ),
    "data": (
        "DataLoader(num_workers=..., persistent_workers=True): {data} of the step is spent between two batches, which"
        " includes callbacks and loggers. Without: {bound}."
    ),
    "uneven steps": (
        "Use batches of the same size on all ranks, and run no other programs beside them: {wait} of the exposed time"
        " is spent waiting for whichever rank comes last, which no comm_hook shortens. Without: {bound}."
    ),
    "use buckets": "strategy=CommOptDDP(), lossless: gradients travel in buckets, not one by one.",
    "split bucket": (
        "bucket_cap_mb={cap}, lossless: the only bucket starts when backward is over; about {num_with_cap} buckets"
        " would start earlier. Backward can hide at most {hideable} more: {bound}."
    ),
    "more buckets": (
        "bucket_cap_mb={cap}, lossless: of {num_buckets} buckets, the first starts late; about {num_with_cap} buckets"
        " would start earlier. Backward can hide at most {hideable} more: {bound}."
    ),
    "fewer buckets": (
        "bucket_cap_mb={cap}, lossless: each of {num_buckets} buckets of {mib} MiB pays the latency of a collective;"
        " about {num_with_cap} buckets are enough."
    ),
    "cheaper than a cast": 'comm_hook="none", lossless: of {comm} of communication {compression} are compression.',
    "cheaper than low rank": (
        'comm_hook="bf16", or a smaller matrix_rank, both lossy: of {comm} of communication {compression} are'
        " compression."
    ),
    "cheaper": 'comm_hook="bf16", lossy, or "none": of {comm} of communication {compression} are compression.',
    "bf16": 'comm_hook="bf16", lossy: half the bytes; {bound}.',
    "int8": 'comm_hook="int8", lossy: about a quarter of the bytes; {bound}.',
    "int4": 'comm_hook="int4", lossy: about a seventh of the bytes; {bound}. Compare the final metric as well.',
    "int4 after int8": (
        'comm_hook="int4", lossy: about half the bytes that travel now; {bound}. Compare the final metric as well.'
    ),
    "int8 after a cast": 'comm_hook="int8", lossy: about half the bytes that travel now; {bound}.',
    "powersgd": (
        'comm_hook="powersgd", lossy: collectives take {transfer} and backward computes for {backward}, which is too'
        " short to hide them; {bound}. Compare the final metric as well."
    ),
    "accumulation": (
        "Trainer(accumulate_grad_batches=4), or four times its present value: gradients are synchronized a quarter as"
        " often; {bound}. They stay exact, but a step takes four times the samples, which changes training."
    ),
    "no compression": (
        'comm_hook="none": "{comm_hook}" is lossy, and compression takes {compression} of a step ({compression_share}).'
        " Without it {ratio} times the bytes travel, which backward may hide as well: compare both."
    ),
}
