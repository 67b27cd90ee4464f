"""Basis: everything that one run shows for predictions of others, from its steps or from its directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from lightning_commopt.compressors import Compressor
from lightning_commopt.compressors.catalog import ready_compressors, recommended
from lightning_commopt.compressors.configs import without_imports
from lightning_commopt.cost.compressor_cost import CompressorCost, measure_costs
from lightning_commopt.cost.fitting import FittedParts, fit_to_step
from lightning_commopt.cost.from_steps import even_gradients, link_of_steps, without_interrupts, workload_of_steps
from lightning_commopt.cost.link_probe import ProbedSize
from lightning_commopt.cost.predict import Costs, Errors, Prediction, errors_of, predict
from lightning_commopt.cost.shared_core import NO_INTERRUPTS, Interrupts, competing_threads
from lightning_commopt.cost.workload import Gradient, Shape, Workload
from lightning_commopt.measure.files import RankRecords, read_run, steps_of_plan
from lightning_commopt.measure.forecasts import Forecast
from lightning_commopt.measure.link.from_steps import NUM_LAST_STEPS, SentStep
from lightning_commopt.measure.link.link import Link
from lightning_commopt.measure.plain import from_plain, load_json, write_json
from lightning_commopt.measure.record import StepRecord, is_diloco
from lightning_commopt.measure.runs.files import PREDICTION_FILE, RUN_FILE
from lightning_commopt.measure.runs.record import RunRecord
from lightning_commopt.measure.runs.settings import nested
from lightning_commopt.plan import CommPlan, OptionError

FORMAT = 1
"""Version of the JSON, raised when a key changes its meaning; new keys keep it."""

_KIND = "commopt prediction"


class _Numbers(NamedTuple):
    """The numbers of a `Basis`, which its file holds next to plan, workload, link and costs."""

    step_s: float
    arithmetic_factor: float
    scale: float


@dataclass(frozen=True, kw_only=True)
class Basis:
    """The workload, the link and the costs of compressors, fitted to one run."""

    plan: CommPlan  # the plan of the run
    workload: Workload
    link: Link
    costs: Costs  # each compressor's arithmetic on the run's device
    step_s: float  # the median of the run's steps
    arithmetic_factor: float = 1.0  # compressors took this many times as long in training as alone
    scale: float = 1.0  # measured over modelled step of `plan`; below 1 if the parts add up to more than the step

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
        probe: Sequence[ProbedSize] = (),
        sent: Sequence[SentStep] = (),
        **workload: Any,
    ) -> Basis:
        """Learns from some steps of a plan.

        Args:
            plan: the plan of these steps.
            ranks: the same steps of all ranks, or of some ranks.
            costs: arithmetic of compressors, measured outside of training; in processor time if ``slowdown`` is not 1.
            num_ranks: ranks in the run.
            gradients: measured by `GradientTimes`, as are the next three.
            comm_cpu_s: processor time of threads other than backward's.
            slowdown: factor by which other processes stretch arithmetic.
            interrupts: time that the kernel took of backward's core.
            step_s: time of a step that is not recorded; None for the median of these steps.
            probe: times of messages on the idle link. Without them the latency is assumed, and the rate behind a
                compressed run is extrapolated from its few bytes.
            sent: see `link_of_steps`.
            workload: see `workload_of_steps`.

        Raises:
            ValueError: the steps have no buckets, or too few.
        """
        costs = {hook: cost.slower(slowdown) for hook, cost in costs.items()}
        comm_cpu_s = comm_cpu_s * slowdown + interrupts.seconds
        if interrupts.in_threads:
            gradients = without_interrupts(gradients, ranks[0], interrupts.seconds)
        work = workload_of_steps(ranks, gradients, num_ranks=num_ranks, **workload)
        work = replace(work, num_others=competing_threads(slowdown))
        link = link_of_steps(
            ranks,
            num_ranks=num_ranks,
            comm_cpu_s=comm_cpu_s,
            cost=costs.get(plan.comm_hook),
            has_trees=work.device == "cuda",
            probe=probe,
            sent=sent,
        )
        step_s = step_s or median(record.totals.step_s for steps in ranks for record in steps)
        work, link, costs, factor = fit_to_step(FittedParts(work, link, costs), plan, step_s)
        fitted = cls(
            plan=plan, workload=work, link=link, costs=costs, step_s=step_s, arithmetic_factor=factor * slowdown
        )
        return replace(fitted, scale=step_s / fitted.predict(plan).step_s)

    def predict(self, plan: CommPlan, *, num_ranks: int | None = None) -> Prediction:
        """Predicts the median step under another plan; see `cost.predict.predict`.

        The run's own plan takes ``step_s`` on the same number of ranks.
        """
        prediction = predict(plan, self.workload, self.link, self.costs, num_ranks=num_ranks, fitted=self._fitted)
        times = ("step_s", "low_s", "high_s", "exposed_s")
        return replace(prediction, **{name: self.scale * getattr(prediction, name) for name in times})

    @cached_property
    def _fitted(self) -> tuple[CommPlan, Errors]:
        return self.plan, errors_of(self.plan, self.workload, self.link, self.costs, self.workload.num_ranks)

    def save(self, run_dir: Path, forecasts: Sequence[Forecast] = ()) -> None:
        """Writes the basis into the directory of its run, atomically, with the forecasts for verdicts."""
        plain = {
            "kind": _KIND,
            "format": FORMAT,
            "plan": self.plan.to_dict(),
            "workload": asdict(self.workload),
            "link": asdict(self.link),
            "costs": [cost.to_plain() for cost in self.costs.values()],
            "step_s": self.step_s,
            "arithmetic_factor": self.arithmetic_factor,
            "scale": self.scale,
            "forecasts": [list(forecast) for forecast in forecasts],
        }
        write_json(run_dir / PREDICTION_FILE, plain)

    @classmethod
    def load(cls, path: Path) -> Basis:
        """Reads a file of `save`; for errors see `load_json`."""

        def read(plain: dict[str, Any]) -> Basis:
            if "strategy" in plain:
                raise ValueError("it is the basis of predictions for FSDP2, which ShardedBasis.load reads")
            costs = map(CompressorCost.from_plain, plain["costs"])
            return cls(
                plan=CommPlan.from_dict(plain["plan"]),
                workload=from_plain(Workload, plain["workload"]),
                link=from_plain(Link, plain["link"]),
                costs={cost.compressor: cost for cost in costs},
                **from_plain(_Numbers, plain)._asdict(),
            )

        return load_json(path, _KIND, FORMAT, read)


def recommended_compressors() -> list[Compressor | None]:
    """Returns None, which stands for DDP's own average, and the compressors that verdicts may recommend."""
    ready = ready_compressors()
    return [None, *(ready[name] for name in recommended())]


def basis_of_run(run_dir: Path) -> Basis:
    """Returns the basis of predictions that a run provides.

    If `CommTimeMonitor` has written it at the end of a fit, it is read. Otherwise it is fitted to the last 200 steps of
    all ranks, or to those since the plan has changed. Then gradients are assumed to become ready evenly between two
    buckets, and compressors are measured on this machine if the run was on CPU. ``run_dir`` is the directory that has
    ``comm_time``; its files import nothing, see `without_imports`.

    Raises:
        FileNotFoundError: the run has no records.
        ValueError: they have no buckets, or too few; or its comm hook is not from this package; or it is a run of
            FSDP2.
    """
    path = run_dir / PREDICTION_FILE
    with without_imports():  # the run may come from somebody else, whose files must not run code here
        if path.exists():
            return Basis.load(path)
        ranks = read_run(run_dir)
        if _is_sharded(ranks[0].steps):
            raise ValueError(
                f"{run_dir}: its gradients travel in FSDP2's reduce-scatters, so a prediction needs {PREDICTION_FILE},"
                " which CommTimeMonitor writes at the end of a fit with torch 2.9 or newer, and which is missing here;"
                " commopt summary shows what its collectives cost"
            )
        if is_diloco(str(ranks[0].header.get("comm_hook"))):
            raise ValueError(
                f"{run_dir}: it exchanges weights (CommOptDiLoCo), but only steps with DDP's buckets are predicted;"
                " what sync_every would save is predicted from a run of DDP"
            )
        plan = _plan_of(run_dir, ranks[0])
    steps = list(zip(*list(steps_of_plan(ranks).values())[-NUM_LAST_STEPS:], strict=True)) or [()]
    num_ranks = ranks[0].world_size
    is_cpu = ranks[0].header.get("device") == "cpu"
    shapes = {name: Shape(tuple(shape), itemsize) for name, shape, itemsize in ranks[0].header.get("parameters", ())}
    costs: Costs = {}
    if is_cpu and steps[0] and steps[0][-1].layout:
        hooks = dict.fromkeys([plan.comm_hook, *recommended_compressors()])
        costs = measure_costs(hooks, even_gradients(steps[0], shapes), torch.device("cpu"), num_ranks)
    try:
        device = "cpu" if is_cpu else "cuda"
        return Basis.of_steps(plan, steps, costs, num_ranks=num_ranks, device=device, shapes=shapes)
    except ValueError as error:
        raise ValueError(f"{run_dir}: {error}") from None


def _is_sharded(steps: Sequence[StepRecord]) -> bool:
    """Returns whether gradients were reduced to shards, which compressors do with messages that name their source."""
    issued = (collective for record in steps for collective in record.collectives)
    return not any(record.buckets for record in steps) and any(
        collective.operation == "reduce_scatter" or collective.source.endswith("reduce-scatter")
        for collective in issued
    )


def _plan_of(run_dir: Path, records: RankRecords) -> CommPlan:
    """Returns the plan of a run's last steps: from the steps, else from the run's record, else from its comm hook."""
    if (options := records.header.get("plan")) is not None:
        if not isinstance(options, dict):
            raise ValueError(f"{records.path} is damaged: a plan must be a JSON object, got {options!r}")
        return CommPlan.from_dict(options)
    if (run_dir / RUN_FILE).exists() and (options := RunRecord.load(run_dir).settings.plan):
        return CommPlan.from_dict(nested(options))
    name = str(records.header.get("comm_hook", "none"))
    try:
        return CommPlan(comm_hook=name)  # type: ignore[arg-type]
    except OptionError:
        raise ValueError(
            f"{run_dir}: its comm hook, {name!r}, is not from lightning_commopt, so its cost is unknown"
        ) from None
