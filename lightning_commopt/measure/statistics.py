"""Statistics over the steps of all ranks, computed without communication."""

from __future__ import annotations

import math
from random import Random

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_commopt.measure.exposed_share import exposed_share
from lightning_commopt.measure.record import StepRecord, Totals
from lightning_commopt.measure.stragglers import find_straggler

QUANTITIES = (*Totals._fields, "num_samples")
"""What is known of one step on one rank, in the order of `row`."""

TIMES = (
    *("step_s", "data_s", "forward_s", "backward_s", "optimizer_s"),
    *("comm_s", "queue_s", "compression_s", "wire_s", "wait_s", "exposed_s", "exposed_wait_s"),
)
"""Reported as a mean under their own names, and with ``_p50``, ``_p95`` and ``_max`` behind them."""

_MIN_SAMPLED_STEPS = 64
_SUFFIXES = ("", "_p50", "_p95", "_max")
_WAITS = ("wait_s", "exposed_wait_s")
_COLUMNS = (*QUANTITIES, *_WAITS)
_AT = {name: index for index, name in enumerate(_COLUMNS)}


def row(record: StepRecord) -> list[float]:
    """Returns the numbers of one step, one for each of `QUANTITIES`."""
    return [*map(float, record.totals), float(record.num_samples)]


def all_reduce_bus_factor(world_size: int) -> float:
    """Returns how often, at least, an all-reduce moves its message over each rank's link in each direction.

    >>> [all_reduce_bus_factor(n) for n in (1, 2, 8)]
    [0.0, 1.0, 1.75]

    Source: nccl-tests, doc/PERFORMANCE.md.
    """
    return 2 * (world_size - 1) / world_size


class StepStatistics:
    """Aggregates steps over ranks and time.

    Means, sums and maxima are exact. Percentiles and the straggler are exact as long as no more than
    ``max_sampled_values`` numbers have come, 16 for each step and rank; after that they are taken from a uniform random
    sample of so many steps, always with all ranks of a step. Which ones depends on their number alone, so that all
    ranks that see the same values compute the same.

    Args:
        world_size: number of ranks that train; None if values of all of them come.
        max_sampled_values: bounds the memory, 8 bytes each; but 64 steps are always kept. The default is 8 MiB, or all
            of 32,000 steps on 2 ranks.

    Attributes:
        num_steps: that have come.
    """

    def __init__(self, *, world_size: int | None = None, max_sampled_values: int = 2**20) -> None:
        if max_sampled_values < 1:
            raise ValueError(f"max_sampled_values must be at least 1, got {max_sampled_values!r}")
        self._world_size = world_size
        self._max_sampled_values = max_sampled_values
        self.num_steps = 0
        self._sums = np.zeros(len(_COLUMNS))
        self._maxima = np.full(len(_COLUMNS), -math.inf)
        self._least_wire_s = 0.0
        self._reservoir = np.empty((0, 0, len(_COLUMNS)))

    @property
    def num_ranks(self) -> int:
        """Ranks whose steps have come; 0 before the first."""
        return self._reservoir.shape[0]

    @property
    def sample(self) -> NDArray[np.float64]:
        """The steps that percentiles are taken from, ``(num_ranks, n, 16)``: `QUANTITIES`, then the two waits."""
        return self._reservoir[:, : self.num_steps]

    def update(self, values: ArrayLike) -> None:
        """Takes in some steps of all ranks.

        Args:
            values: ``(num_ranks, num_steps, len(QUANTITIES))``, of the same steps on all ranks, by rank.

        Raises:
            ValueError: another shape, or another number of ranks than before.
        """
        values = np.asarray(values, dtype=np.float64)
        if values.ndim != 3 or values.shape[0] < 1 or values.shape[2] != len(QUANTITIES):
            raise ValueError(
                f"values must be (num_ranks, num_steps, {len(QUANTITIES)}) with at least one rank, got {values.shape}"
            )
        if self.num_ranks not in (0, values.shape[0]):
            raise ValueError(f"values must be of {self.num_ranks} ranks as before, got {values.shape[0]}")
        if not values.shape[1]:
            return
        wire_s, exposed_s = values[:, :, _AT["wire_s"]], values[:, :, _AT["exposed_s"]]
        least_wire_s = wire_s.min(axis=0)
        waits = np.stack([wire_s - least_wire_s, exposed_s - exposed_s.min(axis=0)], axis=2)
        steps = np.concatenate([values, waits], axis=2)
        self._add_to_sample(steps)
        self.num_steps += steps.shape[1]
        self._sums += steps.sum(axis=(0, 1))
        self._maxima = np.maximum(self._maxima, steps.max(axis=(0, 1)))
        self._least_wire_s += float(least_wire_s.sum())

    def compute(self) -> dict[str, float]:
        """Returns all statistics.

        The names are always the same; an unknown value is NaN. Unknown are shares of communication, its
        ratio and its bandwidths where there was none, the waits where only some of the ranks' steps have come, the
        samples where no batch shows how many it holds, and all numbers before the first step.

        Returns:
            For each of `TIMES` its mean over steps and ranks, and ``_p50``, ``_p95`` and ``_max``. Of these ``wait_s``
            is how much longer a rank was on the wire than the one that was it least in that step, and
            ``exposed_wait_s`` the same of the exposed time: the part of it in which a rank waits for a slower one. And

            - ``exposed_share`` of the steps' time, see `exposed_share`; ``overlapped_share`` of communication,
            - ``gradient_bytes`` and ``wire_bytes`` of a step on a rank, and ``compression_ratio`` between them,
            - ``algorithm_bandwidth`` and ``bus_bandwidth`` in bytes a second, of an all-reduce of ``wire_bytes`` in the
              wire time of the rank that waits least in each step, as nccl-tests defines them,
            - ``steps_per_s`` and ``samples_per_s``, the latter over all ranks,
            - ``straggler_rank``, -1 for none, and ``straggler_slowdown``, then 0; see `find_straggler`.
        """
        return {**self._of_times(), **self._of_sums(), **self._of_straggler()}

    def _of_times(self) -> dict[str, float]:
        columns = [_AT[name] for name in TIMES]
        sample = self.sample[:, :, columns].reshape(-1, len(columns))
        if len(sample):
            means = self._sums[columns] / (self.num_steps * self.num_ranks)
            statistics = np.stack([means, *np.quantile(sample, [0.5, 0.95], axis=0), self._maxima[columns]])
            if self._num_trained > self.num_ranks:
                statistics[:, [TIMES.index(name) for name in _WAITS]] = math.nan
        else:
            statistics = np.full((len(_SUFFIXES), len(TIMES)), math.nan)
        return {
            f"{name}{suffix}": value
            for name, of_name in zip(TIMES, statistics.T.tolist(), strict=True)
            for suffix, value in zip(_SUFFIXES, of_name, strict=True)
        }

    @property
    def _num_trained(self) -> int:
        """Ranks that train, whether their steps have come or not."""
        return max(1, self._world_size or self.num_ranks)

    def _of_sums(self) -> dict[str, float]:
        total: dict[str, float] = dict(zip(_COLUMNS, self._sums.tolist(), strict=True))
        num_values = self.num_steps * self.num_ranks
        algorithm_bandwidth = _ratio(total["wire_bytes"], self._least_wire_s * self.num_ranks)
        return {
            "exposed_share": exposed_share([total]),
            "overlapped_share": 1 - _ratio(total["exposed_s"], total["comm_s"]),
            "gradient_bytes": _ratio(total["gradient_bytes"], num_values),
            "wire_bytes": _ratio(total["wire_bytes"], num_values),
            "compression_ratio": _ratio(total["gradient_bytes"], total["wire_bytes"]),
            "algorithm_bandwidth": algorithm_bandwidth,
            "bus_bandwidth": algorithm_bandwidth * all_reduce_bus_factor(self._num_trained),
            "steps_per_s": _ratio(num_values, total["step_s"]),
            "samples_per_s": _ratio(total["num_samples"] * self._num_trained, total["step_s"]) or math.nan,  # unknown
        }

    def _of_straggler(self) -> dict[str, float]:
        wire_s, step_s, exposed_s = (self.sample[:, :, _AT[name]] for name in ("wire_s", "step_s", "exposed_s"))
        straggler = find_straggler(wire_s=wire_s, step_s=step_s, exposed_s=exposed_s)
        rank, slowdown = (-1, 0.0) if straggler is None else (straggler.rank, straggler.slowdown)
        return {"straggler_rank": float(rank), "straggler_slowdown": slowdown}

    def _add_to_sample(self, steps: NDArray[np.float64]) -> None:
        """Keeps the first steps as they come, and of all that have come an even sample when there are too many."""
        num_before, (num_ranks, num_new, num_columns) = self.num_steps, steps.shape
        if not num_before:
            capacity = max(_MIN_SAMPLED_STEPS, self._max_sampled_values // (num_ranks * num_columns))
            self._reservoir = np.empty((num_ranks, capacity, num_columns))
        capacity = self._reservoir.shape[1]
        num_fitting = max(0, min(num_new, capacity - num_before))
        self._reservoir[:, num_before : num_before + num_fitting] = steps[:, :num_fitting]
        for index in range(num_fitting, num_new):
            place = _draw(num_before + index)
            if place < capacity:
                self._reservoir[:, place] = steps[:, index]


def _draw(index: int) -> int:
    """Returns where a reservoir sample puts the element of this index, counted from 0; beyond its end for nowhere."""
    return Random(index).randrange(index + 1)


def _ratio(numerator: float, denominator: float) -> float:
    """Returns NaN where the denominator is 0."""
    return numerator / denominator if denominator > 0 else math.nan
