"""Statistics over the steps of all ranks; a torchmetrics metric that never talks to other ranks itself."""

from __future__ import annotations

import math
from random import Random

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_commopt.measure.bandwidth import bus_factor
from lightning_commopt.measure.record import StepRecord, Totals
from lightning_commopt.measure.stragglers import find_straggler

QUANTITIES = (*Totals._fields, "num_samples")
"""What is known of one step on one rank, in the order of `row`."""

TIMES = (
    "step_s",
    "data_s",
    "forward_s",
    "backward_s",
    "optimizer_s",
    "comm_s",
    "exposed_s",
    "compression_s",
    "wait_s",
    "exposed_wait_s",
)
"""What comes as a mean under its own name, and with ``_p50``, ``_p95`` and ``_max`` behind it."""

_MIN_KEPT_STEPS = 64
_SUFFIXES = ("", "_p50", "_p95", "_max")
_COLUMNS = (*QUANTITIES, "wait_s", "exposed_wait_s")
_AT = {name: index for index, name in enumerate(_COLUMNS)}


def row(record: StepRecord) -> list[float]:
    """Returns the numbers of one step, one for each of `QUANTITIES`."""
    return [*map(float, record.totals), float(record.num_samples)]


class StepStatistics(Metric):
    """Aggregates steps over ranks and time.

    Means, sums and maxima are exact. Percentiles and the straggler are exact as long as no more than
    ``max_kept_values`` numbers have come, 15 for each step and rank; after that they are taken from a uniform random
    sample of so many steps, always with all ranks of a step. Which ones depends on their number alone, so that all
    ranks that see the same values compute the same, and `reset` begins anew.

    All ranks' values are handed in: nothing is synchronised, and nothing goes into checkpoints.

    Args:
        max_kept_values: bounds the memory, 8 bytes each; but 64 steps are always kept. The default is 8 MiB, or all
            of 35,000 steps on 2 ranks.

    Attributes:
        num_steps: that have come, a 0-dim integer tensor.
    """

    full_state_update = True
    is_differentiable = False
    higher_is_better = None

    num_steps: Tensor
    sums: Tensor
    maxima: Tensor
    least_wire_s: Tensor
    places: Tensor

    def __init__(self, *, max_kept_values: int = 2**20) -> None:
        super().__init__(sync_on_compute=False, dist_sync_on_step=False)
        if max_kept_values < 1:
            raise ValueError(f"max_kept_values must be at least 1, got {max_kept_values!r}")
        self._max_kept_values = max_kept_values
        self.add_state("num_steps", torch.tensor(0), dist_reduce_fx=None)
        self.add_state("sums", torch.zeros(len(_COLUMNS), dtype=torch.float64), dist_reduce_fx=None)
        self.add_state("maxima", torch.full((len(_COLUMNS),), -torch.inf, dtype=torch.float64), dist_reduce_fx=None)
        self.add_state("least_wire_s", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx=None)
        self.add_state("places", torch.empty(0, 0, len(_COLUMNS), dtype=torch.float64), dist_reduce_fx=None)

    @property
    def kept(self) -> Tensor:
        """The steps that percentiles are taken from, ``(world_size, n, 15)``: `QUANTITIES`, then the two waits."""
        return self.places[:, : int(self.num_steps)]

    def update(self, values: Tensor) -> None:
        """Takes in some steps of all ranks.

        Args:
            values: ``(world_size, num_steps, len(QUANTITIES))``, of the same steps on all ranks, by rank.

        Raises:
            ValueError: another shape, or another number of ranks than before.
        """
        if values.dim() != 3 or values.shape[0] < 1 or values.shape[2] != len(QUANTITIES):
            raise ValueError(
                f"values must be (world_size, num_steps, {len(QUANTITIES)}) with at least one rank,"
                f" got {tuple(values.shape)}"
            )
        if self.places.shape[0] not in (0, values.shape[0]):
            raise ValueError(f"values must be of {self.places.shape[0]} ranks as before, got {values.shape[0]}")
        if not values.shape[1]:
            return
        values = values.to(self.sums)
        wire_s, exposed_s = values[:, :, _AT["wire_s"]], values[:, :, _AT["exposed_s"]]
        least_wire_s = wire_s.amin(dim=0)
        waits = torch.stack([wire_s - least_wire_s, exposed_s - exposed_s.amin(dim=0)], dim=2)
        steps = torch.cat([values, waits], dim=2)
        self._keep(steps)
        self.num_steps = self.num_steps + steps.shape[1]
        self.sums = self.sums + steps.sum(dim=(0, 1))
        self.maxima = self.maxima.maximum(steps.amax(dim=(0, 1)))
        self.least_wire_s = self.least_wire_s + least_wire_s.sum()

    def compute(self) -> dict[str, Tensor]:
        """Returns all statistics, each a 0-dim float64 tensor.

        The names are the same for all values: what cannot be told is NaN. That are the shares of an exchange, its
        ratio and its bandwidths where there was none, the samples where no batch shows how many it holds, and all
        numbers before the first step.

        Returns:
            For each of `TIMES` its mean over steps and ranks, and ``_p50``, ``_p95`` and ``_max``. Of these ``wait_s``
            is how much longer a rank was on the wire than the one that was it least in that step, and
            ``exposed_wait_s`` the same of the exposed time: the part of it in which a rank waits for a slower one. And

            - ``exposed_share`` of the steps' time, ``overlapped_share`` of the exchange's time (at least 0),
            - ``gradient_bytes`` and ``wire_bytes`` of a step on a rank, and ``compression_ratio`` between them,
            - ``algorithm_bandwidth`` and ``bus_bandwidth`` in bytes a second, of an all-reduce of ``wire_bytes`` in the
              wire time of the rank that waits least in each step,
            - ``steps_per_s`` and ``samples_per_s``, the latter over all ranks,
            - ``straggler_rank``, -1 for none, and ``straggler_slowdown``, then 0; see `find_straggler`.
        """
        return {name: self.sums.new_tensor(value) for name, value in self.floats().items()}

    def floats(self) -> dict[str, float]:
        """Returns what `compute` does as plain numbers, in less time."""
        return {**self._of_times(), **self._of_sums(), **self._of_straggler()}

    def _of_times(self) -> dict[str, float]:
        columns = torch.tensor([_AT[name] for name in TIMES], device=self.sums.device)
        kept = self.kept[:, :, columns].flatten(0, 1)
        if len(kept):
            means = self.sums[columns] / (self.num_steps * self.places.shape[0])
            quantiles = kept.quantile(kept.new_tensor([0.5, 0.95]), dim=0)
            statistics = torch.cat([means[None], quantiles, self.maxima[columns][None]])
        else:
            statistics = kept.new_full((len(_SUFFIXES), len(TIMES)), torch.nan)
        return {
            f"{name}{suffix}": value
            for name, of_name in zip(TIMES, statistics.T.tolist(), strict=True)
            for suffix, value in zip(_SUFFIXES, of_name, strict=True)
        }

    def _of_sums(self) -> dict[str, float]:
        world_size = max(1, self.places.shape[0])
        total: dict[str, float] = dict(zip(_COLUMNS, self.sums.tolist(), strict=True))
        num_values = int(self.num_steps) * world_size
        algorithm_bandwidth = _ratio(total["wire_bytes"] / world_size, self.least_wire_s.item())
        return {
            "exposed_share": _ratio(total["exposed_s"], total["step_s"]),
            "overlapped_share": max(1 - _ratio(total["exposed_s"], total["comm_s"]), 0.0),  # NaN stays NaN
            "gradient_bytes": _ratio(total["gradient_bytes"], num_values),
            "wire_bytes": _ratio(total["wire_bytes"], num_values),
            "compression_ratio": _ratio(total["gradient_bytes"], total["wire_bytes"]),
            "algorithm_bandwidth": algorithm_bandwidth,
            "bus_bandwidth": algorithm_bandwidth * bus_factor("all_reduce", world_size),
            "steps_per_s": _ratio(num_values, total["step_s"]),
            "samples_per_s": _ratio(total["num_samples"] * world_size, total["step_s"]) or math.nan,  # unknown
        }

    def _of_straggler(self) -> dict[str, float]:
        wire_s, step_s, exposed_s = (self.kept[:, :, _AT[name]] for name in ("wire_s", "step_s", "exposed_s"))
        straggler = find_straggler(wire_s=wire_s, step_s=step_s, exposed_s=exposed_s)
        rank, slowdown = (-1, 0.0) if straggler is None else (straggler.rank, straggler.slowdown)
        return {"straggler_rank": float(rank), "straggler_slowdown": slowdown}

    def _keep(self, steps: Tensor) -> None:
        """Keeps the first steps as they come, and of all that have come an even sample when there are too many."""
        num_before, (world_size, num_new, num_columns) = int(self.num_steps), steps.shape
        if not num_before:
            capacity = max(_MIN_KEPT_STEPS, self._max_kept_values // (world_size * num_columns))
            self.places = steps.new_empty(world_size, capacity, num_columns)
        capacity = self.places.shape[1]
        num_fitting = max(0, min(num_new, capacity - num_before))
        self.places[:, num_before : num_before + num_fitting] = steps[:, :num_fitting]
        for index in range(num_fitting, num_new):
            place = _draw(num_before + index)
            if place < capacity:
                self.places[:, place] = steps[:, index]


def _draw(index: int) -> int:
    """Returns where a reservoir sample puts the element of this index, counted from 0; beyond its end for nowhere."""
    return Random(index).randrange(index + 1)


def _ratio(numerator: float, denominator: float) -> float:
    """Returns NaN where the denominator is 0."""
    return numerator / denominator if denominator > 0 else math.nan
