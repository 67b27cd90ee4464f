"""What a fit of FSDP2 on one link predicts for another link, beside what fits take there.

Two hosts in the network lab, each rank on a core of its own, fit models at each rate, without compression and with
int8. Each fit is asked, from its files alone and as ``commopt predict --link`` asks it, for the median step of both
plans at every rate. Run nothing else on the machine: fits are compared that run minutes apart.

python benchmarks/sharded_rates.py --output benchmarks/results/sharded_rates_HARDWARE_DATE.json
python benchmarks/sharded_rates.py --models mlp_512 --links 1gbit 100mbit --num-steps 30    # quick
"""

import argparse
import json
import os
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from command_line import need_lab
from results_file import settings_of, write_result
from rich.console import Console
from rich.table import Table

from lightning_commopt.cost.fsdp2.basis import Conditions, ShardedBasis
from lightning_commopt.launch.lab import NetLab, parse_rate
from lightning_commopt.measure.files import common_steps, read_run
from lightning_commopt.measure.link.link import PAYLOAD_SHARE
from lightning_commopt.measure.record import StepRecord
from lightning_commopt.measure.runs.files import PREDICTION_FILE
from lightning_commopt.plan.sharded import ShardedPlan

MODELS = ("mlp_512", "gpt_256", "cnn")
PLANS: dict[str, dict[str, Any]] = {"none": {}, "int8": {"comm_hook": "int8"}}


class _Fit(NamedTuple):
    link: str
    plan: str
    basis: ShardedBasis
    step_s: float  # median over both ranks
    collectives: dict[str, dict[str, float]]  # see `collectives_of`


def fits_of(model: str, links: list[str], num_steps: int, folder: Path) -> list[_Fit]:
    """Fits the model with each plan on each link."""
    fits = []
    job = str(Path(__file__).with_name("sharded_prediction_job.py"))
    for link in links:
        run_dir = folder / f"{model}_{link}"
        settings = {"model": model, "plans": PLANS, "learned_from": [*PLANS], "folder": str(run_dir), "num_turns": 1}
        settings |= {"num_steps": num_steps, "num_cycles": 0, "num_block_steps": 0, "replicated": False}
        if not run_dir.exists():
            with NetLab(2, link) as lab:
                lab.run([sys.executable, job, json.dumps(settings)], pin_to_cores=True, timeout_s=1800)
            print(f"{model}, {link}: done", file=sys.stderr, flush=True)
        for plan in PLANS:
            steps = [*common_steps(read_run(run_dir / f"{plan}_0")).values()]
            step_s = median(record.totals.step_s for records in steps for record in records)
            basis = ShardedBasis.load(run_dir / f"{plan}_0" / PREDICTION_FILE)
            fits.append(_Fit(link, plan, basis, step_s, collectives_of(steps, parse_rate(link))))
    return fits


def collectives_of(steps: Sequence[Sequence[StepRecord]], bits_per_s: int | None) -> dict[str, dict[str, float]]:
    """Returns, for each phase and operation of FSDP2's own, medians of steps on two ranks.

    "over_wire" is the time of a byte over its time on the link, if that has a rate; "rank_ratio" is the longer over the
    shorter time of the two ranks.
    """
    seconds: dict[str, list[list[float]]] = {}
    num_bytes: dict[str, int] = {}
    for records in steps:
        totals: list[defaultdict[str, float]] = [defaultdict(float) for _ in records]
        sizes = Counter[str]()
        for place, record in enumerate(records):
            for one in record.collectives:
                is_own = one.operation in ("all_gather", "reduce_scatter") and not one.source
                if is_own and one.start_s is not None and one.end_s is not None:
                    name = f"{one.phase} {one.operation}"
                    totals[place][name] += one.end_s - one.start_s
                    sizes[name] += one.num_bytes if place == 0 else 0
        for name in totals[0]:
            seconds.setdefault(name, []).append([total[name] for total in totals])
            num_bytes[name] = sizes[name]
    found = {}
    for name, pairs in seconds.items():
        found[name] = {"rank_ratio": median(max(pair) / min(pair) for pair in pairs)}
        if bits_per_s is not None:
            # Of a message of all shards, each of two ranks sends half.
            wire_s = num_bytes[name] / 2 * 8 / bits_per_s / PAYLOAD_SHARE
            found[name]["over_wire"] = median(pair[0] for pair in pairs) / wire_s
    return found


def rows_of(model: str, fits: list[_Fit]) -> Iterable[dict[str, Any]]:
    """Yields a row for each fit and each plan and link that it predicts."""
    for own in fits:
        for other in fits:
            conditions = Conditions(bits_per_s=parse_rate(other.link))
            predicted = own.basis.predict(ShardedPlan(**PLANS[other.plan]), conditions)
            yield {
                "model": model,
                "from_link": own.link,
                "from_plan": own.plan,
                "link": other.link,
                "plan": other.plan,
                "measured_s": other.step_s,
                "predicted_s": predicted.step_s,
                "low_s": predicted.low_s,
                "high_s": predicted.high_s,
                "is_inside": predicted.low_s <= other.step_s <= predicted.high_s,
            }


def print_tables(rows: list[dict[str, Any]]) -> None:
    """Prints predicted over measured time by model, and how many predictions are inside by the predicted link."""
    console = Console(width=160)
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        measured = {(row["link"], row["plan"]): row["measured_s"] for row in own}
        heads = [f"{link}, {plan}: {1e3 * step_s:.0f} ms" for (link, plan), step_s in measured.items()]
        table = Table("from", *heads, title=f"{model}: predicted over measured, * outside of the interval")
        for source in dict.fromkeys((row["from_link"], row["from_plan"]) for row in own):
            cells = [
                f"{row['predicted_s'] / row['measured_s']:.2f}{'' if row['is_inside'] else ' *'}"
                for row in own
                if (row["from_link"], row["from_plan"]) == source
            ]
            table.add_row(", ".join(source), *cells)
        console.print(table)
        for link in dict.fromkeys(row["link"] for row in own):
            there = [row for row in own if row["link"] == link]
            ratios = [row["predicted_s"] / row["measured_s"] for row in there]
            inside = sum(row["is_inside"] for row in there)
            console.print(f"{link}: {min(ratios):.2f} to {max(ratios):.2f}, {inside} of {len(there)} inside")


def main() -> None:
    """Runs the fits, predicts, prints and stores the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=MODELS)
    parser.add_argument("--links", nargs="+", default=["100mbit", "1gbit", "10gbit"])
    parser.add_argument("--num-steps", type=int, default=60, help="of a fit")
    parser.add_argument("--folder", type=Path, help="for the fits; what is there is not run again")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    need_lab()
    load = os.getloadavg()[0]
    rows: list[dict[str, Any]] = []
    collectives: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).absolute()
        for model in arguments.models:
            fits = fits_of(model, arguments.links, arguments.num_steps, folder)
            rows += rows_of(model, fits)
            collectives += [{"model": model, "link": fit.link, "plan": fit.plan, **fit.collectives} for fit in fits]
    print_tables(rows)
    if arguments.output:
        result = {"settings": settings_of(arguments, "folder"), "rows": rows, "collectives": collectives}
        write_result(arguments.output, result, load)


if __name__ == "__main__":
    main()
