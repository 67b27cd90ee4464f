"""The statistics of steps as `torchmetrics.Metric`, which can be logged, merged, plotted and put in collections.

Update them with `CommTimeMonitor.new_steps`; ``docs/reference/metrics.md`` shows how, and lists the numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.plot import plot_single_or_multi_val

from lightning_commopt.measure import statistics
from lightning_commopt.measure.record import StepRecord
from lightning_commopt.measure.statistics import MAX_SAMPLED_VALUES, QUANTITIES, Steps
from lightning_commopt.text.validation import check_choice, check_integer

__all__ = ["QUANTITIES", "ExposedShare", "StepMetric", "StepStatistics"]


class StepStatistics(Metric):
    """All statistics, over steps and ranks, of the steps that it was updated with.

    Means, sums and maxima are exact. Percentiles and the straggler are exact up to ``max_sampled_values`` numbers, 16
    for each step and rank. With more, they come from a uniform random sample of steps, always with all ranks of a step.
    The sample depends only on the number of steps, so ranks with the same values compute the same results.

    >>> metric = StepStatistics()
    >>> metric.update(torch.ones(2, 10, len(QUANTITIES)))  # 10 steps of 2 ranks, in which everything takes 1 s
    >>> metric.compute()["exposed_s_p95"]
    tensor(1., dtype=torch.float64)

    Args:
        world_size: number of ranks that train; None if every update has the steps of all ranks.
        max_sampled_values: limit of the numbers that are kept, of 8 bytes each. At least 64 steps are always kept, and
            `forward` drops none before `reset`. The default takes 8 MiB, for all of 32,000 steps on 2 ranks. With 0
            there are no percentiles.
        sync_on_compute: let `compute` gather the states of all ranks, for updates with the steps of a single rank,
            which cannot know the waits. It is off by default, since `CommTimeMonitor` has the steps of all ranks.
        options: other options of `torchmetrics.Metric`.
    """

    full_state_update = False
    is_differentiable = False

    sums: Tensor
    maxima: Tensor
    # These two are lists of tensors, or single tensors while states are synchronized.
    sample: Any
    counts: Any

    def __init__(
        self,
        *,
        world_size: int | None = None,
        max_sampled_values: int = MAX_SAMPLED_VALUES,
        sync_on_compute: bool = False,
        **options: Any,
    ) -> None:
        check_integer("max_sampled_values", max_sampled_values, at_least=0)
        super().__init__(sync_on_compute=sync_on_compute, **options)
        self.world_size = world_size
        self.max_sampled_values = max_sampled_values
        self.add_state("sums", torch.zeros(len(statistics.SUMS), dtype=torch.float64, device="cpu"), "sum")
        self.add_state(
            "maxima", torch.full((len(statistics.COLUMNS),), -torch.inf, dtype=torch.float64, device="cpu"), "max"
        )
        self.sample, self.counts = [], []
        # A metric without a sample has no such states, since a MetricCollection merges metrics with equal, empty lists.
        if max_sampled_values:
            self.add_state("sample", [], "cat")
            self.add_state("counts", [], "cat")

    def update(self, steps: Steps | StepRecord | ArrayLike) -> None:
        """Adds steps.

        Args:
            steps: an element of `CommTimeMonitor.new_steps`; or a record of this rank's step; or seconds, bytes and
                samples of steps of all ranks, ``(num_ranks, num_steps, 14)`` in the order of `QUANTITIES`.

        Raises:
            ValueError: the shape is another one, or the number of ranks has changed.
        """
        if not isinstance(steps, Steps):
            steps = Steps.of([[statistics.row(steps)]] if isinstance(steps, StepRecord) else steps)
        num_steps, num_ranks, _ = steps.values.shape
        if len(self.sample) and self.sample[-1].shape[-2] != num_ranks:
            raise ValueError(
                f"steps must have {self.sample[-1].shape[-2]} ranks, as in earlier updates, got {num_ranks}"
            )
        device = self.sums.device
        self.sums += torch.from_numpy(steps.sums).to(device)
        torch.maximum(self.maxima, torch.from_numpy(steps.maxima).to(device), out=self.maxima)
        if num_steps and self.max_sampled_values:
            self.sample.append(torch.from_numpy(steps.values).to(device))
            self.counts.append(torch.full((1,), num_steps, device=device))
            max_steps = statistics.max_sampled_steps(num_ranks, self.max_sampled_values)
            # The sample may exceed the maximum by a 64th, so that not every update has to draw a new one.
            if len(self.sample[0]) + len(self.sample) * num_steps > max_steps * 65 / 64:
                self.sample[:] = [torch.from_numpy(self._draw()).to(device)]
                self.counts[:] = [torch.cat(self.counts).sum(0, keepdim=True)]

    def compute(self) -> Any:
        """Returns a float64 scalar for each name, NaN if it is unknown."""
        numbers = self.steps.statistics(self.world_size)
        return dict(zip(numbers, self.sums.new_tensor([*numbers.values()]).unbind(), strict=True))

    @property
    def steps(self) -> Steps:
        """Sums and maxima of all steps, and a sample of them."""
        return Steps(self.sums.cpu().numpy().copy(), self.maxima.cpu().numpy().copy(), self._draw())

    def _draw(self) -> statistics.Array:
        if not len(self.sample):
            return np.empty((0, 1, len(statistics.COLUMNS)))
        is_synced = isinstance(self.sample, Tensor)
        blocks = [block.cpu().numpy() for block in ([self.sample] if is_synced else self.sample)]
        counts = [int(count) for count in ([self.counts.sum()] if is_synced else self.counts)]
        max_steps = statistics.max_sampled_steps(blocks[0].shape[1], self.max_sampled_values)
        return statistics.sample(blocks, counts, max_steps)

    def plot(self, val: Any = None, ax: Any = None) -> Any:
        """Plots one or several results of `compute` or `forward`, by default the current one; needs matplotlib."""
        value = self.compute() if val is None else val
        return plot_single_or_multi_val(value, ax=ax, name=getattr(self, "name", None))


class StepMetric(StepStatistics):
    """A single statistic of the steps that it was updated with.

    >>> steps = torch.ones(4, 10, len(QUANTITIES))  # 10 steps of 4 ranks
    >>> steps[:, :, QUANTITIES.index("wire_bytes")] = 1e9  # in 1 s
    >>> StepMetric("bus_bandwidth")(steps)
    tensor(1.5000e+09, dtype=torch.float64)

    Args:
        name: name of the statistic, which is in seconds or bytes, or a share from 0 to 1.
        options: options of `StepStatistics`.
    """

    def __init__(self, name: str, **options: Any) -> None:
        needs_sample = name.endswith(("_p50", "_p95")) or name.startswith("straggler")
        super().__init__(**(options if needs_sample else options | {"max_sampled_values": 0}))
        check_choice("name", name, list(self.steps.statistics()))
        self.name = name

    def compute(self) -> Tensor:
        """Returns a float64 scalar; NaN if unknown."""
        return self.sums.new_tensor(self.steps.statistics(self.world_size)[self.name])


class ExposedShare(StepMetric):
    """The share, from 0 to 1, of the steps' time in which computation waits for communication.

    >>> steps = torch.ones(2, 10, len(QUANTITIES))
    >>> steps[:, :, QUANTITIES.index("step_s")] = 4
    >>> ExposedShare()(steps)
    tensor(0.2500, dtype=torch.float64)
    """

    higher_is_better = False

    def __init__(self, **options: Any) -> None:
        super().__init__("exposed_share", **options)
