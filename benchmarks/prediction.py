"""How far predictions of step times are off: of every plan, model and link of the lab, from ONE run of another plan.

Makes hosts with a limited rate on this machine (`lightning_commopt.launch.lab`), one rank on each, every rank on a core
of its own with one thread. For each model and link one job trains under all plans, which take turns, A B C A B C, and
records every step as `CommTimeMonitor` does. Then the steps of one plan (``--base``), 20 a turn, are all that the model
may see: it predicts the median step of every other plan, with an interval. Printed are the mean absolute error, the
share of measured medians inside the intervals, and the noise: by how much the medians of a plan's turns differ from
that of all its steps. "Of sync" is the error that is left where forward and backward are not predicted, but take as
long as they did with the plan itself. With ``--num-hosts 2 4`` the run on two hosts predicts those on four as well.

python benchmarks/prediction.py --output benchmarks/results/prediction_HARDWARE_DATE.json
python benchmarks/prediction.py --models mlp --rates 1gbit --num-plans 6    # quick
"""

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path
from statistics import fmean, median
from typing import Any

from command_line import need_lab
from rank_results import run_in_lab
from results_file import settings_of, write_result
from rich.console import Console
from rich.table import Table

from lightning_commopt import CommPlan
from lightning_commopt.cost.basis import Basis
from lightning_commopt.cost.compressor_cost import CompressorCost
from lightning_commopt.cost.shared_core import Interrupts
from lightning_commopt.cost.workload import Gradient
from lightning_commopt.measure.observer import BucketInfo
from lightning_commopt.measure.record import StepRecord

QUIET = (0.03, 0.1)
"""Noise of plans that are shown apart: the error of what was hardly disturbed."""

HOOKS: tuple[Any, ...] = (
    *(None, "bf16", "int8", "int4"),
    *({"name": name, "matrix_rank": r} for name in ("powersgd", "alternating_powersgd") for r in (1, 4)),
)
CAPS_MB = (None, 5, 1, 100, 2)
"""With every hook; the first plan, without a hook or a cap, is what DDP does by itself."""


def plans() -> list[dict[str, Any]]:
    """Returns all plans, those that differ most first."""
    pairs = [{"comm_hook": hook, "bucket_cap_mb": cap} for cap in CAPS_MB for hook in HOOKS]
    return [{name: value for name, value in pair.items() if value is not None} for pair in pairs]


def run_job(arguments: argparse.Namespace, model: str, rate: str, num_hosts: int) -> list[dict[str, Any]]:
    """Trains under all plans in one lab; returns what each rank recorded."""
    settings = {"model": model, "plans": plans()[: arguments.num_plans]}
    settings |= {"budget_s": arguments.budget_s, "num_turns": arguments.num_turns, "base": arguments.base}
    words = [str(Path(__file__).with_name("prediction_job.py")), json.dumps(settings)]
    return run_in_lab(num_hosts, rate, words, arguments.timeout_s)


def all_turns(ranks: list[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    """Returns the turns of a plan as one, on each rank: all steps, and medians, for interrupts means, of the rest."""
    merged = []
    for turns in (rank["runs"][number]["turns"] for rank in ranks):
        medians = {name: median(turn[name] for turn in turns) for name in ("comm_cpu_s", "slowdown")}
        rows = zip(*(turn["gradients"] for turn in turns), strict=True)
        gradients = [[*same[0][:-1], median(one[-1] for one in same)] for same in rows]
        interrupts = [fmean(turn["interrupts"][0] for turn in turns), turns[0]["interrupts"][1]]
        steps = [step for turn in turns for step in turn["steps"]]
        merged.append(turns[0] | medians | {"steps": steps, "gradients": gradients, "interrupts": interrupts})
    return merged


def median_step_s(turn: dict[str, Any]) -> float:
    """Returns the median step of one rank."""
    return median(step["step_s"] for step in turn["steps"])


def noise(ranks: list[dict[str, Any]], number: int) -> float:
    """Returns by how much the median steps of a plan's turns differ from that of all its steps, in the mean."""
    whole_s = median_step_s(all_turns(ranks, number)[0])
    return fmean(abs(median_step_s(turn) / whole_s - 1) for turn in ranks[0]["runs"][number]["turns"])


def learn(ranks: list[dict[str, Any]], base: int) -> Basis:
    """Returns what the steps of one plan show of the model, the link and the compressors."""
    plan, turns = CommPlan.from_dict(ranks[0]["runs"][base]["plan"]), all_turns(ranks, base)
    costs = {cost.compressor: cost for cost in map(CompressorCost.from_plain, ranks[0]["costs"])}
    buckets = (BucketInfo(index, size, tuple(names), last) for index, size, names, last in turns[0]["layout"])
    layout = {bucket.index: bucket for bucket in buckets}
    return Basis.of_steps(
        plan,
        [[StepRecord.from_dict(step, layout) for step in turn["steps"]] for turn in turns],
        costs,
        num_ranks=len(ranks),
        gradients=[Gradient(name, tuple(shape), size, at) for name, shape, size, at in turns[0]["gradients"]],
        shares_core=turns[0]["shares_core"],
        comm_cpu_s=median(turn["comm_cpu_s"] for turn in turns),
        slowdown=median(turn["slowdown"] for turn in turns),
        interrupts=Interrupts(fmean(turn["interrupts"][0] for turn in turns), turns[0]["interrupts"][1]),
    )


def with_arithmetic_of(basis: Basis, turns: list[dict[str, Any]], own: list[dict[str, Any]]) -> Basis:
    """Returns the basis of ``turns`` with the forward and backward of another plan, ``own``; both by rank."""
    factor = median(rank["gradients"][-1][-1] for rank in own) / median(rank["gradients"][-1][-1] for rank in turns)
    gradients = tuple(one._replace(ready_s=factor * one.ready_s) for one in basis.workload.gradients)
    workload = dataclasses.replace(
        basis.workload,
        gradients=gradients,
        forward_s=median(step["forward_s"] for rank in own for step in rank["steps"]),
        backward_s=factor * basis.workload.backward_s,
    )
    return dataclasses.replace(basis, workload=workload)


def on_shared_cores(basis: Basis, factor: float) -> Basis:
    """Returns the basis where each core has ``factor`` ranks: what they compute takes as much longer."""
    costs = {hook: cost.slower(factor) for hook, cost in basis.costs.items()}
    cpu_s = {name: factor * getattr(basis.link, name) for name in ("cpu_s_per_byte", "cpu_s_per_message")}
    link = dataclasses.replace(basis.link, **cpu_s)
    times = ("data_s", "forward_s", "backward_s", "rest_s", "straggler_s")
    gradients = tuple(one._replace(ready_s=factor * one.ready_s) for one in basis.workload.gradients)
    slower = {name: factor * getattr(basis.workload, name) for name in times}
    workload = dataclasses.replace(basis.workload, gradients=gradients, **slower)
    return dataclasses.replace(basis, workload=workload, costs=costs, link=link)


def compare(jobs: list[dict[str, Any]], base: int) -> list[dict[str, Any]]:
    """Returns a row for every plan, model, link and number of hosts but the runs that were learned from."""
    rows = []
    for job in jobs:
        first = next(
            other
            for other in jobs
            if (other["model"], other["rate"]) == (job["model"], job["rate"]) and len(other["ranks"]) == 2
        )
        basis = learn(first["ranks"], base)
        num_ranks = len(job["ranks"])
        is_other_world = num_ranks != len(first["ranks"])
        if is_other_world:
            basis = on_shared_cores(basis, max(1.0, num_ranks / job["num_cores"]))
        for number, run in enumerate(job["ranks"][0]["runs"]):
            if number == base and not is_other_world:
                continue
            plan = CommPlan.from_dict(run["plan"])
            found = basis.predict(plan, num_ranks=num_ranks)
            own = all_turns(job["ranks"], number)
            measured_s = median_step_s(own[0])
            error_of_sync = None
            if not is_other_world:
                known = with_arithmetic_of(basis, all_turns(first["ranks"], base), own)
                error_of_sync = known.predict(plan).step_s / measured_s - 1
            rows.append(
                {
                    **{name: job[name] for name in ("model", "rate")},
                    "num_hosts": num_ranks,
                    "plan": plan.name,
                    "measured_s": measured_s,
                    "predicted_s": found.step_s,
                    "low_s": found.low_s,
                    "high_s": found.high_s,
                    "error": found.step_s / measured_s - 1,
                    "error_of_sync": error_of_sync,
                    "backward_s": median(rank["gradients"][-1][-1] for rank in own),
                    "is_inside": found.low_s <= measured_s <= found.high_s,
                    "noise": noise(job["ranks"], number),
                }
            )
    return rows


def in_percent(group: list[dict[str, Any]]) -> list[str]:
    """Returns what is printed of some rows: errors, the share inside the intervals, and the noise."""
    errors = [row["error"] for row in group]
    of_sync = [abs(row["error_of_sync"]) for row in group if row["error_of_sync"] is not None]
    signed = [f"{100 * error:+.1f} %" for error in (fmean(errors), max(errors, key=abs))]
    inside, disturbed = (f"{100 * fmean(row[name] for row in group):.1f} %" for name in ("is_inside", "noise"))
    known = f"{100 * fmean(of_sync):.1f} %" if of_sync else ""
    return [f"{100 * fmean(map(abs, errors)):.1f} %", *signed, known, inside, disturbed]


def print_tables(rows: list[dict[str, Any]], *, shows_plans: bool) -> None:
    """Prints a row for each model, link and number of hosts, and for each plan if wanted."""
    console = Console(width=max(120, Console().width))
    if shows_plans:
        table = Table("model", "link", "hosts", "plan", "measured s", "predicted s", "95 %", "error")
        for row in rows:
            interval = f"{row['low_s']:.3f}-{row['high_s']:.3f}{'' if row['is_inside'] else ' !'}"
            times = (f"{row['measured_s']:.3f}", f"{row['predicted_s']:.3f}", interval, f"{100 * row['error']:+.1f} %")
            table.add_row(row["model"], row["rate"], str(row["num_hosts"]), row["plan"], *times)
        console.print(table)
    names = ("mean |error|", "mean error", "largest", "of sync", "inside 95 %", "noise")
    table = Table("model", "link", "hosts", "plans", *names)
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["rate"], row["num_hosts"]), []).append(row)
    for num_hosts in sorted({row["num_hosts"] for row in rows}):
        groups["all", "all", num_hosts] = [row for row in rows if row["num_hosts"] == num_hosts]
    for limit in QUIET:
        groups[f"noise up to {limit:.0%}", "all", "all"] = [row for row in rows if row["noise"] <= limit]
    for (model, rate, num_hosts), group in groups.items():
        if group:
            table.add_row(model, rate, str(num_hosts), str(len(group)), *in_percent(group))
    console.print(table)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["mlp", "vit", "mobilenet"], choices=["mlp", "vit", "mobilenet"])
    parser.add_argument("--rates", nargs="+", default=["100mbit", "300mbit", "1gbit", "unlimited"])
    parser.add_argument("--num-hosts", nargs="+", type=int, default=[2], help="the first must be 2")
    parser.add_argument("--num-plans", type=int, default=len(plans()))
    parser.add_argument("--base", type=int, default=0, help="number of the plan that is learned from")
    parser.add_argument("--budget-s", type=float, default=4.0, help="for the timed steps of a plan")
    parser.add_argument("--num-turns", type=int, default=3, help="of each plan")
    parser.add_argument("--timeout-s", type=float, default=3600, help="for one job")
    parser.add_argument("--raw", type=Path, help="folder for the steps of every job; those in it are not run again")
    parser.add_argument("--show-plans", action="store_true")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def main() -> None:
    """Runs the jobs, predicts, prints and stores the tables."""
    arguments = parse()
    need_lab()
    load, jobs = os.getloadavg()[0], []
    for model in arguments.models:
        for rate in arguments.rates:
            for num_hosts in arguments.num_hosts:
                path = None if arguments.raw is None else arguments.raw / f"{model}_{rate}_{num_hosts}.json"
                if path is not None and path.exists():
                    jobs.append(json.loads(path.read_text()))
                    continue
                ranks = run_job(arguments, model, rate, num_hosts)
                jobs.append({"model": model, "rate": rate, "ranks": ranks, "num_cores": len(os.sched_getaffinity(0))})
                if path is not None:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(json.dumps(jobs[-1]))
                print(f"{model}, {rate}, {num_hosts} hosts: done", file=sys.stderr, flush=True)
    rows = compare(jobs, arguments.base)
    print_tables(rows, shows_plans=arguments.show_plans)
    if arguments.output:
        write_result(arguments.output, {"settings": settings_of(arguments, "raw"), "rows": rows}, load)


if __name__ == "__main__":
    main()
