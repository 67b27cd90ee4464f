"""Defines every statistic of steps, from their sums, maxima and samples, and finds the rank that others wait for.

It uses numpy only: `lightning_commopt.metrics` keeps these arrays in metrics, and `commopt summary` needs no torch.

The exposed share of one run is a ratio of sums, so that the shares of the parts of a step add up to 1. For several runs
it is the median of their shares: what slows a whole run down, such as a busy machine, cancels within each ratio.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_commopt.measure.link.bus import bus_factor
from lightning_commopt.measure.record import StepRecord, Totals

Array = NDArray[np.float64]
QUANTITIES = (*Totals._fields, "num_samples")  # the numbers of one step on one rank, in the order of `row`

# Each of these is reported as a mean under its own name, and with the suffixes ``_p50``, ``_p95`` and ``_max``.
TIMES = (
    *("step_s", "data_s", "forward_s", "backward_s", "optimizer_s"),
    *("comm_s", "queue_s", "compression_s", "wire_s", "wait_s", "exposed_s", "exposed_wait_s"),
)

MAX_SAMPLED_VALUES = 2**20  # 8 MiB
_MIN_SAMPLED_STEPS = 64  # minimum number of steps that are kept, however many ranks there are
# Thresholds of `find_straggler`; its docstring says why both a share of steps and a slowdown are needed.
MIN_STEPS = 8  # docs/evidence/measuring_accuracy.md has the errors with 10 and more
_LATE = 0.05  # wait in a step, as a share of computing time
_LATE_STEPS = 0.75  # share of steps with such a wait; two ranks that are late alternately have a half each
_SLOWDOWN = 0.12  # lateness of the last gradient, as a share of computing time
_SUFFIXES = ("", "_p50", "_p95", "_max")
_WAITS = ("wait_s", "exposed_wait_s")

# The waits are the excess of ``wire_s`` and ``exposed_s`` over the rank with the least in the same step.
COLUMNS = (*QUANTITIES, *_WAITS)

# `COLUMNS` are summed over steps and ranks; ``least_wire_s``, the minimum of ``wire_s`` over ranks, over steps only.
# ``num_values`` and ``num_steps`` are the numbers of terms in these two kinds of sums.
SUMS = (*COLUMNS, "least_wire_s", "num_values", "num_steps")

_AT = {name: index for index, name in enumerate(COLUMNS)}
_TIMES_AT = [_AT[name] for name in TIMES]
_TIME_NAMES = [name + suffix for name in TIMES for suffix in _SUFFIXES]


def ratio(part: float, whole: float) -> float:
    """Returns ``part / whole``; NaN unless ``whole`` is above 0."""
    return part / whole if whole > 0 else math.nan


def exposed_share(runs: Sequence[Mapping[str, float]]) -> float:
    """Returns the share of a step that waits for communication, 0 to 1; NaN if no run has steps.

    It takes sums or means over the steps and ranks of each run.

    >>> exposed_share([{"step_s": 0.1, "exposed_s": 0.02}, {"step_s": 0.4, "exposed_s": 0.04}])
    0.15
    """
    return _median_share(runs, [run["exposed_s"] for run in runs])


def step_parts(runs: Sequence[Mapping[str, float]]) -> tuple[float, float, float]:
    """Splits the median step of some runs by the medians of their shares; see `exposed_share`.

    Returns seconds of computing alone, of computing while communicating, and exposed.

    >>> step_parts([{"step_s": 0.5, "comm_s": 0.25, "exposed_s": 0.125}])
    (0.25, 0.125, 0.125)
    """
    steps_s = [run["step_s"] for run in runs if run["step_s"] > 0]
    step_s = median(steps_s) if steps_s else math.nan
    exposed = exposed_share(runs)
    hidden = min(_median_share(runs, [run["comm_s"] - run["exposed_s"] for run in runs]), 1 - exposed)
    return step_s * (1 - exposed - hidden), step_s * hidden, step_s * exposed


def _median_share(runs: Sequence[Mapping[str, float]], parts_s: Sequence[float]) -> float:
    shares = [ratio(part_s, run["step_s"]) for run, part_s in zip(runs, parts_s, strict=True)]
    return median([share for share in shares if not math.isnan(share)] or [math.nan])


def row(record: StepRecord) -> list[float]:
    """Returns the numbers of one step, one for each of `QUANTITIES`."""
    return [*map(float, record.totals), float(record.num_samples)]


class Steps(NamedTuple):
    """Sums and maxima of steps, and the steps or a sample of them."""

    sums: Array  # ``(19,)``, one for each of `SUMS`
    maxima: Array  # ``(16,)``, one for each of `COLUMNS`; ``-inf`` without steps
    values: Array  # ``(num_steps, num_ranks, 16)``, `COLUMNS` of each step or of a sample of them

    @classmethod
    def of(cls, values: ArrayLike) -> Steps:
        """Sums up steps, ``(num_ranks, num_steps, len(QUANTITIES))``, the same on all ranks; else a ValueError."""
        quantities = np.asarray(values, dtype=np.float64)
        if quantities.ndim != 3 or quantities.shape[0] < 1 or quantities.shape[2] != len(QUANTITIES):
            raise ValueError(
                f"values must be (num_ranks, num_steps, {len(QUANTITIES)}) with at least one rank,"
                f" got {quantities.shape}"
            )
        num_ranks, num_steps, num_quantities = quantities.shape
        columns = np.empty((num_ranks, num_steps, len(COLUMNS)))
        columns[:, :, :num_quantities] = quantities
        waiting = quantities[:, :, [_AT["wire_s"], _AT["exposed_s"]]]
        least = waiting.min(axis=0)
        np.subtract(waiting, least, out=columns[:, :, num_quantities:])
        sums = np.empty(len(SUMS))
        columns.sum(axis=(0, 1), out=sums[: len(COLUMNS)])
        sums[len(COLUMNS) :] = least[:, 0].sum(), num_ranks * num_steps, num_steps
        return cls(sums, columns.max(axis=(0, 1), initial=-math.inf), columns.swapaxes(0, 1))

    @property
    def num_steps(self) -> int:
        return int(self.sums[-1])

    @property
    def num_ranks(self) -> int:
        """Ranks of each step; 0 without steps."""
        return int(self.sums[-2]) // max(1, self.num_steps)

    def sampled(self) -> Steps:
        """Returns the same with a sample of the steps if they are too many to keep."""
        num_steps, num_ranks, _ = self.values.shape
        max_steps = max_sampled_steps(num_ranks)
        return self._replace(values=sample([self.values], [num_steps], max_steps)) if num_steps > max_steps else self

    def statistics(self, world_size: int | None = None) -> dict[str, float]:
        """Returns all statistics, by the names that ``docs/reference/metrics.md`` defines.

        The names are always the same; an unknown value is NaN. Unknown are shares of communication, its ratio and its
        bandwidths if there was none, the waits if steps of some ranks are missing, the samples if no batch shows how
        many it holds, and everything before the first step. ``world_size`` ranks train; None if these are the steps of
        all of them.
        """
        num_trained = max(1, world_size or self.num_ranks)
        return {**self._times(num_trained), **self._ratios(num_trained), **self._straggler()}

    def _times(self, num_trained: int) -> dict[str, float]:
        numbers = np.full((len(TIMES), len(_SUFFIXES)), math.nan)
        if self.num_steps:
            numbers[:, 0] = self.sums[_TIMES_AT] / self.sums[-2]
            numbers[:, 3] = self.maxima[_TIMES_AT]
            if len(self.values):
                numbers[:, 1:3] = np.quantile(self.values[:, :, _TIMES_AT], [0.5, 0.95], axis=(0, 1)).T
            if num_trained > self.num_ranks:
                numbers[[TIMES.index(name) for name in _WAITS]] = math.nan
        return dict(zip(_TIME_NAMES, numbers.ravel().tolist(), strict=True))

    def _ratios(self, num_trained: int) -> dict[str, float]:
        total = dict(zip(SUMS, self.sums.tolist(), strict=True))
        num_values = total["num_values"]
        algorithm_bandwidth = ratio(total["wire_bytes"], total["least_wire_s"] * self.num_ranks)
        return {
            "exposed_share": exposed_share([total]),
            "overlapped_share": 1 - ratio(total["exposed_s"], total["comm_s"]),
            "gradient_bytes": ratio(total["gradient_bytes"], num_values),
            "wire_bytes": ratio(total["wire_bytes"], num_values),
            "compression_ratio": ratio(total["gradient_bytes"], total["wire_bytes"]),
            "algorithm_bandwidth": algorithm_bandwidth,
            "bus_bandwidth": algorithm_bandwidth * bus_factor("all_reduce", num_trained),
            "steps_per_s": ratio(num_values, total["step_s"]),
            "samples_per_s": ratio(total["num_samples"] * num_trained, total["step_s"]) or math.nan,  # unknown
        }

    def _straggler(self) -> dict[str, float]:
        straggler = find_straggler(
            **{name: self.values[:, :, _AT[name]].T for name in ("wire_s", "step_s", "exposed_s")}
        )
        rank, slowdown = (-1, 0.0) if straggler is None else (straggler.rank, straggler.slowdown)
        return {"straggler_rank": float(rank), "straggler_slowdown": slowdown}


def max_sampled_steps(num_ranks: int, max_sampled_values: int = MAX_SAMPLED_VALUES) -> int:
    """Returns how many steps are kept at most."""
    return max(_MIN_SAMPLED_STEPS, max_sampled_values // (num_ranks * len(COLUMNS)))


def sample(blocks: Sequence[Array], counts: Sequence[int], max_steps: int) -> Array:
    """Draws steps uniformly, all ranks of a step together: a reservoir sample, which may continue another one.

    The draw depends on the number of steps alone, so all ranks draw the same.

    Args:
        blocks: each ``(n, num_ranks, 16)``, in the order of time.
        counts: number of steps that each block was drawn from; ``n`` if it has all of them.
        max_steps: number of steps to keep at most.

    Returns:
        ``(min(sum(n), max_steps), num_ranks, 16)``; all steps, in their order, if they are no more than that.
    """
    weighted = [(count / len(block), block) for block, count in zip(blocks, counts, strict=True)]
    weighted.sort(key=lambda pair: pair[0], reverse=True)
    blocks_taken, num_kept, num_seen = [], 0, 0.0
    for weight, block in weighted:
        blocks_taken.append(block[: max_steps - num_kept])
        num_kept += len(blocks_taken[-1])
        num_seen += weight * len(blocks_taken[-1])
    steps = np.concatenate(blocks_taken)
    random = Random()
    for (weight, block), taken in zip(weighted, blocks_taken, strict=True):
        for index in range(len(taken), len(block)):
            num_seen += weight
            random.seed(round(num_seen) - 1)
            replaced = random.randrange(round(num_seen / weight))
            if replaced < max_steps:
                steps[replaced] = block[index]
    return steps


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """The rank that the others wait for."""

    rank: int
    slowdown: float  # how much longer it computes than the others, as a share of their time; median over steps


def find_straggler(*, wire_s: Array, step_s: Array, exposed_s: Array) -> Straggler | None:
    """Finds the rank that makes the others wait, from the time that each spends in collectives; no common clock needed.

    A collective ends for all ranks soon after the last one has joined, so the last rank spends the least time in it.

    The suspect is the rank with the least time on the wire in most steps. The others' wait in a step is the median of
    their time on the wire, less its own. It is named if

    - they waited at least 5 % of their computing time in at least three steps of four: a rank that is late once in a
      while, by however much, does not count, nor do two that are late alternately, as any two are in a quiet run; and
    - its last gradient was ready 12 % of that time later than theirs, in the median over steps. The wire counts a delay
      once for every bucket that waits for it: with 20 buckets, a rank that is 1 % slower keeps the others on the wire
      for some 10 % longer. The exposed time counts it once.

    The exposed time alone is not enough either: a rank may be slow in backward while no other waits for it, because the
    link is slower still. ``docs/evidence/measuring_accuracy.md`` has the errors in a simulation, and in fits.

    Args:
        wire_s: ``(world_size, num_steps)``, seconds in which a rank had a collective under way.
        step_s: ``(world_size, num_steps)``, durations of whole steps.
        exposed_s: ``(world_size, num_steps)``, times from the last gradient to the last bucket.

    Returns:
        The rank; None with one rank, with fewer steps than `MIN_STEPS`, or if none stands out.
    """
    world_size, num_steps = wire_s.shape
    if world_size < 2 or num_steps < MIN_STEPS:
        return None
    rank = int(np.bincount(wire_s.argmin(axis=0), minlength=world_size).argmax())
    others = np.arange(world_size) != rank
    compute_s = float(np.median((step_s - exposed_s)[others]))
    if not compute_s > 0:
        return None
    waited_s = np.median(wire_s[others], axis=0) - wire_s[rank]
    share = np.mean(waited_s >= _LATE * compute_s)
    later_s = np.median(exposed_s[others], axis=0) - exposed_s[rank]
    slowdown = float(np.median(later_s)) / compute_s
    if share < _LATE_STEPS or slowdown < _SLOWDOWN:
        return None
    return Straggler(rank=rank, slowdown=slowdown)
