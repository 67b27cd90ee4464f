"""What a run with each compressor predicts of every other one, as `CommTimeMonitor` leaves it: the matrix of errors.

Two ranks fit a model with one comm hook after another, in turns, each in a fit of its own, on two hosts of the network
lab (each rank on a core of its own) and unpinned on this machine ("shared"). Each fit is then asked, from its files
alone and as ``commopt predict`` asks it, for the median step with every hook. A prediction is compared with the median
of the turns' medians; that of the run's own hook with the run itself. A recommendation of the run's summary counts as
wrong if each fit with that hook was slower than each fit with the run's own. Each fit is also asked for every hook on
each other link of the lab that has a rate, as ``commopt predict --link`` asks it.

python benchmarks/prediction_matrix.py --output benchmarks/results/prediction_matrix_HARDWARE_DATE.json
python benchmarks/prediction_matrix.py --models mlp --links shared --num-turns 1    # quick
"""

import argparse
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from statistics import fmean, median
from typing import Any

from results_file import settings_of, write_result
from rich.console import Console
from rich.table import Table

from lightning_commopt import CommPlan
from lightning_commopt.commands.predict.outlook import missing_costs
from lightning_commopt.compressors.registry import compressor_name
from lightning_commopt.cost.basis import Basis, basis_of_run
from lightning_commopt.cost.candidates import forecasts
from lightning_commopt.launch.lab import NetLab, parse_rate, why_not
from lightning_commopt.launch.process import run_ranks
from lightning_commopt.measure.files import common_steps, read_run
from lightning_commopt.measure.summary import summarize_run
from lightning_commopt.measure.verdict import verdict

HOOKS: dict[str, Any] = {
    "none": None,
    **{name: name for name in ("bf16", "int8", "int4")},
    **{name: {"name": name, "matrix_rank": 1, "start_step": 2} for name in ("powersgd", "alternating_powersgd")},
}
SHARED = "shared"
_NUM_LEFT_OUT = 15  # first steps of a fit, in which DDP lays out its buckets and the callback times gradients


def run_fits(settings: dict[str, Any], link: str, timeout_s: float) -> None:
    """Runs all fits of one model on one link."""
    command = [sys.executable, str(Path(__file__).with_name("prediction_matrix_job.py")), json.dumps(settings)]
    if link != SHARED:
        with NetLab(2, link) as lab:
            lab.run(command, pin_to_cores=True, timeout_s=timeout_s)
        return
    variables = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0", "OMP_NUM_THREADS": "1"}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29631"}
    programs = [(command, {**os.environ, **variables, "RANK": rank, "LOCAL_RANK": rank}) for rank in ("0", "1")]
    run_ranks(programs, on_output=lambda rank, output: None, timeout_s=timeout_s)


def measured_s(run_dir: Path) -> float:
    """Returns the median step of a fit, over both ranks."""
    steps = list(common_steps(read_run(run_dir)).values())[_NUM_LEFT_OUT:]
    return median(record.totals.step_s for records in steps for record in records)


def recommended_hooks(run_dir: Path, basis: Basis) -> set[str]:
    """Returns the names of the comm hooks that the summary of a run calls faster."""
    hook = basis.plan.comm_hook
    about: dict[str, Any] = {
        "comm_hook": "none" if hook is None else compressor_name(hook),
        "is_lossy": hook is not None,
    }
    metrics = summarize_run(run_dir)[0].metrics
    texts = verdict(metrics, world_size=2, forecasts=forecasts(basis), **about).recommendations
    found = (re.match(r'comm_hook="(\w+)".* times as fast', text) for text in texts)
    return {match[1] for match in found if match is not None}


def rows_of(
    folder: Path, about: dict[str, Any], num_turns: int, *, elsewhere: tuple[Path, str] | None = None
) -> Iterable[dict[str, Any]]:
    """Yields a row for each fit and each hook that it predicts, on the folder and link of ``elsewhere`` if given."""
    measured, rate = elsewhere or (folder, None)
    times_s = {name: [measured_s(measured / f"{name}_{turn}") for turn in range(num_turns)] for name in HOOKS}
    plans = {name: CommPlan(comm_hook=hook) for name, hook in HOOKS.items()}
    for own in HOOKS:
        for turn in range(num_turns):
            run_dir = folder / f"{own}_{turn}"
            basis = basis_of_run(run_dir)
            hooks, basis = recommended_hooks(run_dir, basis), with_all_costs(basis, plans)
            if (bits_per_s := parse_rate(rate)) is not None:
                hooks, basis = set(), replace(basis, link=basis.link.at_rate(bits_per_s))
            for name, plan in plans.items():
                found = basis.predict(plan)
                truth_s = times_s[own][turn] if name == own and rate is None else median(times_s[name])
                yield {
                    **about,
                    "learned_from": own,
                    "turn": turn,
                    "hook": name,
                    "measured_s": truth_s,
                    "turns_s": times_s[name],
                    "predicted_s": found.step_s,
                    "low_s": found.low_s,
                    "high_s": found.high_s,
                    "is_inside": found.low_s <= truth_s <= found.high_s,
                    "is_recommended": name in hooks,
                    "is_slower": min(times_s[name]) > max(times_s[own]),
                }


def with_all_costs(basis: Basis, plans: dict[str, CommPlan]) -> Basis:
    """Returns a basis with the compressors that the fit did not measure, as ``commopt predict`` measures them."""
    more = missing_costs(basis, [plan.comm_hook for plan in plans.values()])
    return replace(basis, costs={**basis.costs, **more})


def print_tables(rows: list[dict[str, Any]], where: str) -> None:
    """Prints predicted over measured for each pair of hooks, and how each row did."""
    console = Console(width=140)
    title = f"predicted over measured {where}, geometric mean over links, models and turns"
    table = Table("learned from", *HOOKS, title=title)
    for own in HOOKS:
        cells = []
        for name in HOOKS:
            logs = [_log_ratio(row) for row in rows if (row["learned_from"], row["hook"]) == (own, name)]
            cells.append(f"{math.exp(fmean(logs)):.2f}")
        table.add_row(own, *cells)
    console.print(table)
    summary = Table("", "predictions", "inside 95 %", "typical factor", "largest factor", "beyond 1.6", "wrong advice")
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        for key in (f"from {row['learned_from']}", f"{row['model']}, {row['link']}", "all"):
            groups.setdefault(key, []).append(row)
    for key, group in groups.items():
        factors = [math.exp(abs(_log_ratio(row))) for row in group]
        summary.add_row(
            key,
            str(len(group)),
            f"{100 * fmean(row['is_inside'] for row in group):.0f} %",
            f"{math.exp(fmean(map(math.log, factors))):.2f}",
            f"{max(factors):.2f}",
            str(sum(factor > 1.6 for factor in factors)),
            str(sum(row["is_recommended"] and row["is_slower"] for row in group)),
        )
    console.print(summary)
    for row in rows:
        if row["is_recommended"] and row["is_slower"]:
            console.print(f"wrong advice: {row}")


def _log_ratio(row: dict[str, Any]) -> float:
    return math.log(row["predicted_s"] / row["measured_s"])


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["mlp", "vit"], choices=["mlp", "vit"])
    parser.add_argument("--links", nargs="+", default=[SHARED, "unlimited", "1gbit", "100mbit"])
    parser.add_argument("--num-turns", type=int, default=2)
    parser.add_argument("--num-steps", type=int, default=120, help="of a fit; 50 at most at 100 Mbit/s")
    parser.add_argument("--timeout-s", type=float, default=1800, help="for all fits of a model on a link")
    parser.add_argument("--folder", type=Path, help="for the fits; what is there is not run again")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def main() -> None:
    """Runs the fits, predicts, prints and stores the tables."""
    arguments = parse()
    reason = why_not()
    if reason is not None and set(arguments.links) != {SHARED}:
        sys.exit(reason)
    load = os.getloadavg()[0]
    rows: list[dict[str, Any]] = []
    elsewhere: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        for model in arguments.models:
            for link in arguments.links:
                folder = (arguments.folder or Path(temporary)).absolute() / f"{model}_{link}"
                settings = {"model": model, "hooks": HOOKS, "folder": str(folder), "num_turns": arguments.num_turns}
                settings["num_steps"] = min(arguments.num_steps, 50) if link == "100mbit" else arguments.num_steps
                if not folder.exists():
                    run_fits(settings, link, arguments.timeout_s)
                    print(f"{model}, {link}: done", file=sys.stderr, flush=True)
                rows += rows_of(folder, {"model": model, "link": link}, arguments.num_turns)
            for link, other in permutations(arguments.links, 2):
                if other not in (SHARED, "unlimited"):
                    own, measured = (folder.with_name(f"{model}_{name}") for name in (link, other))
                    about = {"model": model, "link": f"{link} to {other}"}
                    elsewhere += rows_of(own, about, arguments.num_turns, elsewhere=(measured, other))
    print_tables(rows, "on the link of the run")
    if elsewhere:
        print_tables(elsewhere, "on another link")
    if arguments.output:
        known = settings_of(arguments, "folder")
        write_result(arguments.output, {"settings": known, "rows": rows, "elsewhere": elsewhere}, load)


if __name__ == "__main__":
    main()
