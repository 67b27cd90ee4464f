"""Basis: everything that one run shows for predictions of others; to JSON and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from lightning_commopt.cost.calibrate import calibrated
from lightning_commopt.cost.compressor_cost import CompressorCost
from lightning_commopt.cost.from_steps import link_of_steps, workload_of_steps
from lightning_commopt.cost.link import Link
from lightning_commopt.cost.predict import Costs, Prediction, predict
from lightning_commopt.cost.workload import Gradient, Workload
from lightning_commopt.measure.forecast import Forecast
from lightning_commopt.measure.link.bench_result import load_json
from lightning_commopt.measure.observer import BucketInfo
from lightning_commopt.measure.record import StepRecord
from lightning_commopt.measure.runs.files import PREDICTION_FILE
from lightning_commopt.measure.runs.record import write_json
from lightning_commopt.plan import CommPlan

FORMAT = 1
"""Version of the JSON, raised when a key changes its meaning; new keys keep it."""

_KIND = "commopt prediction"


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
        layout: Mapping[int, BucketInfo],
        costs: Costs,
        *,
        num_ranks: int,
        gradients: Sequence[Gradient] = (),
        comm_cpu_s: float = 0.0,
        slowdown: float = 1.0,
        burst_bytes: float = 0.0,
        **workload: Any,
    ) -> Basis:
        """Learns from some steps of a plan.

        ``gradients``, ``comm_cpu_s`` and ``slowdown`` are those of `GradientTimes`; where ``slowdown`` is not 1,
        ``costs`` are in processor time. For the others see `workload_of_steps` and `link_of_steps`.

        Raises:
            ValueError: the steps have no buckets, or too few.
        """
        costs = {hook: cost.slower(slowdown) for hook, cost in costs.items()}
        comm_cpu_s *= slowdown
        found = workload_of_steps(ranks, layout, gradients, num_ranks=num_ranks, **workload)
        found = replace(found, num_others=slowdown - 1)
        link = link_of_steps(
            ranks,
            num_ranks=num_ranks,
            comm_cpu_s=comm_cpu_s,
            cost=costs.get(plan.comm_hook),
            has_trees=found.device == "cuda",
            burst_bytes=burst_bytes,
        )
        step_s = median(record.totals.step_s for steps in ranks for record in steps)
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
            "workload": self.workload.to_plain(),
            "link": self.link.to_plain(),
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
                workload=Workload.from_plain(plain["workload"]),
                link=Link.from_plain(plain["link"]),
                costs={cost.compressor: cost for cost in costs},
                step_s=float(plain["step_s"]),
            )

        return load_json(path, _KIND, FORMAT, read)
