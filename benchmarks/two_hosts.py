"""Steps per second on several hosts with slow links between them, for plans of how gradients travel.

Makes the hosts on this machine (`lightning_commopt.launch.lab`), one rank on each, every rank on a core of its own with
one thread. Plans take turns, A B C A B C, so that a drift of the machine hits all. Each turn is a job in fresh
processes: warm-up steps, which are dropped, then timed ones on a batch of random images. A turn counts with the median
of rank 0's steps; printed and stored are the medians over turns, with the least and the most.

python benchmarks/two_hosts.py --output benchmarks/results/two_hosts_HARDWARE_DATE.json
python benchmarks/two_hosts.py --model vit_tiny --num-repeats 1 --plans ddp torch_bf16    # quick
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from command_line import link_rate, need_lab, positive
from rank_results import print_result, run_in_lab
from results_file import settings_of, write_result
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch_hooks import register_bf16, register_no_sync, register_powersgd
from torchvision.models import VisionTransformer, get_model

from lightning_commopt import CommPlan
from lightning_commopt.launch.lab import RankError
from lightning_commopt.launch.lab.lab import DEVICE
from lightning_commopt.sync.ddp.attach import attach_bucket_hook

GROUP_TIMEOUT = timedelta(minutes=10)
PERFECT = "no_sync"
BASELINE = "ddp"


@dataclass(frozen=True, kw_only=True)
class Contender:
    """How one plan is set up.

    Attributes:
        options: of `CommPlan`.
        hook: registers a hook that is not ours.
        uses_ddp: False for one process by itself.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    hook: Callable[[DistributedDataParallel], None] | None = None
    uses_ddp: bool = True


QUICK = {"static_graph": True, "gradient_as_bucket_view": True}
COMM_HOOKS: dict[str, Any] = {
    "bf16": "bf16",
    "bf16_sum_float32": {"name": "bf16", "accumulate": "float32"},
    "int8": "int8",
    "int4": "int4",
    **{f"powersgd_rank{r}": {"name": "powersgd", "matrix_rank": r} for r in (1, 4)},
    **{f"alternating_rank{r}": {"name": "alternating_powersgd", "matrix_rank": r} for r in (1, 4)},
}
BUCKETS_MB = (25, 100, 400)

# Buckets: torch's PowerSGD deadlocks or aborts on gloo with more than one.
PLANS: dict[str, Contender] = {
    "one_process": Contender(uses_ddp=False),
    PERFECT: Contender(options=QUICK, hook=register_no_sync),
    BASELINE: Contender(),
    "torch_bf16": Contender(hook=register_bf16),
    "torch_powersgd_rank1": Contender(options={"bucket_cap_mb": 2000}, hook=partial(register_powersgd, matrix_rank=1)),
    "commopt_static_view": Contender(options=QUICK),
    **{
        f"commopt_{name}_{bucket_mb}mb": Contender(options={**QUICK, "comm_hook": hook, "bucket_cap_mb": bucket_mb})
        for name, hook in COMM_HOOKS.items()
        for bucket_mb in BUCKETS_MB
    },
}


def vit_tiny(num_classes: int = 1000) -> nn.Module:
    """Returns a vision transformer of 3.7 M parameters, whose step takes a fraction of a second."""
    return VisionTransformer(
        image_size=224, patch_size=32, num_layers=4, num_heads=4, hidden_dim=256, mlp_dim=1024, num_classes=num_classes
    )


def run_rank(arguments: argparse.Namespace) -> None:
    """Trains as one rank; rank 0 prints its seconds and bytes as JSON."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    contender = PLANS[arguments.worker]
    model = vit_tiny() if arguments.model == "vit_tiny" else get_model(arguments.model, weights=None)
    wrapped, hook = model, None
    if contender.uses_ddp:
        plan = CommPlan.from_dict(contender.options)
        dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
        wrapped = DistributedDataParallel(model, **plan.ddp_kwargs())
        if contender.hook is not None:
            contender.hook(wrapped)
        elif plan.comm_hook is not None:
            hook = attach_bucket_hook(wrapped, plan.comm_hook, GROUP_TIMEOUT)
    torch.manual_seed(int(os.environ["RANK"]))
    batch = torch.randn(arguments.batch_size, 3, 224, 224), torch.randint(0, 1000, (arguments.batch_size,))
    result = timed_steps(wrapped, batch, arguments.num_warmup_steps, arguments.num_steps)
    if hook is not None:
        hook.close()
    if contender.uses_ddp:
        dist.destroy_process_group()
    if os.environ["RANK"] == "0":
        print_result(result)


def timed_steps(
    model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], num_warmup_steps: int, num_steps: int
) -> dict[str, Any]:
    """Trains with SGD.

    Args:
        model: wrapped or not.
        batch: images ``(B, 3, 224, 224)`` and labels ``(B,)``, the same in every step.
        num_warmup_steps: that come first and do not count.
        num_steps: that do.

    Returns:
        ``step_s`` of every step, ``sent_bytes`` by this host in one step on average, and the last ``loss``.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    ends, sent_bytes = [], 0
    for step in range(num_warmup_steps + num_steps):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
        if step == num_warmup_steps - 1:
            sent_bytes = device_sent_bytes()
    return {
        "step_s": np.diff(ends[num_warmup_steps - 1 :]).tolist(),
        "sent_bytes": (device_sent_bytes() - sent_bytes) / num_steps,
        "loss": loss.item(),
    }


def device_sent_bytes() -> int:
    """Returns what this host has sent so far, all headers included."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    counters = next(line.split(":")[1].split() for line in lines if line.strip().startswith(f"{DEVICE}:"))
    return int(counters[8])  # after the eight of what was received


def run_turn(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs one job of a plan in a lab of its own; returns what `timed_steps` did on rank 0."""
    numbers = ("batch_size", "num_warmup_steps", "num_steps")
    sizes = [word for key in numbers for word in (f"--{key.replace('_', '-')}", str(getattr(arguments, key)))]
    words = [__file__, "--worker", name, "--model", arguments.model, *sizes]
    return run_in_lab(arguments.num_hosts if PLANS[name].uses_ddp else 1, arguments.rate, words, arguments.timeout_s)


def summary(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the medians over turns with their spread."""
    medians_s = [float(np.median(turn["step_s"])) for turn in turns]
    step_s = float(np.median(medians_s))
    return {
        "step_s": {"median": step_s, "min": min(medians_s), "max": max(medians_s)},
        "steps_per_s": 1 / step_s,
        "sent_bytes": float(np.median([turn["sent_bytes"] for turn in turns])),
    }


def print_table(plans: dict[str, dict[str, Any]], title: str) -> None:
    """Prints one row a plan."""
    table = Table(title=title)
    for heading in ("plan", "s/step", "min-max", "steps/s", f"x {BASELINE}", "MB sent/step"):
        table.add_column(heading, no_wrap=True)
    baseline = plans.get(BASELINE, {}).get("summary")
    for name, plan in plans.items():
        if "summary" not in plan:
            table.add_row(name, "failed")
            continue
        step_s, of_plan = plan["summary"]["step_s"], plan["summary"]
        ratio = f"{baseline['step_s']['median'] / step_s['median']:.2f}" if baseline else "-"
        spread = f"{step_s['min']:.3f}-{step_s['max']:.3f}"
        sent_mb = f"{of_plan['sent_bytes'] / 1e6:.1f}"
        table.add_row(name, f"{step_s['median']:.3f}", spread, f"{of_plan['steps_per_s']:.3f}", ratio, sent_mb)
    Console(width=max(100, Console().width)).print(table)


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Runs all turns; returns the options, turns and summary of each plan, or its error."""
    plans: dict[str, dict[str, Any]] = {
        name: {"options": dict(PLANS[name].options), "turns": []} for name in arguments.plans
    }
    for turn in range(arguments.num_repeats):
        for name, plan in plans.items():
            if "error" in plan:
                continue
            try:
                plan["turns"].append(run_turn(name, arguments))
            except RankError as error:
                plan["error"] = str(error)
                print(f"{name}: {error}", file=sys.stderr, flush=True)
            else:
                step_s = np.median(plan["turns"][-1]["step_s"])
                print(f"turn {turn + 1} of {arguments.num_repeats}, {name}: {step_s:.3f} s", flush=True)
    for plan in plans.values():
        if "error" not in plan:
            plan["summary"] = summary(plan["turns"])
    return plans


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-hosts", type=positive, default=2)
    parser.add_argument("--rate", type=link_rate, default="1gbit", help="of each host's link each way, or 'unlimited'")
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS), metavar="PLAN", help=", ".join(PLANS))
    parser.add_argument("--model", default="vit_l_32", help="'vit_tiny', or any of torchvision for 224 x 224 images")
    parser.add_argument("--batch-size", type=positive, default=2, help="images in a batch of one rank")
    parser.add_argument("--num-warmup-steps", type=positive, default=4)
    parser.add_argument("--num-steps", type=positive, default=10, help="timed steps in a turn")
    parser.add_argument("--num-repeats", type=positive, default=3, help="turns of each plan")
    parser.add_argument("--timeout-s", type=float, default=1800, help="for one turn")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", choices=PLANS, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measures the plans, prints a table and stores the result."""
    arguments = parse()
    if arguments.worker:
        run_rank(arguments)
        return
    need_lab()
    num_cores = len(os.sched_getaffinity(0))
    if arguments.num_hosts > num_cores:
        print(f"{arguments.num_hosts} ranks share {num_cores} cores, which adds time that is not the network's")
    load = os.getloadavg()[0]
    plans = measure(arguments)
    print_table(plans, f"{arguments.model}, {arguments.num_hosts} hosts, {arguments.rate}")
    if arguments.output:
        write_result(arguments.output, {"settings": settings_of(arguments, "plans"), "plans": plans}, load)
    if any("error" in plan for plan in plans.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
