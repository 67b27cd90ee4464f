"""Basis: everything that one run shows for predictions of others, from its steps or from its directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from lightning_commopt.compressors import Compressor
from lightning_commopt.compressors.catalog import ready_compressors, recommended
from lightning_commopt.cost.compressor_cost import CompressorCost, measure_costs
from lightning_commopt.cost.from_steps import even_gradients, link_of_steps, without_interrupts, workload_of_steps
from lightning_commopt.cost.gradient_times import NO_INTERRUPTS, Interrupts
from lightning_commopt.cost.predict import Costs, Prediction, fixed_s, outcome_of, predict
from lightning_commopt.cost.workload import Gradient, Link, Workload
from lightning_commopt.measure.files import RankRecords, common_steps, read_run
from lightning_commopt.measure.link.from_steps import NUM_LAST_STEPS
from lightning_commopt.measure.plain import from_plain, load_json, write_json
from lightning_commopt.measure.record import StepRecord
from lightning_commopt.measure.runs.files import PREDICTION_FILE, RUN_FILE
from lightning_commopt.measure.runs.record import RunRecord
from lightning_commopt.measure.runs.settings import nested
from lightning_commopt.measure.verdict import Forecast
from lightning_commopt.plan import CommPlan, OptionError

FORMAT = 1
"""Version of the JSON, raised when a key changes its meaning; new keys keep it."""

_KIND = "commopt prediction"

_MAX_FACTOR = 4.0
_NUM_HALVINGS = 16
_EXPOSED_SHARE = 0.02


@dataclass(frozen=True, kw_only=True)
class Basis:
    """What a run shows."""

    plan: CommPlan  # that it trained with
    workload: Workload  # that it computed
    link: Link  # between its ranks, calibrated to its steps
    costs: Costs  # of compressors on its device
    step_s: float  # median of its steps

    @classmethod
    def of_steps(
        cls,
        plan: CommPlan,
        ranks: Sequence[Sequence[StepRecord]],
        costs: Costs,
        *,
        num_ranks: int,
        gradients: Sequence[Gradient] = (),
        comm_cpu_s: float = 0.0,
        slowdown: float = 1.0,
        interrupts: Interrupts = NO_INTERRUPTS,
        step_s: float | None = None,
        **workload: Any,
    ) -> Basis:
        """Learns from some steps of a plan.

        ``gradients``, ``comm_cpu_s``, ``slowdown`` and ``interrupts`` are those of `GradientTimes`; where ``slowdown``
        is not 1, ``costs`` are in processor time. A step takes ``step_s``; None for the median of these steps. For the
        others see `workload_of_steps` and `link_of_steps`.

        Raises:
            ValueError: the steps have no buckets, or too few.
        """
        costs = {hook: cost.slower(slowdown) for hook, cost in costs.items()}
        comm_cpu_s = comm_cpu_s * slowdown + interrupts.seconds
        if interrupts.in_threads:
            gradients = without_interrupts(gradients, ranks[0], interrupts.seconds)
        found = workload_of_steps(ranks, gradients, num_ranks=num_ranks, **workload)
        found = replace(found, num_others=slowdown - 1)
        link = link_of_steps(
            ranks,
            num_ranks=num_ranks,
            comm_cpu_s=comm_cpu_s,
            cost=costs.get(plan.comm_hook),
            has_trees=found.device == "cuda",
        )
        step_s = step_s or median(record.totals.step_s for steps in ranks for record in steps)
        link = calibrated(found, link, costs, plan, step_s)
        return cls(plan=plan, workload=found, link=link, costs=costs, step_s=step_s)

    def predict(self, plan: CommPlan, *, num_ranks: int | None = None) -> Prediction:
        """Predicts a step under another plan; see `cost.predict.predict`."""
        return predict(plan, self.workload, self.link, self.costs, num_ranks=num_ranks)

    def save(self, run_dir: Path, forecasts: Sequence[Forecast] = ()) -> None:
        """Writes it into the directory of its run, atomically, with what was predicted for verdicts."""
        plain = {
            "kind": _KIND,
            "format": FORMAT,
            "plan": self.plan.to_dict(),
            "workload": asdict(self.workload),
            "link": asdict(self.link),
            "costs": [cost.to_plain() for cost in self.costs.values()],
            "step_s": self.step_s,
            "forecasts": [list(forecast) for forecast in forecasts],
        }
        write_json(run_dir / PREDICTION_FILE, plain)

    @classmethod
    def load(cls, path: Path) -> Basis:
        """Reads a file of `save`; for errors see `load_json`."""

        def read(plain: dict[str, Any]) -> Basis:
            costs = map(CompressorCost.from_plain, plain["costs"])
            return cls(
                plan=CommPlan.from_dict(plain["plan"]),
                workload=from_plain(Workload, plain["workload"]),
                link=from_plain(Link, plain["link"]),
                costs={cost.compressor: cost for cost in costs},
                step_s=float(plain["step_s"]),
            )

        return load_json(path, _KIND, FORMAT, read)


def calibrated(workload: Workload, link: Link, costs: Costs, plan: CommPlan, measured_step_s: float) -> Link:
    """Returns the link with another rate, such that the step of ``plan`` takes as long as it did.

    The rate changes by a factor of 4 at most, and only where the step waits for gradient sync; else the link does not
    show in it. All arguments are of one run, ``link`` from its buckets.
    """
    sync_s = measured_step_s - fixed_s(workload, workload.num_ranks)

    def with_factor(factor: float) -> Link:
        return replace(link, s_per_byte=factor * link.s_per_byte)

    def is_slower(factor: float) -> bool:
        return outcome_of(plan, workload, with_factor(factor), costs, workload.num_ranks).end_s > sync_s

    usual = outcome_of(plan, workload, link, costs, workload.num_ranks)
    if usual.end_s - usual.backward_s < _EXPOSED_SHARE * measured_step_s:
        return link
    low, high = 1 / _MAX_FACTOR, _MAX_FACTOR
    if is_slower(low) or not is_slower(high):
        return link
    for _ in range(_NUM_HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if is_slower(middle) else (middle, high)
    return with_factor(high)


def recommended_compressors() -> list[Compressor | None]:
    """Returns the average of DDP, and the compressors that are recommended at all."""
    ready = ready_compressors()
    return [None, *(ready[name] for name in recommended())]


def basis_of_run(run_dir: Path) -> Basis:
    """Returns what a run shows for predictions.

    Without the file that `CommTimeMonitor` writes at the end of a fit, it is made of the last 200 steps of all ranks:
    gradients become ready evenly between two buckets then, and compressors are measured on this machine if the run was
    on CPU. ``run_dir`` is the directory that has ``comm_time``.

    Raises:
        FileNotFoundError: the run has no records.
        ValueError: they have no buckets, or too few; or its comm hook is none of ours.
    """
    path = run_dir / PREDICTION_FILE
    if path.exists():
        return Basis.load(path)
    ranks = read_run(run_dir)
    steps = list(zip(*list(common_steps(ranks).values())[-NUM_LAST_STEPS:], strict=True)) or [()]
    num_ranks, plan = ranks[0].world_size, _plan_of(run_dir, ranks[0])
    is_cpu = ranks[0].header.get("device") == "cpu"
    costs: Costs = {}
    if is_cpu and steps[0] and steps[0][-1].layout:
        hooks = dict.fromkeys([plan.comm_hook, *recommended_compressors()])
        costs = measure_costs(hooks, even_gradients(steps[0]), torch.device("cpu"), num_ranks)
    try:
        return Basis.of_steps(plan, steps, costs, num_ranks=num_ranks, device="cpu" if is_cpu else "cuda")
    except ValueError as error:
        raise ValueError(f"{run_dir}: {error}") from None


def _plan_of(run_dir: Path, records: RankRecords) -> CommPlan:
    """Returns the plan of a run from its record, or from the name of its comm hook."""
    if (run_dir / RUN_FILE).exists():
        options = nested(RunRecord.load(run_dir).settings).get("plan")
        if options:
            return CommPlan.from_dict({name: value for name, value in options.items() if value is not None})
    name = str(records.header.get("comm_hook", "none"))
    try:
        return CommPlan(comm_hook=name)  # type: ignore[arg-type]
    except OptionError:
        raise ValueError(f"{run_dir}: its comm hook, {name!r}, is none of ours, so its cost is not known") from None
