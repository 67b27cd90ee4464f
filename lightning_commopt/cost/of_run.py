"""The basis of predictions in a run's directory: the file that its fit wrote, or the steps of one that was cut off."""

from __future__ import annotations

from pathlib import Path

import torch

from lightning_commopt.cost.basis import Basis
from lightning_commopt.cost.compressor_cost import measure_costs
from lightning_commopt.cost.forecasts import recommended_compressors
from lightning_commopt.cost.from_steps import even_gradients
from lightning_commopt.cost.predict import Costs
from lightning_commopt.measure.files import RankRecords, read_run
from lightning_commopt.measure.link.from_steps import NUM_LAST_STEPS
from lightning_commopt.measure.runs.files import PREDICTION_FILE, RUN_FILE
from lightning_commopt.measure.runs.record import RunRecord
from lightning_commopt.measure.runs.settings import nested
from lightning_commopt.plan import CommPlan, OptionError


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
    by_step = [{record.step: record for record in records.steps} for records in ranks]
    common = sorted(set.intersection(*map(set, by_step)))[-NUM_LAST_STEPS:]
    steps = [[records[step] for step in common] for records in by_step]
    num_ranks, layout = ranks[0].world_size, ranks[0].layouts[-1] if ranks[0].layouts else {}
    plan = _plan_of(run_dir, ranks[0])
    is_cpu = ranks[0].header.get("device") == "cpu"
    costs: Costs = {}
    if is_cpu and layout and steps[0]:
        hooks = dict.fromkeys([plan.comm_hook, *recommended_compressors()])
        costs = measure_costs(hooks, even_gradients(steps[0], layout), torch.device("cpu"), num_ranks)
    device = "cpu" if is_cpu else "cuda"
    try:
        return Basis.of_steps(plan, steps, layout, costs, num_ranks=num_ranks, device=device)
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
