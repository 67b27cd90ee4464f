"""What may be done about an exchange that a step waits for, with bounds that follow from the numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

# Names of ours, then those of torch's hooks.
_PARAMETERWISE = ("NaiveDP", "InterleavedDP")
_LOSSLESS = ("none", "all_reduce", "allreduce_hook", *_PARAMETERWISE)
_CASTS = ("bf16", "fp16", "bf16_compress_hook", "fp16_compress_hook")
_LOW_RANK = ("powersgd", "alternating_powersgd", "powerSGD_hook", "batched_powerSGD_hook")
_GOOD_CAPS_MIB = (1, 2, 5, 10, 25, 50, 100, 200)
_ENOUGH_BUCKETS = 8
_SMALL_BUCKET_BYTES = 2**20
_WORTH_IT = 0.05


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The numbers that count, in seconds and bytes of a step.

    Attributes:
        step_s: of the whole step.
        data_s: before its batches were there.
        backward_s: that backward computes, without waiting for the exchange.
        comm_s: in which a bucket was being exchanged.
        exposed_s: the part of it that the step waits for.
        exposed_wait_s: the part of that in which a rank waits for a slower one.
        wait_s: the part of the exchange in which a rank waits for a slower one.
        compression_s: the part of the exchange that is not on the wire.
        gradient_bytes: that are exchanged.
        compression_ratio: gradients over what travels.
        num_buckets: that the gradients travel in.
        comm_hook: how.
        straggler_rank: that the others wait for.
        straggler_slowdown: its delay as a share of what they compute.
    """

    step_s: float
    data_s: float
    backward_s: float
    comm_s: float
    exposed_s: float
    exposed_wait_s: float
    wait_s: float
    compression_s: float
    gradient_bytes: float
    compression_ratio: float
    num_buckets: int
    comm_hook: str
    straggler_rank: int | None
    straggler_slowdown: float

    @classmethod
    def of(cls, metrics: Mapping[str, float], *, num_buckets: int, comm_hook: str) -> Costs:
        """Takes them from what `StepStatistics.compute` gives."""
        same = ("step_s", "data_s", "comm_s", "exposed_s", "exposed_wait_s", "wait_s", "compression_s")
        rank = int(metrics["straggler_rank"])
        return cls(
            **{name: metrics[name] for name in (*same, "gradient_bytes", "compression_ratio", "straggler_slowdown")},
            backward_s=max(0.0, metrics["backward_s"] - metrics["exposed_s"]),
            num_buckets=num_buckets,
            comm_hook=comm_hook,
            straggler_rank=rank if rank >= 0 else None,
        )

    @property
    def is_compressed(self) -> bool:
        """Whether what travels is not the gradients themselves."""
        return self.comm_hook not in _LOSSLESS

    @property
    def sending_s(self) -> float:
        """Exposed time in which no rank waits for a slower one."""
        return max(0.0, self.exposed_s - self.exposed_wait_s)

    @property
    def transfer_s(self) -> float:
        """Time on the wire in which no rank waits for a slower one."""
        return max(0.0, self.comm_s - self.compression_s - self.wait_s)

    @property
    def hideable_s(self) -> float:
        """What of the exposed time backward could hide besides what it hides now, at most."""
        return min(self.sending_s, max(0.0, self.backward_s - max(0.0, self.comm_s - self.exposed_s)))

    def is_worth(self, saved_s: float) -> bool:
        """Returns whether a time is enough of a step to do something about it."""
        return saved_s >= _WORTH_IT * self.step_s

    def share(self, seconds: float) -> str:
        """Returns a time as a share of the step."""
        percent = 100 * seconds / self.step_s
        return f"{percent:.0f} %" if percent >= 9.95 else f"{percent:.1f} %"

    def at_most(self, saved_s: float) -> str:
        """Returns how much faster training would be if steps were shorter by a time."""
        if not saved_s < self.step_s:
            return "how much faster cannot be told"
        return f"at most {self.step_s / (self.step_s - saved_s):.2f} times as fast"

    def ms(self, seconds: float) -> str:
        """Returns a time in milliseconds, with three digits."""
        return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else f"{1e3 * seconds:.0f} ms"


def uneven_steps(costs: Costs) -> tuple[str, ...]:
    """Says so if most of the exposed time is waiting, now for one rank and now for another."""
    if costs.exposed_wait_s <= costs.exposed_s / 2 or not costs.is_worth(costs.exposed_wait_s):
        return ()
    return (
        f"Batches of the same size on all ranks, and no other programs beside them:"
        f" {100 * costs.exposed_wait_s / costs.exposed_s:.0f} % of the exposed time is waiting for whichever rank comes"
        f" last, which no comm_hook shortens; {costs.at_most(costs.exposed_wait_s)} without.",
    )


def buckets(costs: Costs) -> tuple[str, ...]:
    """Advises more buckets where they would hide much, and fewer where they are tiny."""
    if not costs.num_buckets or not costs.is_worth(costs.sending_s):
        return ()
    if costs.comm_hook in _PARAMETERWISE:
        return ("strategy=CommOptDDP(), lossless: gradients travel in buckets, not one by one.",)
    num_mib = costs.gradient_bytes / 2**20
    cap_mib = max([cap for cap in _GOOD_CAPS_MIB if cap * _ENOUGH_BUCKETS <= num_mib], default=_GOOD_CAPS_MIB[0])
    num_with_cap = num_mib / cap_mib
    if costs.num_buckets < _ENOUGH_BUCKETS:
        if not costs.is_worth(costs.hideable_s) or num_with_cap < 2 * costs.num_buckets:
            return ()
        now = (
            "one bucket starts when backward is over" if costs.num_buckets == 1 else f"now {costs.num_buckets} buckets"
        )
        return (
            f"bucket_cap_mb={cap_mib}, lossless: {now}, and about {num_with_cap:.0f} would start earlier. Backward can"
            f" hide at most {costs.ms(costs.hideable_s)} more: {costs.at_most(costs.hideable_s)}.",
        )
    if costs.gradient_bytes / costs.num_buckets >= _SMALL_BUCKET_BYTES or num_with_cap > costs.num_buckets / 2:
        return ()
    return (
        f"bucket_cap_mb={cap_mib}, lossless: {costs.num_buckets} buckets of {num_mib / costs.num_buckets:.2g} MiB each"
        f" pay for a start, and about {math.ceil(num_with_cap)} would do.",
    )


def compression(costs: Costs) -> tuple[str, ...]:
    """Advises a compressor, another one, or a cheaper one."""
    if not costs.is_worth(costs.sending_s):
        return ()
    if costs.is_compressed and costs.compression_s > costs.comm_s / 2:
        return (
            f"{_cheaper_than(costs.comm_hook)}: of {costs.ms(costs.comm_s)} of exchange"
            f" {costs.ms(costs.compression_s)} are compression.",
        )
    half_s, three_quarters_s = (min(costs.sending_s, share * costs.transfer_s) for share in (0.5, 0.75))
    advice = []
    if not costs.is_compressed and costs.is_worth(half_s):
        advice.append(f'comm_hook="bf16", lossy: half the bytes; {costs.at_most(half_s)}.')
    if not costs.is_compressed and costs.is_worth(three_quarters_s - half_s):
        advice.append(f'comm_hook="int8", lossy: about a quarter of the bytes; {costs.at_most(three_quarters_s)}.')
    if costs.comm_hook in _CASTS and costs.is_worth(half_s):
        advice.append(f'comm_hook="int8", lossy: about half the bytes that travel now; {costs.at_most(half_s)}.')
    if costs.comm_hook not in _LOW_RANK and costs.transfer_s > 2 * costs.backward_s:
        advice.append(
            f'comm_hook="powersgd", lossy: the wire takes {costs.ms(costs.transfer_s)} and backward computes for'
            f" {costs.ms(costs.backward_s)}, too short to hide it; {costs.at_most(costs.sending_s)}. Compare the final"
            " metric as well."
        )
    return tuple(advice)


def accumulation(costs: Costs) -> tuple[str, ...]:
    """Advises fewer exchanges."""
    saved_s = 0.75 * costs.sending_s
    if not costs.is_worth(saved_s):
        return ()
    return (
        "Trainer(accumulate_grad_batches=4), or four times what it is: three of four exchanges fall away, and by that"
        f" {costs.at_most(saved_s)}. Gradients stay exact, but a step takes in four times the samples, which changes"
        " training.",
    )


def _cheaper_than(comm_hook: str) -> str:
    if comm_hook in _CASTS:
        return 'comm_hook="none", lossless'
    if comm_hook in _LOW_RANK:
        return 'comm_hook="bf16", or a smaller matrix_rank, both lossy'
    return 'comm_hook="bf16", lossy, or "none"'
