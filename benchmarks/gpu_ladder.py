"""One rank of `gpu.py`'s ladder of plans: the step of a vision transformer under each, in turns, and its peak memory.

`gpu_ranks.py` starts it, on hosts with a slow link or not. Each plan of a turn gets a new model, and as many steps as
fit into ``--turn-s``; it counts with the median of rank 0's steps. A row has the median over turns, with the least and
the most, and is printed anew after each turn, until the limit of the job is too close for
another one.

python benchmarks/gpu_ranks.py --rate 10gbit --cases no_sync,ddp,bf16 -- benchmarks/gpu_ladder.py
"""

import argparse
import gc
import os
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from command_line import positive
from gpu_models import IMAGE_SIZE, NUM_CLASSES, SIZES, VisionTransformer
from gpu_ranks import begin_case, emit, left_s
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch_hooks import register_bf16, register_no_sync, register_powersgd

from lightning_commopt import CommPlan
from lightning_commopt.measure.runs.machine import PeakMemory
from lightning_commopt.plan.ddp import ddp_options
from lightning_commopt.sync.ddp.attach import attach_bucket_hook, unwrap

_TIMEOUT = timedelta(minutes=2)
_CASE_LIMIT_S = 120.0
_END_S = 3.0  # for what comes after the last plan
_MAX_STEPS = 10
_SLOW_S = 2.0  # steps that take longer are timed but once


@dataclass(frozen=True, kw_only=True)
class Contender:
    """How one plan is set up.

    Attributes:
        name: for a reader.
        options: of `CommPlan`.
        hook: registers a hook that is not ours.
        num_warm_up: steps until all that it does has been done once.
        share: of DDP's step that one of its own takes on a slow link, about; for what fits into the time.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    hook: Callable[[DistributedDataParallel], None] | None = None
    num_warm_up: int = 2
    share: float = 1.0


BASELINE = "ddp"
_QUICK: dict[str, Any] = {"static_graph": True, "gradient_as_bucket_view": True}
_LARGE: dict[str, Any] = {**_QUICK, "bucket_cap_mb": 100}
_POWERSGD: dict[str, Any] = {"name": "powersgd", "matrix_rank": 4}
PLANS: dict[str, Contender] = {
    "no_sync": Contender(name="nothing exchanged", options=_QUICK, hook=register_no_sync, share=0.1),
    BASELINE: Contender(name="DDP", num_warm_up=1),
    "torch_bf16": Contender(name="torch's bf16 hook", options=_QUICK, hook=register_bf16, num_warm_up=1, share=0.6),
    "bf16": Contender(name="ours, bf16", options={**_QUICK, "comm_hook": "bf16"}, num_warm_up=1, share=0.6),
    "int8": Contender(name="ours, int8", options={**_LARGE, "comm_hook": "int8"}, share=0.3),
    "int4": Contender(name="ours, int4", options={**_LARGE, "comm_hook": "int4"}, share=0.2),
    "torch_powersgd": Contender(
        name="torch's PowerSGD of rank 4",
        options=_LARGE,
        hook=partial(register_powersgd, matrix_rank=4),
        num_warm_up=3,
        share=0.2,
    ),
    "powersgd": Contender(name="ours, PowerSGD of rank 4", options={**_LARGE, "comm_hook": _POWERSGD}, share=0.1),
    "alternating": Contender(
        name="ours, alternating PowerSGD of rank 4",
        options={**_LARGE, "comm_hook": {**_POWERSGD, "name": "alternating_powersgd"}},
        num_warm_up=3,
        share=0.1,
    ),
}


class Turn(NamedTuple):
    """What one turn of a plan took on this rank, in seconds and bytes."""

    step_s: float
    host_s: float  # until the host was at the end of backward
    peak_bytes: int
    num_steps: int
    loss: float


class Ladder:
    """Runs plans one after another, and keeps what they took.

    Args:
        arguments: of the command line.
        device: of this rank.
    """

    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        self._arguments, self._device = arguments, device
        torch.manual_seed(dist.get_rank())
        self._images = torch.randn(arguments.batch_size, 3, IMAGE_SIZE, IMAGE_SIZE, device=device)
        self._labels = torch.randint(0, NUM_CLASSES, (arguments.batch_size,), device=device)
        self.turns: defaultdict[str, list[Turn]] = defaultdict(list)

    def run_turn(self, plan: str) -> None:
        """Trains a new model under a plan; all ranks must call it."""
        contender = PLANS[plan]
        options = CommPlan.from_dict(dict(contender.options))
        memory = PeakMemory(self._device)
        torch.manual_seed(0)  # the same on all ranks, so that nothing has to be sent
        with self._device:
            model = VisionTransformer(**SIZES[self._arguments.model])
        sends_nothing: dict[str, Any] = {"init_sync": False} if "init_sync" in ddp_options() else {}
        wrapped = DistributedDataParallel(model, **options.ddp_kwargs(), **sends_nothing)
        hook = None
        if contender.hook is not None:
            contender.hook(wrapped)
        elif options.comm_hook is not None:
            hook = attach_bucket_hook(wrapped, options.comm_hook, _TIMEOUT)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        warm_up_s = [self._step(wrapped, optimizer)[0] for _ in range(contender.num_warm_up)]
        num_steps = self._num_steps(warm_up_s[-1])
        times = [self._step(wrapped, optimizer) for _ in range(num_steps)]
        self.turns[plan].append(
            Turn(
                statistics.median(step_s for step_s, _, _ in times),
                statistics.median(host_s for _, host_s, _ in times),
                memory.num_bytes,
                num_steps,
                times[-1][2],
            )
        )
        if hook is not None:
            hook.close()
        unwrap(wrapped)

    def _num_steps(self, expected_s: float) -> int:
        longest = torch.tensor(expected_s, device=self._device)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        if longest.item() > _SLOW_S:
            return 1
        return int(max(2, min(_MAX_STEPS, self._arguments.turn_s / longest.item())))

    def _step(self, model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> tuple[float, float, float]:
        """Returns the seconds of a step, those until the host was at the end of backward, and the loss."""
        self._synchronize()
        start_s = time.perf_counter()
        with torch.autocast(self._device.type, torch.bfloat16):
            loss = F.cross_entropy(model(self._images), self._labels)
        loss.backward()
        host_s = time.perf_counter() - start_s
        optimizer.step()
        optimizer.zero_grad()
        self._synchronize()
        return time.perf_counter() - start_s, host_s, loss.item()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def is_enough(self, plan: str, left_s: float) -> bool:
        """Returns whether there is time for a turn of a plan, by what rank 0 expects of it."""
        own, baseline, contender = self.turns[plan], self.turns[BASELINE], PLANS[plan]
        step_s = own[-1].step_s if own else contender.share * baseline[-1].step_s if baseline else 0.0
        expected_s = (contender.num_warm_up + 1) * step_s
        answer = torch.tensor(left_s > expected_s, device=self._device, dtype=torch.int32)
        dist.broadcast(answer, src=0)
        return bool(answer.item())

    def known(self) -> list[str]:
        """Returns the plans that have had a turn."""
        return [plan for plan, turns in self.turns.items() if turns]

    def emit(self, plan: str) -> None:
        """Prints the row of a plan."""
        turns, baseline = self.turns[plan], self.turns[BASELINE]
        medians = [turn.step_s for turn in turns]
        step_s, last = statistics.median(medians), turns[-1]
        ratio = statistics.median(turn.step_s for turn in baseline) / step_s if baseline else None
        spread = f" ({1e3 * min(medians):.1f} to {1e3 * max(medians):.1f})" if len(medians) > 1 else ""
        against = "" if ratio is None or plan == BASELINE else f", {ratio:.2f} times as fast as DDP"
        result = (
            f"{1e3 * step_s:.1f} ms a step{spread}{against}; {len(turns)} turn(s) of {last.num_steps} step(s);"
            f" host at the end of backward after {1e3 * last.host_s:.0f} ms; peak {last.peak_bytes / 2**20:.0f} MiB"
        )
        emit(
            f"{self._arguments.link}: {PLANS[plan].name}",
            result,
            model=self._arguments.model,
            plan=plan,
            step_s=step_s,
            against_ddp=ratio,
            turns=[turn._asdict() for turn in turns],
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--share-gpu", action="store_true", help="known from the environment of the rank")
    parser.add_argument("--model", choices=SIZES, default="plain_vit_l_32")
    parser.add_argument("--link", default="without a limit", help="what rows call the link between ranks")
    parser.add_argument("--batch-size", type=positive, default=32, help="images in a batch of one rank")
    parser.add_argument("--num-turns", type=positive, default=3)
    parser.add_argument("--turn-s", type=float, default=2.0, help="of a plan, without its warm-up")
    parser.add_argument("--cases", required=True, help=f"plans with commas between them, of {', '.join(PLANS)}")
    arguments = parser.parse_args()
    if arguments.turn_s <= 0:
        parser.error(f"--turn-s must be above 0, got {arguments.turn_s:g}")
    if unknown := [name for name in arguments.cases.split(",") if name not in PLANS]:
        parser.error(f"--cases must be of {', '.join(PLANS)}, got {unknown[0]!r}")
    return arguments


def main() -> None:
    arguments = parse()
    warnings.filterwarnings("ignore")
    device = torch.device("cpu")
    if arguments.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    num_cores, num_ranks = len(os.sched_getaffinity(0)), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1 if device.type == "cpu" else max(1, num_cores // num_ranks))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_TIMEOUT)
    ladder = Ladder(arguments, device)
    for _ in range(arguments.num_turns):
        for plan in arguments.cases.split(","):
            if ladder.is_enough(plan, left_s() - _END_S):
                begin_case(plan, _CASE_LIMIT_S)
                ladder.run_turn(plan)
                for known in ladder.known() if plan == BASELINE else (plan,):  # ratios of all are to the baseline
                    ladder.emit(known)
            elif not ladder.turns[plan]:
                emit(f"{arguments.link}: {PLANS[plan].name}", "no time left", "not run")
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
