"""What the numbers of a fit mean, in words: how much communication costs, and what is worth trying.

Nothing is promised: "at most ... times as fast" is what it would be if the named time fell away whole, and nothing else
grew. What cannot save a twentieth of a step is not named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_commopt.measure.costs import Costs
from lightning_commopt.measure.recommendations import (
    for_communication,
    for_data,
    for_hidden_communication,
    for_straggler,
)
from lightning_commopt.measure.verdict_texts import HEADLINES, RECOMMENDATIONS
from lightning_commopt.text.formatting import short_percent


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
        bound=costs.at_most(costs.exposed_s),
    )
    return Verdict(headline=headline, recommendations=tuple(recommendations))
