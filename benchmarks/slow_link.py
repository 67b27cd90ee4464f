"""What CommTimeMonitor says of a small GPT on two hosts with a slow link between them, for one plan after another.

Prints each plan's table, and leaves its steps in OUTPUT_DIR/PLAN/comm_time. It is there to be looked at, and stores no
result.

python benchmarks/slow_link.py --plans none powersgd --rate 200mbit --output-dir slow_link
uv run --with matplotlib python docs/timeline_picture.py slow_link/none docs/images/timeline.png --first-step 60
"""

import argparse
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from command_line import need_lab
from rich.console import Console
from small_gpt import train_gpt

from lightning_commopt import CommOptDDP
from lightning_commopt.callbacks import CommTimeMonitor
from lightning_commopt.launch.lab import NetLab
from lightning_commopt.measure.summary import FitSummary

PLANS: dict[str, Any] = {
    "none": None,
    "bf16": "bf16",
    "int8": "int8",
    "powersgd": {"name": "powersgd", "matrix_rank": 8},
}


def run_rank(arguments: argparse.Namespace) -> None:
    """Trains on this rank; rank 0 prints the table."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    comm_time = CommTimeMonitor(dirpath=arguments.output_dir / arguments.worker, print_summary=False)
    train_gpt(
        num_steps=arguments.num_steps,
        batch_size=arguments.batch_size,
        accelerator="cpu",
        devices=1,
        num_nodes=arguments.num_hosts,
        strategy=CommOptDDP(comm_hook=PLANS[arguments.worker], bucket_cap_mb=arguments.bucket_cap_mb),
        callbacks=[comm_time],
    )
    if os.environ["RANK"] == "0":
        assert comm_time.verdict is not None
        Console(width=80).print(FitSummary(metrics=comm_time.summary, verdict=comm_time.verdict).table())


def main() -> None:
    """Runs all plans in one lab."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--num-hosts", type=int, default=2)
    parser.add_argument("--rate", default="200mbit", help="of each host's link in each direction")
    parser.add_argument("--num-steps", type=int, default=150, help="the first 10 are warm-up")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences in a batch of one rank")
    parser.add_argument("--bucket-cap-mb", type=float, default=0.5)
    parser.add_argument("--output-dir", type=Path, default=Path("slow_link"))
    parser.add_argument("--worker", choices=PLANS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        run_rank(arguments)
        return
    need_lab()
    with NetLab(arguments.num_hosts, arguments.rate) as lab:
        for plan in arguments.plans:
            command = [sys.executable, __file__, *sys.argv[1:], "--worker", plan]
            print(f"{plan}\n{lab.run(command, pin_to_cores=True, timeout_s=900)[0]}", flush=True)


if __name__ == "__main__":
    main()
