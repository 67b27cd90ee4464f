"""PredictionRecorder: collects during a fit what predictions of other plans need, and writes it at the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.callbacks.publisher import StepFiles
from lightning_commopt.cost.basis import Basis, recommended_compressors
from lightning_commopt.cost.candidates import forecasts
from lightning_commopt.cost.compressor_cost import measure_costs
from lightning_commopt.cost.gradient_times import GradientTimes
from lightning_commopt.measure.record import StepRecord
from lightning_commopt.measure.verdict import Forecast
from lightning_commopt.plan import CommPlan
from lightning_commopt.strategy.base import is_baseline, plan_of

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import Strategy

_NUM_BACKWARDS = 10
_NUM_STEPS = 100


class PredictionRecorder:
    """Times the gradients of ten backwards after the warm-up, on rank 0, and keeps the last steps."""

    def __init__(self, trainer: Trainer, module: LightningModule, num_warmup_backwards: int) -> None:
        self._strategy = trainer.strategy
        self._num_ranks, self._num_ranks_on_host = trainer.world_size, trainer.num_devices
        self._module = module
        self._plan = plan_of(trainer.strategy)
        self._num_left = num_warmup_backwards
        self._times: GradientTimes | None = None
        self._steps: deque[StepRecord] = deque(maxlen=_NUM_STEPS)
        # No further gradients are timed then, so `enter` need not be called.
        is_ddp = isinstance(trainer.strategy.model, DistributedDataParallel) and not is_baseline(trainer.strategy)
        self.is_over = not (trainer.is_global_zero and is_ddp)

    def enter(self, phase: str | None) -> None:
        """Must be called when a phase of a step begins; "backward" right before a backward."""
        if phase == "forward" and self._times is not None:
            self._times.begin_forward()
        if phase != "backward":
            return
        self._num_left -= 1
        if self._num_left >= 0:
            return
        if self._times is None:
            device, num_ranks = self._strategy.root_device, self._num_ranks_on_host
            self._times = GradientTimes(self._module.named_parameters(), device, num_ranks)
        if self._times.num_backwards == _NUM_BACKWARDS:
            self.close()
        else:
            self._times.begin_backward()

    def add(self, steps: Sequence[StepRecord]) -> None:
        """Adds steps as they are taken from the recorder; those of an earlier plan, and the first of another, go."""
        plan = plan_of(self._strategy)
        if plan == self._plan:
            self._steps.extend(steps)
        else:
            self._plan = plan
            self._steps.clear()

    def close(self) -> None:
        """Removes the hooks from the parameters."""
        self.is_over = True
        if self._times is not None:
            self._times.close()

    def conclude(self, comm_hook: str, files: StepFiles | None) -> list[Forecast]:
        """Returns what other settings would make of a step, if the fit has shown enough; ``files`` get it too."""
        self.close()
        if self._times is None or not self._steps or (plan := _plan(self._strategy, comm_hook)) is None:
            return []
        device = self._strategy.root_device
        try:
            found = self._times.arguments()
            hooks = dict.fromkeys([*recommended_compressors(), plan.comm_hook])
            basis = Basis.of_steps(
                plan,
                [[step for step in self._steps if step.buckets]],
                measure_costs(hooks, found["gradients"], device, self._num_ranks),
                num_ranks=self._num_ranks,
                device=device.type,
                **found,
            )
        except ValueError:  # too few steps, or no buckets
            return []
        others = forecasts(basis)
        if files is not None:
            files.save_basis(basis, others)
        return others


def _plan(strategy: Strategy, comm_hook: str) -> CommPlan | None:
    """Returns the plan of a strategy, of Lightning's own as well; None if its hook is none of ours."""
    plan = plan_of(strategy)
    if plan is not None and plan.comm_hook is not None:
        return plan
    if comm_hook not in ("none", "allreduce_hook"):
        return None
    if plan is not None:
        return plan
    model = strategy.model
    assert isinstance(model, DistributedDataParallel)
    return CommPlan(bucket_cap_mb=None if model.bucket_bytes_cap_default else model.bucket_bytes_cap / 2**20)
