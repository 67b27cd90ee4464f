"""What is worth trying when a step waits for communication, with bounds that follow from the numbers."""

from __future__ import annotations

import math

from lightning_commopt.measure.costs import Costs
from lightning_commopt.measure.verdict_texts import RECOMMENDATIONS
from lightning_commopt.text.formatting import MILLISECONDS, short_percent

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
    return [RECOMMENDATIONS["straggler"].format(rank=costs.straggler_rank, bound=costs.at_most(lost_s))]


def for_data(costs: Costs) -> list[str]:
    """Recommends workers of the data loader where data takes much of a step."""
    if not costs.data_s >= _DATA_DOMINATES * costs.step_s:
        return []
    return [RECOMMENDATIONS["data"].format(data=costs.share(costs.data_s), bound=costs.at_most(costs.data_s))]


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
    wait, bound = short_percent(costs.exposed_wait_s / costs.exposed_s), costs.at_most(costs.exposed_wait_s)
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
        bound=costs.at_most(costs.hideable_s),
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
    return [RECOMMENDATIONS[name].format(bound=costs.at_most(saved), **times) for name, saved in saved_s.items()]


def _cheaper_compression(costs: Costs) -> str:
    if costs.comm_hook in _CASTS:
        text = RECOMMENDATIONS["cheaper than a cast"]
    else:
        text = RECOMMENDATIONS["cheaper than low rank" if costs.comm_hook in _LOW_RANK else "cheaper"]
    return text.format(comm=MILLISECONDS.text(costs.comm_s), compression=MILLISECONDS.text(costs.compression_s))


def _for_accumulation(costs: Costs) -> list[str]:
    """Fewer gradient syncs."""
    saved_s = 0.75 * costs.sending_s
    return [RECOMMENDATIONS["accumulation"].format(bound=costs.at_most(saved_s))] if costs.is_worth(saved_s) else []
