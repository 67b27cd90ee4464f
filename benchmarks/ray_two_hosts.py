"""What a comm hook saves on two hosts of the network lab, in workers of Ray Train and without Ray.

Each way trains with every plan in the same processes, one after another, and the ways take turns. Needs
pip install 'lightning-commopt[ray]'.

python benchmarks/ray_two_hosts.py --output ray.json
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from command_line import need_lab
from lightning.pytorch import Callback, Trainer
from ray.train import RunConfig, ScalingConfig
from ray.train.lightning import RayLightningEnvironment, prepare_trainer
from ray.train.torch import TorchTrainer
from results_file import settings_of, write_result
from rich.console import Console
from rich.table import Table
from two_hosts import device_sent_bytes

import lightning_commopt
import lightning_commopt.ray
from lightning_commopt.launch.environment import RANK_VARIABLES
from lightning_commopt.launch.lab import NetLab
from lightning_commopt.train.workloads.mlp import MLP, Blobs

WAYS = ("without Ray", "Ray Train")
PLANS = ("none", "bf16", "int8", "powersgd")
PORT = 6379
LIMIT_S = 570
"""Of one way's turn."""


class StepTimes(Callback):
    """Notes when each batch ends, and what this host has sent until then."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, int]] = []

    def on_train_batch_end(self, *_: Any) -> None:
        """Notes both."""
        self.ends.append((time.perf_counter(), device_sent_bytes()))


def train(make: Callable[..., Trainer], strategy: Callable[..., Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Trains with every plan; returns the median seconds of a step, and the bytes that this host sends in one."""
    torch.set_num_threads(1)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    found = {}
    for plan in arguments.plans:
        times = StepTimes()
        make(
            accelerator="cpu",
            devices=1,
            max_steps=arguments.num_warmup_steps + arguments.num_steps,
            limit_val_batches=0,
            callbacks=[times],
            strategy=strategy(comm_hook=plan),
            **quiet,
        ).fit(MLP(size=arguments.model), Blobs(num_samples=4096, batch_size=16))
        moments, sent_bytes = np.array(times.ends[arguments.num_warmup_steps - 1 :]).T
        found[plan] = {
            "step_s": float(np.median(np.diff(moments))),
            "sent_bytes": float(np.diff(sent_bytes).mean()),
        }
    return found


def run_rank(arguments: argparse.Namespace) -> None:
    """Trains on this host, without Ray."""
    found = train(lambda **options: Trainer(num_nodes=2, **options), lightning_commopt.CommOptDDP, arguments)
    if os.environ["RANK"] == "0":
        arguments.result.write_text(json.dumps(found))


def train_worker(config: dict[str, Any]) -> None:
    """Trains in a worker of Ray."""
    arguments = config["arguments"]

    def make(**options: Any) -> Trainer:
        return prepare_trainer(Trainer(plugins=[RayLightningEnvironment()], **options))

    found = train(make, lightning_commopt.ray.CommOptDDP, arguments)
    if ray.train.get_context().get_world_rank() == 0:
        arguments.result.write_text(json.dumps(found))


def run_node(arguments: argparse.Namespace) -> None:
    """Starts Ray on this host, as on any host of a cluster; the first host runs the job."""
    is_first, address = os.environ["RANK"] == "0", os.environ["MASTER_ADDR"]
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)
    temporary = f"--temp-dir={arguments.result.parent}"  # else other programs of this machine take the lab for theirs
    where = ("--head", f"--port={PORT}", temporary) if is_first else (f"--address={address}:{PORT}",)
    ip = address if is_first else f"{address.rpartition('.')[0]}.2"
    start = [str(Path(sys.executable).with_name("ray")), "start", *where, f"--node-ip-address={ip}", "--num-cpus=1"]
    while subprocess.run([*start, "--include-dashboard=false"] if is_first else start, check=is_first).returncode:
        time.sleep(1)  # the first host is not there yet
    if not is_first:
        while not arguments.result.exists():
            time.sleep(0.2)
        return
    ray.init(address=f"{address}:{PORT}")
    while len(ray.nodes()) < 2:
        time.sleep(0.2)
    TorchTrainer(
        train_worker,
        train_loop_config={"arguments": arguments},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(arguments.result.parent)),
    ).fit()


def run_turn(way: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Trains in one way, in a lab of its own; returns what `train` has found on the first host."""
    with tempfile.TemporaryDirectory(prefix="ray") as folder, NetLab(2, arguments.rate) as lab:
        result = Path(folder) / "result.json"
        command = [sys.executable, __file__, *sys.argv[1:], "--worker", way, "--result", str(result)]
        path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        # Nobody outside of the lab can reach its hosts: Ray needs no token there.
        environment = {"PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
        lab.run(command, pin_to_cores=True, timeout_s=LIMIT_S, environment=environment)
        return json.loads(result.read_text())


def print_table(turns: dict[str, list[dict[str, Any]]], arguments: argparse.Namespace) -> None:
    """Prints a row for each way and plan: medians over turns."""
    table = Table(title=f"MLP {arguments.model}, two hosts, {arguments.rate}")
    for heading in ("", "comm_hook", "s/step", "min-max", "speed-up", "MB sent/step"):
        table.add_column(heading)
    for way in WAYS:
        base = np.median([turn[arguments.plans[0]]["step_s"] for turn in turns[way]])
        for plan in arguments.plans:
            step_s = [turn[plan]["step_s"] for turn in turns[way]]
            sent_mb = np.median([turn[plan]["sent_bytes"] for turn in turns[way]]) / 1e6
            spread = f"{min(step_s):.3f}-{max(step_s):.3f}"
            median_s = np.median(step_s)
            table.add_row(way, plan, f"{median_s:.3f}", spread, f"{base / median_s:.2f}", f"{sent_mb:.1f}")
    Console().print(table)


def main() -> None:
    """Measures both ways, prints a table and stores the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit", help="of each host's link in each direction")
    parser.add_argument("--model", default="xlarge", help="size of the MLP")
    parser.add_argument("--plans", nargs="+", default=list(PLANS))
    parser.add_argument("--num-warmup-steps", type=int, default=4)
    parser.add_argument("--num-steps", type=int, default=10, help="timed steps of each plan in a turn")
    parser.add_argument("--num-repeats", type=int, default=3, help="turns of each way")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        (run_rank if arguments.worker == WAYS[0] else run_node)(arguments)
        return
    need_lab()
    load = os.getloadavg()[0]
    turns: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for number in range(arguments.num_repeats):
        for way in WAYS:
            turns[way].append(run_turn(way, arguments))
            print(f"turn {number + 1} of {arguments.num_repeats}, {way}: {turns[way][-1]}", flush=True)
    print_table(turns, arguments)
    if arguments.output:
        write_result(arguments.output, {"settings": settings_of(arguments, "result"), "turns": turns}, load)


if __name__ == "__main__":
    main()
