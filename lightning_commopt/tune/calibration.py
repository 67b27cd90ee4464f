"""Calibration: measures in a few steps with the user's plan what predictions lean on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_commopt.compat.loops import wrap_method
from lightning_commopt.cost.compressor_cost import CompressorCost, measure_costs
from lightning_commopt.cost.from_steps import link_of_steps, workload_of_steps
from lightning_commopt.cost.gradient_times import GradientTimes
from lightning_commopt.measure.clock import clock_for
from lightning_commopt.measure.recorder import RecordedStep, StepRecorder
from lightning_commopt.plan import CommPlan
from lightning_commopt.sync.observed import before_backward
from lightning_commopt.tune.candidates import Shortlist, shortlist
from lightning_commopt.tune.host import Host
from lightning_commopt.tune.options import TuneOptions

NUM_STEPS = 6
_NUM_SETTLING_STEPS = 3  # DDP lays out its buckets after the first, or, with a static graph, the second


class Calibration:
    """Records the steps of this rank while it exists: phases, buckets, and when each gradient is ready.

    Args:
        host: where a step begins; without a comm hook of its own its model must be wrapped
            again while the calibration observes it, see `attach`.
        options: the compressors to measure.
    """

    def __init__(self, host: Host, options: TuneOptions) -> None:
        self._host, self._strategy = host, host.strategy
        self._options = options
        device = self._strategy.root_device
        self._recorder = StepRecorder(clock_for(device))
        self._times = GradientTimes(host.model().module.named_parameters(), device)
        self._step = 0
        self._strategy.sync_observers.add(self._recorder)
        self._undo = [
            wrap_method(*host.begin_backward, self._before_backward),
            wrap_method(*host.end_backward, self._after_backward),
        ]

    def begin_batch(self, *, is_new_step: bool) -> None:
        """Marks the end of the wait for a batch; the first one of a step ends the step before."""
        if is_new_step and self._step:
            self._recorder.end_step(self._step, 0)
        self._step += is_new_step
        self._recorder.enter("forward")
        self._times.begin_forward()

    def steps(self) -> list[RecordedStep]:
        """Returns the steps, without those in which DDP laid out its buckets; waits for the device."""
        return self._recorder.take(self._recorder.num_pending)[_NUM_SETTLING_STEPS:]

    def close(self) -> None:
        """Stops observing."""
        while self._undo:
            self._undo.pop()()
        self._times.close()
        self._strategy.sync_observers.remove(self._recorder)

    def measure(self) -> dict[Any, CompressorCost]:
        """Measures the compressors; all ranks of a machine at the same time."""
        compressors = {self._strategy.plan.comm_hook, *self._options.lossy}
        gradients = self._times.gradients()
        return measure_costs(compressors, gradients, self._strategy.root_device, self._strategy.world_size)

    def shortlist(
        self, ranks: list[list[RecordedStep]], base: CommPlan, costs: dict[Any, CompressorCost], measured_s: float
    ) -> Shortlist:
        """Returns what to try; on rank 0.

        Args:
            ranks: the steps of all ranks.
            base: the user's plan, which was running.
            costs: of the compressors, on this rank.
            measured_s: a step with it.

        Raises:
            ValueError: nothing can be predicted from these steps.
        """
        records = [[step.record for step in steps] for steps in ranks]
        num_ranks, times = self._strategy.world_size, self._times
        workload = workload_of_steps(
            records,
            ranks[0][-1].layout,
            times.gradients(),
            num_ranks=num_ranks,
            device=self._strategy.root_device.type,
            shares_core=times.shares_core,
        )
        link = link_of_steps(records, num_ranks=num_ranks, comm_cpu_s=times.comm_cpu_s, cost=costs.get(base.comm_hook))
        return shortlist(base, self._options, workload, link, costs, measured_s)

    def _before_backward(self, inner: Callable[..., None], *args: Any) -> None:
        inner(*args)
        before_backward(self._host.model())
        self._recorder.enter("backward")
        self._times.begin_backward()

    def _after_backward(self, inner: Callable[..., None], *args: Any) -> None:
        self._recorder.enter("other")
        inner(*args)
