"""What the numbers of a fit mean, in words: how much communication costs, and what is worth trying.

Nothing is promised: "at most ... times as fast" is what it would be if the named time fell away whole, and nothing else
grew. What cannot save a twentieth of a step is not named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_commopt.measure.remedies import Costs, accumulation, buckets, compression, uneven_steps

_DATA_DOMINATES = 0.2


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the numbers mean.

    Attributes:
        headline: a sentence or two.
        advice: what is worth trying, in the order in which to try it; each names the setting. Empty where nothing is.
    """

    headline: str
    advice: tuple[str, ...]


def verdict(metrics: Mapping[str, float], *, world_size: int, num_buckets: int, comm_hook: str) -> Verdict:
    """Says what communication costs, and what to do about it.

    Args:
        metrics: what `StepStatistics.compute` gives, of a whole fit or of a window.
        world_size: number of ranks.
        num_buckets: that one exchange of all gradients is cut into; 0 where nobody sees them.
        comm_hook: the name of what averages the gradients, "none" for DDP's own way.

    Returns:
        The verdict.

    Raises:
        KeyError: a metric is missing.
    """
    costs = Costs.of(metrics, num_buckets=num_buckets, comm_hook=comm_hook)
    data, exposed = _data(costs), costs.share(costs.exposed_s)
    if world_size == 1:
        return Verdict(headline="One rank: there are no gradients to exchange.", advice=data)
    if not costs.comm_s > 0:
        return _unseen(world_size, data)
    if costs.straggler_rank is not None:
        headline = (
            f"The others wait for rank {costs.straggler_rank}: it computes {100 * costs.straggler_slowdown:.0f} %"
            " longer than they do. No compression helps against that."
        )
        return Verdict(headline=headline, advice=(_straggler(costs), *data, *_of_exchange(costs)))
    if data and costs.data_s > costs.exposed_s:
        headline = f"{costs.share(costs.data_s)} of the step waits for data, and {exposed} for communication."
        return Verdict(headline=headline, advice=(*data, *_of_exchange(costs)))
    if costs.is_worth(costs.exposed_s):
        headline = (
            f"{exposed} of the step waits for communication: {costs.at_most(costs.exposed_s)} if all of it were hidden."
        )
        return Verdict(headline=headline, advice=(*_of_exchange(costs), *data))
    headline = (
        f"Communication is hidden: {exposed} of the step waits for it, {costs.at_most(costs.exposed_s)} without any."
    )
    return Verdict(headline=headline, advice=(*_without_compressor(costs), *data))


def _unseen(world_size: int, data: tuple[str, ...]) -> Verdict:
    see = (
        'Trainer(strategy="commopt_ddp"), or Lightning\'s "ddp": there the exchange is seen. Of other strategies only'
        " the phases of a step are."
    )
    headline = f"No exchange of gradients was seen on {world_size} ranks: nothing can be said of what it costs."
    return Verdict(headline=headline, advice=(see, *data))


def _straggler(costs: Costs) -> str:
    lost_s = costs.straggler_slowdown * (costs.step_s - costs.exposed_s)
    return (
        f"Look at rank {costs.straggler_rank} first: other programs on its cores or its GPU, clocks and temperature,"
        " its disk, larger batches, callbacks that only it runs. If it were as fast as the others:"
        f" {costs.at_most(lost_s)}."
    )


def _data(costs: Costs) -> tuple[str, ...]:
    if not costs.data_s >= _DATA_DOMINATES * costs.step_s:
        return ()
    return (
        f"DataLoader(num_workers=..., persistent_workers=True): {costs.share(costs.data_s)} of the step is between two"
        f" batches, with callbacks and loggers; {costs.at_most(costs.data_s)} without.",
    )


def _of_exchange(costs: Costs) -> tuple[str, ...]:
    uneven = uneven_steps(costs) if costs.straggler_rank is None else ()
    return (*uneven, *buckets(costs), *compression(costs), *accumulation(costs))


def _without_compressor(costs: Costs) -> tuple[str, ...]:
    if not costs.is_compressed:
        return ()
    return (
        f'comm_hook="none": "{costs.comm_hook}" is lossy, and takes {costs.ms(costs.compression_s)} a step to compress'
        f" ({costs.share(costs.compression_s)} of it). Without it {costs.compression_ratio:.1f} times the bytes travel,"
        " which backward may hide as well: compare both.",
    )
