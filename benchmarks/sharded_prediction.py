"""What fits of FSDP2 predict of other plans, beside what these take in the network lab.

Two hosts, each rank on a core of its own, fit a model with one plan, and are asked, from their files alone and as
``commopt predict`` asks them, for the median step under every plan. Another fit changes the plan every few steps, one
plan after another, again and again, so that all plans have the same other load on the machine. As that load is another
one in each fit, speed-ups are compared: predicted over the run's own plan, and measured within each cycle of plans.

A prediction points the wrong way if its whole interval is on one side of 1, and the speed-up of every cycle on the
other.

python benchmarks/sharded_prediction.py --output benchmarks/results/sharded_prediction_HARDWARE_DATE.json
python benchmarks/sharded_prediction.py --models mlp --links 1gbit --num-turns 1    # quick
"""

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, median
from typing import Any

from command_line import need_lab
from results_file import settings_of, write_result
from rich.console import Console
from rich.table import Table

from lightning_commopt.cost.fsdp2.basis import ShardedBasis
from lightning_commopt.launch.lab import NetLab
from lightning_commopt.measure.files import common_steps, read_run
from lightning_commopt.measure.runs.files import PREDICTION_FILE
from lightning_commopt.plan.sharded import ShardedPlan

PLANS: dict[str, dict[str, Any]] = {
    "none": {},
    "bf16": {"comm_hook": "bf16"},
    "int8": {"comm_hook": "int8"},
    "int8_feedback": {"comm_hook": {"name": "int8", "error_feedback": True}},
    "int4": {"comm_hook": "int4"},
    "int8_parameters": {"param_hook": "int8"},
    "int8_both": {"comm_hook": "int8", "param_hook": "int8"},
}
LEARNED_FROM = ("none", "int8", "int8_both")
_NUM_BLOCK_STEPS = 4
"""Steps of a plan in a cycle, of which the first is left out, as it replaces comm objects and makes memory."""


def cycles_s(run_dir: Path) -> dict[str, list[float]]:
    """Returns the median step of each plan in each cycle of the fit that alternates, over both ranks."""
    times_s: dict[tuple[str, int], list[float]] = {}
    names = [*PLANS]
    for step, records in common_steps(read_run(run_dir)).items():
        block, place = divmod(step, _NUM_BLOCK_STEPS)
        cycle, plan = divmod(block, len(names))
        if place and cycle:  # the first cycle makes connections
            times_s.setdefault((names[plan], cycle), []).extend(record.totals.step_s for record in records)
    cycles: dict[str, list[float]] = {name: [] for name in names}
    for (name, _), seconds in times_s.items():
        cycles[name].append(median(seconds))
    return cycles


def rows_of(folder: Path, about: dict[str, Any], num_turns: int) -> Iterable[dict[str, Any]]:
    """Yields a row for each fit and each plan that it predicts."""
    measured: dict[str, list[float]] = {name: [] for name in PLANS}
    for turn in range(num_turns):
        for name, seconds in cycles_s(folder / f"alternating_{turn}").items():
            measured[name] += seconds
    for own in LEARNED_FROM:
        for turn in range(num_turns):
            basis = ShardedBasis.load(folder / f"{own}_{turn}" / PREDICTION_FILE)
            own_s = basis.workload.step_s
            for name, options in PLANS.items():
                if name == own:
                    continue
                predicted = basis.predict(ShardedPlan(**options))
                speedups = [before / after for before, after in zip(measured[own], measured[name], strict=True)]
                low, high = own_s / predicted.high_s, own_s / predicted.low_s
                truth = median(speedups)
                yield {
                    **about,
                    "learned_from": own,
                    "turn": turn,
                    "plan": name,
                    "own_s": own_s,
                    "measured_s": measured[name],
                    "speedups": speedups,
                    "predicted": own_s / predicted.step_s,
                    "low": low,
                    "high": high,
                    "is_inside": low <= truth <= high,
                    "points_somewhere": low > 1 or high < 1,
                    "points_the_wrong_way": (low > 1 and max(speedups) < 1) or (high < 1 and min(speedups) > 1),
                }


def print_tables(rows: list[dict[str, Any]]) -> None:
    """Prints predicted and measured speed-ups for each pair of plans, and how each row did."""
    console = Console(width=160)
    for key in dict.fromkeys((row["model"], row["link"]) for row in rows):
        table = Table(
            "learned from", *PLANS, title=f"{key[0]}, {key[1]}: predicted speed-ups, and measured (least, most)"
        )
        for own in LEARNED_FROM:
            cells = []
            for name in PLANS:
                pair = [
                    row
                    for row in rows
                    if (row["model"], row["link"], row["learned_from"], row["plan"]) == (*key, own, name)
                ]
                ends = " ".join(f"{row['predicted']:.2f} [{row['low']:.2f} {row['high']:.2f}]" for row in pair)
                truths = pair[0]["speedups"] if pair else [1.0]
                cells.append(f"{ends}\n{median(truths):.2f} ({min(truths):.2f} {max(truths):.2f})")
            table.add_row(own, *cells)
        console.print(table)
    table = Table("", "predictions", "inside 95 %", "typical factor", "largest factor", "point somewhere", "wrong way")
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        for name in (f"from {row['learned_from']}", f"{row['model']}, {row['link']}", "all"):
            groups.setdefault(name, []).append(row)
    for name, group in groups.items():
        factors = [math.exp(abs(math.log(row["predicted"] / median(row["speedups"])))) for row in group]
        table.add_row(
            name,
            str(len(group)),
            f"{100 * fmean(row['is_inside'] for row in group):.0f} %",
            f"{math.exp(fmean(map(math.log, factors))):.2f}",
            f"{max(factors):.2f}",
            str(sum(row["points_somewhere"] for row in group)),
            str(sum(row["points_the_wrong_way"] for row in group)),
        )
    console.print(table)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["mlp", "gpt"], choices=["mlp", "gpt"])
    parser.add_argument("--links", nargs="+", default=["1gbit", "100mbit"])
    parser.add_argument("--num-turns", type=int, default=2)
    parser.add_argument("--num-steps", type=int, default=40, help="of a fit that predicts")
    parser.add_argument("--num-cycles", type=int, default=5, help="of plans, in the fit that alternates")
    parser.add_argument("--replicated", action="store_true", help="keep parameters between forward and backward")
    parser.add_argument("--timeout-s", type=float, default=1800, help="for all fits of a model on a link")
    parser.add_argument("--folder", type=Path, help="for the fits; what is there is not run again")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def main() -> None:
    """Runs the fits, predicts, prints and stores the tables."""
    arguments = parse()
    need_lab()
    load = os.getloadavg()[0]
    rows: list[dict[str, Any]] = []
    job = str(Path(__file__).with_name("sharded_prediction_job.py"))
    names = ("num_turns", "num_steps", "num_cycles", "replicated")
    with tempfile.TemporaryDirectory() as temporary:
        for model in arguments.models:
            for link in arguments.links:
                folder = (arguments.folder or Path(temporary)).absolute() / f"{model}_{link}"
                settings = {"model": model, "plans": PLANS, "folder": str(folder)}
                settings |= {"learned_from": LEARNED_FROM, "num_block_steps": _NUM_BLOCK_STEPS}
                settings |= {name: getattr(arguments, name) for name in names}
                if not folder.exists():
                    with NetLab(2, link) as lab:
                        command = [sys.executable, job, json.dumps(settings)]
                        lab.run(command, pin_to_cores=True, timeout_s=arguments.timeout_s)
                    print(f"{model}, {link}: done", file=sys.stderr, flush=True)
                rows += rows_of(folder, {"model": model, "link": link}, arguments.num_turns)
    print_tables(rows)
    if arguments.output:
        write_result(arguments.output, {"settings": settings_of(arguments, "folder"), "rows": rows}, load)


if __name__ == "__main__":
    main()
