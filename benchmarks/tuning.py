"""The plan that ``plan="auto"`` chooses against every plan of a grid of buckets and compressors.

Makes hosts with a limited rate on this machine (`lightning_commopt.launch.lab`), one rank on each, every rank on a core
of its own with one thread. A fit that is planned for ``--num-planned-steps`` steps chooses its plan, and is ended after
its first ``--num-fit-steps``. Then the same ranks train with every plan of the grid, with DDP's own and with the chosen
one, in turns. Printed are the chosen plan's time over that of the grid's fastest plan and of DDP's own, and the steps
of the search. With ``--then-rate`` all links change half-way through the first steps, and the grid has the new rate.

python benchmarks/tuning.py --output benchmarks/results/tuning_HARDWARE_DATE.json
python benchmarks/tuning.py --models mlp --rates 1gbit --lossless    # quick
"""

import argparse
import json
import os
import statistics
import sys
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from command_line import need_lab
from rank_results import printed_results
from results_file import write_result
from rich.console import Console
from rich.table import Table

from lightning_commopt.launch.lab import NetLab

CHANGE = "CHANGE THE RATE"
MODELS = ("mlp", "vit", "mobilenet")
CAPS_MB = (None, 1, 2, 5, 10, 100)


def run_job(
    settings: dict[str, Any], rate: str, then_rate: str | None, num_hosts: int, timeout_s: float
) -> dict[str, Any]:
    """Returns what rank 0 of one job found."""
    command = [sys.executable, str(Path(__file__).with_name("tuning_job.py")), json.dumps(settings)]
    with NetLab(num_hosts, rate) as lab, TemporaryDirectory() as cache:

        def watch(rank: int, output: bytes) -> None:
            if CHANGE.encode() in output and then_rate is not None:
                lab.change_rate(then_rate)

        environment = {"XDG_CACHE_HOME": cache}  # no plan that another job has chosen
        output = lab.run(command, pin_to_cores=True, environment=environment, timeout_s=timeout_s, on_output=watch)[0]
    return next(printed_results(output.splitlines())) | {
        "num_hosts": num_hosts,
        "rate": rate if then_rate is None else f"{rate}, then {then_rate}",
        "settings": settings,
    }


def _turns(seconds: list[float], num_timed: int) -> list[list[float]]:
    return [seconds[start : start + num_timed] for start in range(0, len(seconds), num_timed)]


def compare(result: dict[str, Any]) -> dict[str, Any]:
    """Returns the ratios of one job. Plans with the same compressor and buckets are one: the steps of both count.

    The noise is that of DDP's own plan: the range of its medians in the rounds, over the median of all.
    """
    own, chosen, *_ = result["grid"]
    keys = [json.dumps([row["plan"].get("comm_hook"), row["buckets"]], sort_keys=True) for row in result["grid"]]
    pooled: dict[str, list[float]] = {}
    for key, row in zip(keys, result["grid"], strict=True):
        pooled.setdefault(key, []).extend(row["steps_s"])
    for key, row in zip(keys, result["grid"], strict=True):
        row["step_s"] = statistics.median(pooled[key])
    best = min(result["grid"], key=lambda row: row["step_s"])
    num_timed = len(own["steps_s"]) // result["settings"]["num_rounds"]
    in_rounds = [statistics.median(turn) for turn in _turns(own["steps_s"], num_timed)]
    return {
        "model": result["settings"]["model"],
        "rate": result["rate"],
        "num_hosts": result["num_hosts"],
        "lossy": result["settings"]["lossy"],
        "chosen": chosen["name"],
        "best": best["name"],
        "own_s": own["step_s"],
        "chosen_s": chosen["step_s"],
        "best_s": best["step_s"],
        "over_best": chosen["step_s"] / best["step_s"] - 1,
        "saved": 1 - chosen["step_s"] / own["step_s"],
        "noise": (max(in_rounds) - min(in_rounds)) / own["step_s"],
        "num_search_steps": result["found"].get("num_search_steps"),
        "lost_steps": result["found"].get("lost_steps"),
        "status": result["found"].get("status"),
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    table = Table(
        "model", "rate", "hosts", "allowed", "own, ms", "chosen, ms", "best, ms", "over best", "saved", "noise", "steps"
    )
    for row in rows:
        allowed = ", ".join(map(str, row["lossy"])) or "lossless"
        times = [f"{1e3 * row[name]:.1f}" for name in ("own_s", "chosen_s", "best_s")]
        shares = [f"{100 * row[name]:.1f} %" for name in ("over_best", "saved", "noise")]
        table.add_row(
            row["model"], row["rate"], str(row["num_hosts"]), allowed, *times, *shares, str(row["num_search_steps"])
        )
    Console().print(table)


def main() -> None:
    """Runs all jobs, prints and stores the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["mlp", "vit", "mobilenet"], choices=MODELS)
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit", "10gbit", "unlimited"])
    parser.add_argument("--then-rate", help="that every link changes to in the middle of the fit's first steps")
    parser.add_argument("--num-hosts", nargs="+", type=int, default=[2, 3])
    parser.add_argument("--lossless", action="store_true", help="no compressors in the grid, and none allowed")
    parser.add_argument("--num-planned-steps", type=int, default=5000)
    parser.add_argument("--num-fit-steps", type=int, default=120)
    parser.add_argument("--num-grid-steps", type=int, default=6, help="of each plan in each round; 2 are not timed")
    parser.add_argument("--num-rounds", type=int, default=2)
    parser.add_argument("--timeout-s", type=float, default=1800)
    parser.add_argument("--output", type=Path, help="result file")
    arguments = parser.parse_args()
    need_lab()
    load_at_start, results, rows = os.getloadavg()[0], [], []
    for model, rate, num_hosts in product(arguments.models, arguments.rates, arguments.num_hosts):
        settings = {
            "model": model,
            "lossy": [] if arguments.lossless else ["bf16", "int8"],
            "caps_mb": CAPS_MB,
            "change_at_step": None if arguments.then_rate is None else arguments.num_fit_steps // 2,
            **{
                name: getattr(arguments, name)
                for name in ("num_planned_steps", "num_fit_steps", "num_grid_steps", "num_rounds")
            },
        }
        results.append(run_job(settings, rate, arguments.then_rate, num_hosts, arguments.timeout_s))
        rows.append(compare(results[-1]))
        print(f"{rows[-1]}\n{results[-1]['found'].get('verdict')}", flush=True)
        if arguments.output is not None:
            write_result(arguments.output, {"rows": rows, "results": results}, load_at_start)
    print_table(rows)


if __name__ == "__main__":
    main()
