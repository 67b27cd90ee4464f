"""PredictionRecorder: collects the inputs of predictions during a fit, and predicts other plans at its end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.callbacks.publisher import StepFiles
from lightning_commopt.cost.basis import Basis, recommended_compressors
from lightning_commopt.cost.candidates import forecasts
from lightning_commopt.cost.compressor_cost import measure_costs
from lightning_commopt.cost.fsdp2.basis import ShardedBasis
from lightning_commopt.cost.gradient_times import GradientTimes
from lightning_commopt.cost.link_probe import ProbedSize, probe_link
from lightning_commopt.measure.forecasts import Forecast
from lightning_commopt.measure.link.from_steps import SentStep
from lightning_commopt.measure.record import StepRecord
from lightning_commopt.plan import CommPlan, DiLoCoPlan
from lightning_commopt.strategy.base import is_baseline, plan_of
from lightning_commopt.sync.gather import all_ranks_ready
from lightning_commopt.sync.store import prepare_key_spaces
from lightning_commopt.text.validation import info

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import Strategy

_NUM_BACKWARDS = 10  # only a few backwards are timed, because hooks on every parameter slow them down
_NUM_STEPS = 100  # enough steps to estimate a spread; the buckets of more would cost memory
MAX_PROBE_BYTES = 2**26  # larger messages take the same time per byte

# Time by which ranks may end the fit later than rank 0, for example after a slow callback. If one takes longer, the
# link is not probed.
_PATIENCE_S = 5.0


class KeepsSteps:
    """Keeps the last steps with the plan in use."""

    def __init__(self) -> None:
        self._steps: deque[StepRecord] = deque(maxlen=_NUM_STEPS)

    def add(self, steps: Sequence[StepRecord], *, is_changed: bool) -> None:
        """Adds steps from the recorder; if the plan has changed among them, drops them and all earlier ones instead."""
        if is_changed:
            self._steps.clear()
        else:
            self._steps.extend(steps)


class PredictionRecorder(KeepsSteps):
    """Times the gradients of ten backwards after the warm-up, on rank 0, and keeps the last steps.

    All ranks must have one, because `conclude` probes the link between them.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, num_warmup_backwards: int) -> None:
        super().__init__()
        self._strategy = trainer.strategy
        self._num_ranks, self._num_ranks_on_host = trainer.world_size, trainer.num_devices
        self._module = module
        self._num_left = num_warmup_backwards
        self._times: GradientTimes | None = None
        is_ddp = isinstance(trainer.strategy.model, DistributedDataParallel) and not is_baseline(trainer.strategy)
        self._is_ddp = is_ddp and not isinstance(plan_of(trainer.strategy), DiLoCoPlan)
        # If this is true, no further gradients are timed, and `enter` need not be called.
        self.is_over = not (trainer.is_global_zero and self._is_ddp)
        if self._is_ddp:
            prepare_key_spaces()

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

    def close(self) -> None:
        """Removes the hooks from the parameters."""
        self.is_over = True
        if self._times is not None:
            self._times.close()

    def conclude(self, comm_hook: str, files: StepFiles | None, sent: Sequence[SentStep] = ()) -> list[Forecast]:
        """Returns predictions of a step with other settings, if the fit has shown enough for them.

        All ranks must call it after the fit, because it probes the link; only rank 0 predicts.

        Args:
            comm_hook: name of the comm hook that averages the gradients; see `describe_hook`.
            files: where to write the predictions; None to write nothing.
            sent: messages of all ranks in the last steps; empty if only this rank's are known.
        """
        self.close()
        if not self._is_ddp or (plan := _plan(self._strategy, comm_hook)) is None:
            return []
        began = time.perf_counter()
        probe = self._probe()
        if self._times is None or not self._steps:
            return []
        device = self._strategy.root_device
        try:
            learned = self._times.arguments()
            hooks = dict.fromkeys([*recommended_compressors(), plan.comm_hook])
            costs = measure_costs(hooks, learned["gradients"], device, self._num_ranks)
            if plan.comm_hook is not None and plan.comm_hook not in costs:
                return []
            basis = Basis.of_steps(
                plan,
                [[step for step in self._steps if step.buckets]],
                costs,
                num_ranks=self._num_ranks,
                device=device.type,
                probe=probe,
                sent=sent,
                **learned,
            )
        except ValueError:  # too few steps, or no buckets
            return []
        by_hand = not self._module.automatic_optimization
        return publish(forecasts(basis, accumulates_by_hand=by_hand), basis, files, began)

    def _probe(self) -> list[ProbedSize]:
        """Returns the times of a few all-reduces over the group of gradient sync; empty if not all ranks take part."""
        model = self._strategy.model
        assert isinstance(model, DistributedDataParallel)
        gradients = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in gradients)
        with suppress(RuntimeError):  # a rank has failed, which others report
            if can_probe():
                return probe_link(model.process_group, self._strategy.root_device, min(num_bytes, MAX_PROBE_BYTES))
        return []


def can_probe() -> bool:
    """Returns whether all ranks have ended the fit, so that the link may be probed. All ranks must call it."""
    return all_ranks_ready("end of fit", _PATIENCE_S, default_pg_timeout.total_seconds())


def publish(
    others: list[Forecast], basis: Basis | ShardedBasis, files: StepFiles | None, began: float
) -> list[Forecast]:
    """Writes and returns predictions, and logs the time since ``began`` (``time.perf_counter()``)."""
    if files is not None:
        files.save_basis(basis, others)
    info(
        "CommTimeMonitor has probed the link and measured compressors for its predictions. That took"
        f" {time.perf_counter() - began:.1f} s after the fit."
    )
    return others


def _plan(strategy: Strategy, comm_hook: str) -> CommPlan | None:
    """Returns the plan of a strategy, or a plan like Lightning's own DDP; None if its comm hook is not ours."""
    plan = plan_of(strategy)
    assert plan is None or isinstance(plan, CommPlan)  # the recorder works with DDP only
    if plan is not None and plan.comm_hook is not None:
        return plan
    if comm_hook not in ("none", "allreduce_hook"):
        return None
    if plan is not None:
        return plan
    model = strategy.model
    assert isinstance(model, DistributedDataParallel)
    return CommPlan(bucket_cap_mb=None if model.bucket_bytes_cap_default else model.bucket_bytes_cap / 2**20)
