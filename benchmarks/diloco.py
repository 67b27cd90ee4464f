"""What DiLoCo costs in quality at equal samples: a small GPT or a CNN on the ranks of this machine, over gloo.

Every plan takes the same steps from the same seed on the same batches. Its difference to per-step DDP of the same seed
is what it costs, in percent of DDP's loss; the interval is Student's, 95 % for the mean of these differences. Seeds
differ by more than plans do, so only these paired differences tell something. The quality does not depend on the link;
`commopt-train -m experiment=diloco` shows the time on a slow one.

The figures beside ours are those of table 6 of Streaming DiLoCo (arXiv:2501.18512): C4, 35 M parameters.

python benchmarks/diloco.py --output benchmarks/results/diloco_HARDWARE_DATE.json
python benchmarks/diloco.py --num-ranks 4 --num-steps 3000 --num-seeds 5
python benchmarks/diloco.py --plans "H=30, tau=1" "H=30, tau=5" "H=30, tau=1, alpha=0" "H=30, tau=5, alpha=0"
python benchmarks/diloco.py --batch-size 64 --num-steps 1000 --plans "H=30, momentum 0.5"    # with less noise
python benchmarks/diloco.py --num-ranks 1 --plans "OuterMomentum"    # with one worker, against AdamW alone
python benchmarks/diloco.py --num-ranks 1 --plans "OuterMomentum" --task digits --batch-size 32
"""

import argparse
import json
import logging
import math
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from command_line import positive
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from quality import interval_of_mean
from rank_results import print_result, printed_results, torchrun
from results_file import origin_of, settings_of, write_result

from lightning_commopt import CommOptDDP, CommOptDiLoCo
from lightning_commopt.callbacks import OuterMomentum
from lightning_commopt.train.workloads.digits import Digits, DigitsCNN
from lightning_commopt.train.workloads.gpt import GPT, StdlibSources

BASELINE = "DDP"
TAUS = (1, 2, 5, 10)
PLANS: dict[str, dict[str, Any]] = {
    **{f"H={every}": {"sync_every": every} for every in (10, 30, 100)},
    **{
        f"H={every}, {hook}": {"sync_every": every, "comm_hook": hook}
        for every in (10, 30, 100)
        for hook in ("int8", "int4")
    },
    **{f"H=30, tau={tau}": {"overlap": tau} for tau in TAUS},
    **{f"H=30, tau={tau}, alpha=0": {"overlap": tau, "mixing": 0.0} for tau in TAUS},
    "H=30, mean of weights": {"outer_lr": 1.0, "outer_momentum": 0.0},
    **{
        f"H={every}, momentum {momentum}{f', {hook}' if hook else ''}": {
            "sync_every": every,
            "outer_momentum": momentum,
            "comm_hook": hook,
        }
        for momentum in (0.5, 0.7, 0.8)
        for every in (10, 30, 100)
        for hook in (None, "int8", "int4")
    },
    **{
        f"H=30, momentum 0.7, tau={tau}{', alpha=0' if mixing == 0 else ''}": {
            "outer_momentum": 0.7,
            "overlap": tau,
            "mixing": mixing,
        }
        for tau in TAUS
        for mixing in (0.5, 0.0)
    },
    "H=30, momentum 0.5, int4 with feedback": {
        "sync_every": 30,
        "outer_momentum": 0.5,
        "comm_hook": {"name": "int4", "error_feedback": True},
    },
    "H=30, 2 fragments, tau=1, int4": {"fragments": 2, "overlap": 1, "comm_hook": "int4"},
}
ONE_WORKER: dict[str, dict[str, Any]] = {
    "OuterMomentum": {"sync_every": 30, "outer_momentum": 0.9},
    "OuterMomentum, momentum 0.7": {"sync_every": 30, "outer_momentum": 0.7},
    "OuterMomentum, momentum 0.5": {"sync_every": 30, "outer_momentum": 0.5},
}
PUBLISHED = {(2, 30): "+0.6 %", (2, 100): "+1.4 %", (4, 30): "+2.6 %", (4, 100): "+3.7 %"}
DEFAULT = [*(f"H={every}{hook}" for every in (10, 30, 100) for hook in ("", ", int4")), "OuterMomentum"]


def train(name: str, seed: int, num_ranks: int, num_steps: int, batch_size: int, task: str) -> dict[str, Any]:
    """Makes one run on this rank; returns the metrics of the validation set and the seconds of the fit."""
    seed_everything(seed, workers=True, verbose=False)
    strategy = CommOptDiLoCo(**PLANS[name]) if name in PLANS else CommOptDDP()
    callbacks: list[Callback] = [OuterMomentum(**ONE_WORKER[name])] if name in ONE_WORKER else []
    trainer = Trainer(
        accelerator="cpu",
        devices=num_ranks,
        strategy=strategy,
        max_steps=num_steps,
        max_epochs=-1,
        limit_val_batches=0,
        logger=False,
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    model: LightningModule = GPT(context=64) if task == "gpt" else DigitsCNN()
    data = StdlibSources(context=64, batch_size=batch_size) if task == "gpt" else Digits(batch_size=batch_size)
    began = time.perf_counter()
    trainer.fit(model, datamodule=data)
    seconds = time.perf_counter() - began
    # Of the GPT the same sequences for every size.
    trainer.limit_val_batches = math.ceil(40 * 8 / batch_size) if task == "gpt" else 1.0
    return {**trainer.validate(model, datamodule=data, verbose=False)[0], "seconds": seconds}


def run_rank(arguments: argparse.Namespace) -> None:
    """Makes all runs of one seed in this process; rank 0 prints each as JSON."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for name in arguments.plans if arguments.ddp_from else [BASELINE, *arguments.plans]:
        run = train(
            name, arguments.worker, arguments.num_ranks, arguments.num_steps, arguments.batch_size, arguments.task
        )
        if os.environ["RANK"] == "0":
            print_result({"plan": name, "seed": arguments.worker, **run})


def measure(arguments: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """Makes all runs, one seed after another; yields the runs so far, after each."""
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.num_seeds)
    runs: list[dict[str, Any]] = []
    for path in arguments.ddp_from:
        runs += ddp_runs(json.loads(path.read_text(encoding="utf-8")), seeds, arguments)
    if arguments.ddp_from and {*seeds} != {run["seed"] for run in runs}:
        sys.exit(f"--ddp-from must have DDP's runs of all seeds from {seeds.start} to {seeds.stop - 1}")
    for seed in seeds:
        words = ["--worker", str(seed), "--num-ranks", str(arguments.num_ranks)]
        words += ["--num-steps", str(arguments.num_steps), "--batch-size", str(arguments.batch_size)]
        words += ["--task", arguments.task, "--plans", *arguments.plans]
        words += ["--ddp-from", *map(str, arguments.ddp_from)] if arguments.ddp_from else []
        command = torchrun(arguments.num_ranks, __file__, *words)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for run in printed_results(process.stdout):
                runs.append(run)
                yield runs
        if process.returncode:
            sys.exit(f"the ranks of seed {seed} failed: {shown(command)}")


def ddp_runs(result: dict[str, Any], seeds: range, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns DDP's runs of some seeds in an earlier result, which must be of the same training."""
    settings = {"task": "gpt", **result["settings"]}  # the first results are of the GPT without saying so
    for name in ("num_ranks", "task", "num_steps", "batch_size"):
        if (earlier := settings[name]) != getattr(arguments, name):
            sys.exit(f"--ddp-from has {name}={earlier}, and these runs {getattr(arguments, name)}")
    return [run for run in result["runs"] if run["plan"] == BASELINE and run["seed"] in seeds]


def shown(command: list[str]) -> str:
    """Returns a command without the folder of Python."""
    return " ".join(["python", *command[1:]])


def summary(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns for each plan its losses, and its differences to DDP of the same seed in percent."""
    baseline = {run["seed"]: run["val_loss"] for run in runs if run["plan"] == BASELINE}
    rows: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(run["plan"] for run in runs):
        losses = {run["seed"]: run["val_loss"] for run in runs if run["plan"] == name}
        gaps = [100 * (loss / baseline[seed] - 1) for seed, loss in losses.items()]
        rows[name] = {
            "losses": list(losses.values()),
            "gap_percent": float(np.mean(gaps)),
            "gaps_percent": gaps,
            "interval_95_percent": interval_of_mean(gaps),
        }
    return rows


def table(rows: dict[str, dict[str, Any]], num_ranks: int) -> str:
    """Returns a table in Markdown, a row for each plan."""
    lines = [
        "| plan | loss, mean (min to max) | gap to DDP | 95 % interval | seeds | published, 35 M on C4 |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        losses, interval = row["losses"], row["interval_95_percent"]
        options = PLANS.get(name)
        published = "" if options is None else PUBLISHED.get((num_ranks, options.get("sync_every", 30)), "")
        ends = "" if interval is None else f"{interval[0]:+.2f} to {interval[1]:+.2f} %"
        loss = f"{np.mean(losses):.4f} ({min(losses):.4f} to {max(losses):.4f})"
        lines.append(f"| {name} | {loss} | {row['gap_percent']:+.2f} % | {ends} | {len(losses)} | {published} |")
    return "\n".join(lines)


def main() -> None:
    """Trains, prints a table and stores the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-ranks", type=positive, default=2, help="workers, M in the papers")
    parser.add_argument("--task", choices=["gpt", "digits"], default="gpt")
    parser.add_argument("--num-steps", type=positive, default=600)
    parser.add_argument("--batch-size", type=positive, default=8, help="of a rank, in sequences of 64 bytes or images")
    parser.add_argument("--num-seeds", type=positive, default=3)
    parser.add_argument("--first-seed", type=int, default=0, help="to add seeds to an earlier result")
    parser.add_argument("--plans", nargs="+", choices=[*PLANS, *ONE_WORKER], default=DEFAULT, metavar="PLAN")
    parser.add_argument(
        "--ddp-from",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="earlier results with DDP's runs, which are not made again: on the same kind of processor and the same"
        " versions of torch and Lightning they have the same losses, bit for bit",
    )
    parser.add_argument("--output", type=Path, help="stored after each run, with the table beside it as .md")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        run_rank(arguments)
        return
    load = os.getloadavg()[0]
    settings = settings_of(arguments, "ddp_from")
    rows: dict[str, dict[str, Any]] = {}
    for runs in measure(arguments):
        rows = summary(runs)
        if arguments.output:
            write_result(arguments.output, {"settings": settings, "summary": rows, "runs": runs}, load)
            origin = origin_of(load)
            words = f"{origin['hardware']}, {origin['date']}, load average {load:.0f} at the start"
            text = f"{words}: `{origin['command']}`\n\n{table(rows, arguments.num_ranks)}\n"
            arguments.output.with_suffix(".md").write_text(text, encoding="utf-8")
    print(table(rows, arguments.num_ranks))


if __name__ == "__main__":
    main()
