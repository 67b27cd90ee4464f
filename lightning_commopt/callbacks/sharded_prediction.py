"""ShardedPredictionRecorder: collects the inputs of predictions of other plans during a fit of FSDP2."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from lightning_commopt.callbacks.prediction import MAX_PROBE_BYTES, KeepsSteps, PredictionRecorder, can_probe, publish
from lightning_commopt.callbacks.publisher import StepFiles
from lightning_commopt.callbacks.unit_calls import UnitCalls
from lightning_commopt.compat.fsdp import units_of
from lightning_commopt.cost.fsdp2.arithmetic import measure_gather_cost, measure_shard_costs, predicted_shards
from lightning_commopt.cost.fsdp2.basis import sharded_forecasts
from lightning_commopt.cost.fsdp2.calls import Batch, blocking, usual_batches
from lightning_commopt.cost.fsdp2.from_fit import basis_of_fit
from lightning_commopt.cost.fsdp2.links import probe_shard_links
from lightning_commopt.cost.fsdp2.workload import Payload, Unit
from lightning_commopt.cost.gradient_times import GradientTimes
from lightning_commopt.measure.forecasts import Forecast
from lightning_commopt.measure.link.from_steps import SentStep
from lightning_commopt.plan import OptionError
from lightning_commopt.plan.sharded import ShardedPlan
from lightning_commopt.strategy.base import plan_of
from lightning_commopt.sync.fsdp2.gradients import replicas_and_shards, sharded_units
from lightning_commopt.sync.fsdp2.unit import Column
from lightning_commopt.sync.store import prepare_key_spaces

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_NUM_BATCHES = 50
"""Number of batches whose collectives are timed: enough for medians, while the calls of more would cost memory."""


class ShardedPredictionRecorder(KeepsSteps):
    """Times the calls of FSDP2's comm objects in 50 batches after the warm-up, on all ranks, and keeps the last steps.

    All ranks must have one, because `conclude` compares their times and probes the link between them. It does nothing
    if FSDP2 has no comm objects (before torch 2.9), or if shards have replicas or a dimension besides data parallelism.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, num_warmup_backwards: int) -> None:
        super().__init__()
        self._strategy, self._num_ranks_on_host = trainer.strategy, trainer.num_devices
        self._device = trainer.strategy.root_device
        self._num_left = num_warmup_backwards
        self._plan = self._plan_in_use()
        self._calls: UnitCalls | None = None
        self._times = GradientTimes((), self._device, self._num_ranks_on_host)
        self._columns = self._columns_of_units()
        # The group is looked up now, because the forward of a validation may leave parameters gathered, and gathered
        # parameters have no mesh.
        self._group = _group_of(next(filter(None, self._columns))) if any(self._columns) else None
        self.is_over = not self._columns  # then `enter` need not be called
        if self._columns:
            prepare_key_spaces()

    def enter(self, phase: str | None) -> None:
        """Must be called when a phase of a step begins; "backward" right before a backward."""
        self._num_left -= phase == "backward"
        if phase == "forward":
            self._begin_batch()
        if self._calls is not None and self._calls.is_open:
            if phase == "backward":
                self._times.begin_backward()
            self._calls.enter(phase)

    def _begin_batch(self) -> None:
        """Starts to time calls after the warm-up, and again if the plan has changed; stops after `_NUM_BATCHES`."""
        plan = self._plan_in_use()
        if plan != self._plan:
            self.close()
            self._plan, self._calls = plan, None
        if self._calls is None and self._num_left < 0:
            assert self._strategy.model is not None
            self._calls = UnitCalls(self._strategy.model, self._device)
        if self._calls is not None and self._calls.is_open:
            self._times.begin_forward()
            if len(self._calls.batches) == _NUM_BATCHES:
                self._calls.close()

    def close(self) -> None:
        """Restores the units' own comm objects."""
        if self._calls is not None:
            self._calls.close()

    def conclude(self, comm_hook: str, files: StepFiles | None, sent: Sequence[SentStep] = ()) -> list[Forecast]:
        """Returns predictions of a step with other plans, if the fit has shown enough for them.

        All ranks must call it after the fit; only rank 0 predicts. The arguments are those of
        `PredictionRecorder.conclude`.
        """
        self.close()
        if not self._columns:
            return []
        began = time.perf_counter()
        batches = usual_batches([] if self._calls is None else self._calls.batches)
        with suppress(RuntimeError):  # a rank has failed, which others report
            if can_probe():
                return self._conclude(batches, files, began)
        return []

    def _conclude(self, batches: list[Batch], files: StepFiles | None, began: float) -> list[Forecast]:
        group = self._group
        assert group is not None
        units = units_of_calls(self._columns, batches, group.size())
        least_s = _least_of_all_ranks(batches, group, self._device)
        largest_bytes = max(max(unit.gradients.num_bytes, unit.parameters.num_bytes) for unit in units)
        if least_s is None:
            return []
        links = probe_shard_links(group, self._device, min(largest_bytes, MAX_PROBE_BYTES))
        if not self._strategy.is_global_zero or not self._steps:
            return []
        num_ranks, hooks = group.size(), dict.fromkeys([*predicted_shards(), self._plan.comm_hook])
        try:
            basis = basis_of_fit(
                self._plan,
                units,
                batches,
                self._steps,
                links,
                measure_shard_costs(
                    [hook for hook in hooks if hook is not None], largest_bytes, self._device, num_ranks
                ),
                measure_gather_cost(largest_bytes, self._device, num_ranks),
                num_ranks=num_ranks,
                least_s=least_s,
                device=self._device.type,
                shares_core=self._times.shares_core,
                slowdown=self._times.slowdown,
            )
        except ValueError:  # the compressor was not measured
            return []
        # A residual changes the time of a step too little to be recommended for speed.
        others = sharded_forecasts(basis, [hook for hook in hooks if not getattr(hook, "error_feedback", False)])
        if plan_of(self._strategy) is None:
            others = [other._replace(setting=f"CommOptModelParallel({other.setting})") for other in others]
        return publish(others, basis, files, began)

    def _plan_in_use(self) -> ShardedPlan:
        """Returns the plan of a strategy; Lightning's own strategy behaves like a plan without options."""
        plan = plan_of(self._strategy)
        return plan if isinstance(plan, ShardedPlan) else ShardedPlan()

    def _columns_of_units(self) -> list[list[Column]]:
        """Returns the parameters of each unit, none for a unit with one shard; no unit if predictions do not apply."""
        model = self._strategy.model
        assert model is not None
        try:
            columns = dict(sharded_units(model))
        except OptionError:  # torch is too old, or parameters are sharded in another way, too
            return []
        if not columns or any(replicas_and_shards(unit)[0] > 1 for unit in columns.values()):
            return []
        return [columns.get(unit, []) for unit in units_of(model)]


def _group_of(columns: Sequence[Column]) -> dist.ProcessGroup:
    """Returns the group of the ranks that have shards of a unit, whose parameters must not be gathered now."""
    mesh = columns[0].parameter.device_mesh
    group: dist.ProcessGroup = mesh.get_group(mesh.ndim - 1)
    return group


def recorder_for(
    trainer: Trainer, module: LightningModule, num_warmup_backwards: int
) -> PredictionRecorder | ShardedPredictionRecorder:
    """Returns the recorder for predictions of DDP, or of a model that FSDP2 shards."""
    assert trainer.strategy.model is not None
    kind = ShardedPredictionRecorder if units_of(trainer.strategy.model) else PredictionRecorder
    return kind(trainer, module, num_warmup_backwards)


def units_of_calls(columns_of: Sequence[Sequence[Column]], batches: Sequence[Batch], num_shards: int) -> list[Unit]:
    """Returns the units of a model, with the itemsize that their collectives have shown, or else that of float32."""
    units = []
    for index, columns in enumerate(columns_of):
        payloads = []
        for operation in ("reduce_scatter", "all_gather"):
            sent = [column for column in columns if operation == "all_gather" or column.is_trained()]
            numel = dict.fromkeys((True, False), 0)
            for column in sent:
                numel[column.is_compressed] += num_shards * column.width(num_shards)
            all_numel = sum(numel.values())
            calls = (
                [call for call in batches[0] if (call.operation, call.unit) == (operation, index)] if batches else []
            )
            itemsize = calls[0].num_bytes // all_numel if calls and all_numel else torch.float32.itemsize
            payloads.append(Payload(numel[True], numel[False], itemsize))
        units.append(Unit(columns[0].name if columns else "", *payloads))
    return units


def _least_of_all_ranks(
    batches: Sequence[Batch], group: dist.ProcessGroup, device: torch.device
) -> list[list[float]] | None:
    """Returns the shortest time of each of the `blocking` collectives over all ranks. All ranks must call it.

    It returns None if there are no batches, or if ranks have different numbers of batches or collectives.
    """
    own_s = [[call.seconds for call in blocking(batch)] for batch in batches]
    shape = (len(own_s), len(own_s[0]) if own_s else 0)
    ends = torch.tensor([*shape, *(-size for size in shape)], device=device)
    dist.all_reduce(ends, dist.ReduceOp.MIN, group=group)
    if not own_s or ends.tolist() != [*shape, *(-size for size in shape)]:
        return None
    least_s = torch.tensor(own_s, dtype=torch.float64, device=device)
    if shape[1]:
        dist.all_reduce(least_s, dist.ReduceOp.MIN, group=group)
    rows: list[list[float]] = least_s.tolist()
    return rows
