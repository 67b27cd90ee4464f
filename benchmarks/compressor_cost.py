"""Cost of each comm hook on one bucket, without a network: against torch's hooks, and in passes over memory.

One process, one rank. DDP makes one bucket of all gradients; in every step another hook gets it, in turns, so that a
drift of the machine hits all. What is timed is the hook alone, from its call to its future. A pass is one copy of the
bucket, timed in the same turn. Our compressors send through a channel that does nothing and claims to have
`--world-size` ranks, so that their arithmetic is that of one of so many; torch's hooks use a group of one rank.

On CUDA (`--device cuda`) times are those of events around the hook, and synchronisations of the host with the device
are counted. There a plan should take no longer than its bytes do at the bandwidth of the copy.

python benchmarks/compressor_cost.py --output benchmarks/results/compressor_cost_HARDWARE_DATE.json
python benchmarks/compressor_cost.py --device cuda --model vit_l_32 --output ...
"""

import argparse
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from gpu_models import SIZES, VisionTransformer
from results_file import median_with_interval, settings_of, write_result
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch_hooks import done

from lightning_commopt.compressors import Layout, compressor_from_config
from lightning_commopt.compressors.channel import Channel, Pending

Hook = Callable[[dist.GradBucket], torch.futures.Future[Tensor]]


class SilentChannel(Channel):
    """Sends nothing, as if the peers' messages were this rank's own.

    Args:
        size: ranks that it claims to have.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.rank = 0
        self.within = self.across = None
        self._scratch, self._lanes = {}, None
        self._rows: dict[tuple[int, torch.dtype], Tensor] = {}

    def all_reduce(self, tensor: Tensor) -> Pending:
        """Leaves the tensor as it is."""
        return Pending(tensor, [])

    def all_to_all(self, message: Tensor) -> Pending:
        """Gives the message back."""
        return Pending(message, [])

    def all_gather(self, part: Tensor) -> Pending:
        """Gives as many rows as there are ranks, all of them from the first call."""
        key = part.numel(), part.dtype
        if key not in self._rows:
            self._rows[key] = part.repeat(self.size, 1)
        return Pending(self._rows[key], [])


class Contender(NamedTuple):
    """A hook that is timed.

    Attributes:
        comm_hook: configuration of one of our compressors, or None.
        torch_hook: makes one of torch's hooks, or None.
        bytes_per_gradient: that the arithmetic reads and writes at the least, of float32 gradients in large matrices:
            a copy is 8.
    """

    comm_hook: Any = None
    torch_hook: Callable[[], Hook] | None = None
    bytes_per_gradient: float | None = None


def torch_powersgd(matrix_rank: int) -> Hook:
    """Returns torch's PowerSGD, started at once."""
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=matrix_rank, start_powerSGD_iter=2)
    return lambda bucket: powerSGD_hook.powerSGD_hook(state, bucket)


def torch_bf16(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Runs torch's bf16 hook in the default group."""
    return default_hooks.bf16_compress_hook(None, bucket)  # type: ignore[arg-type]


# Two-round: read bucket and residual and write their sum (12), read that (4), write the mean (4). Alternating: the
# first and the last of these. Casts: read 4, write 2; read 2, write 4. int8 with two ranks: read 4, write 1; read 1,
# write 1/2; read 1, write 4; int4 half of what is not 4. With error feedback read and write a residual too, and that of
# one half twice (12).
PLANS: dict[str, Contender] = {
    "torch bf16": Contender(torch_hook=lambda: torch_bf16),
    "torch powersgd rank 1": Contender(torch_hook=lambda: torch_powersgd(1)),
    "torch powersgd rank 4": Contender(torch_hook=lambda: torch_powersgd(4)),
    "bf16": Contender("bf16", bytes_per_gradient=12),
    "bf16, sum in float32": Contender({"name": "bf16", "accumulate": "float32"}),
    "bf16, error feedback": Contender({"name": "error_feedback", "inner": "bf16"}),
    "powersgd rank 1": Contender({"name": "powersgd"}, bytes_per_gradient=20),
    "powersgd rank 4": Contender({"name": "powersgd", "matrix_rank": 4}, bytes_per_gradient=20),
    "alternating rank 1": Contender({"name": "alternating_powersgd"}, bytes_per_gradient=16),
    "alternating rank 4": Contender({"name": "alternating_powersgd", "matrix_rank": 4}, bytes_per_gradient=16),
    "int8": Contender({"name": "int8", "error_feedback": False}, bytes_per_gradient=11.5),
    "int8, error feedback": Contender({"name": "int8"}, bytes_per_gradient=23.5),
    "int4": Contender("int4", bytes_per_gradient=9.7),
    "int4, error feedback": Contender({"name": "int4", "error_feedback": True}, bytes_per_gradient=21.7),
}


def our_hook(config: Any, world_size: int) -> Hook:
    """Returns a hook that runs one of our compressors to its end, in the thread that calls it."""
    compressor, channel = compressor_from_config(config), SilentChannel(world_size)
    assert compressor is not None
    states: dict[int, tuple[Layout, dict[str, Any]]] = {}

    def reduce(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        flat = bucket.buffer()
        if bucket.index() not in states:
            layout = Layout.of(bucket.parameters(), flat.dtype)
            states[bucket.index()] = layout, compressor.init(layout, flat.device)
        layout, state = states[bucket.index()]
        rounds = compressor.rounds(flat, layout, state, channel)
        try:
            pending = next(rounds)
            while True:
                pending = rounds.send(pending.wait())
        except StopIteration:
            return done(flat)

    return reduce


class Matrices(nn.Module):
    """25 M elements of matrices as in two blocks of a large vision transformer, in one bucket."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(3072, 1024), (1024, 1024), (4096, 1024), (1024, 4096)] * 2
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape) / 32) for shape in shapes)


class Stopwatch:
    """Times calls, and on CUDA counts the host's synchronisations with the device in them.

    Args:
        device: where the work is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self.seconds: dict[str, list[float]] = {}
        self.syncs: dict[str, int] = {}

    def time(self, name: str, call: Callable[[], Any]) -> Any:
        """Returns what ``call`` returns."""
        if not self._on_cuda:
            start = time.perf_counter()
            result = call()
            self.seconds.setdefault(name, []).append(time.perf_counter() - start)
            return result
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            begin.record()
            result = call()
            end.record()
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        self.seconds.setdefault(name, []).append(begin.elapsed_time(end) / 1e3)
        self.syncs[name] = sum("synchroniz" in str(warning.message) for warning in caught)
        return result


def measure(arguments: argparse.Namespace) -> Stopwatch:
    """Runs all turns; the first two do not count."""
    device = torch.device(arguments.device)
    torch.manual_seed(0)
    if arguments.model == "matrices":
        module: nn.Module = Matrices()
    elif arguments.model in SIZES:
        module = VisionTransformer(**SIZES[arguments.model])
    else:
        from torchvision.models import get_model

        module = get_model(arguments.model, weights=None)
    module = module.to(device)
    gradients = [torch.randn_like(parameter) * 1e-3 for parameter in module.parameters()]
    module.forward = lambda: sum(
        (parameter * gradient).sum() for parameter, gradient in zip(module.parameters(), gradients, strict=True)
    )
    model = DistributedDataParallel(module, bucket_cap_mb=1e6, gradient_as_bucket_view=True)
    hooks = {
        name: plan.torch_hook() if plan.torch_hook else our_hook(plan.comm_hook, arguments.world_size)
        for name, plan in PLANS.items()
        if name in arguments.plans
    }
    stopwatch = Stopwatch(device)
    turn_of: dict[str, Any] = {"plan": "", "counts": False}

    def dispatch(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        name, watch = turn_of["plan"], stopwatch if turn_of["counts"] else Stopwatch(device)
        other = bucket.buffer().clone()
        watch.time("copy", lambda: other.copy_(bucket.buffer()))
        return done(watch.time(name, lambda: hooks[name](bucket).wait()))

    model.register_comm_hook(None, dispatch)
    for turn in range(arguments.num_turns + 3):
        for name in hooks:
            turn_of.update(plan=name, counts=turn >= 3)  # torch's PowerSGD starts with its third step
            model.zero_grad()
            model().backward()
    return stopwatch


def summary(stopwatch: Stopwatch) -> dict[str, dict[str, Any]]:
    """Returns per plan the milliseconds, the passes, the share of its bytes' time, and synchronisations."""
    copy = median_with_interval(stopwatch.seconds["copy"])
    rows: dict[str, dict[str, Any]] = {"copy": {"ms": {key: 1e3 * value for key, value in copy.items()}}}
    for name, plan in PLANS.items():
        if name not in stopwatch.seconds:
            continue
        time_s = median_with_interval(stopwatch.seconds[name])
        rows[name] = {
            "ms": {key: 1e3 * value for key, value in time_s.items()},
            "passes": {key: value / copy["median"] for key, value in time_s.items()},
            "times_its_bytes": plan.bytes_per_gradient
            and time_s["median"] / copy["median"] / (plan.bytes_per_gradient / 8),
            "synchronisations": stopwatch.syncs.get(name),
        }
    return rows


def print_table(rows: dict[str, dict[str, Any]]) -> None:
    """Prints one row a plan."""
    table = Table()
    for heading in ("hook", "ms", "95 % interval", "passes", "x its bytes", "syncs"):
        table.add_column(heading, no_wrap=True)
    for name, row in rows.items():
        ms, share, syncs = row["ms"], row.get("times_its_bytes"), row.get("synchronisations")
        table.add_row(
            name,
            f"{ms['median']:.2f}",
            f"{ms['low_95']:.2f}-{ms['high_95']:.2f}",
            f"{row['passes']['median']:.2f}" if "passes" in row else "1",
            "-" if share is None else f"{share:.2f}",
            "-" if syncs is None else str(syncs),
        )
    Console(width=max(100, Console().width)).print(table)


def main() -> None:
    """Measures, prints a table and stores the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--model", default="matrices", help=f"'matrices' (25 M elements), {', '.join(SIZES)}, or any of torchvision"
    )
    parser.add_argument("--world-size", type=int, default=2, help="ranks that our compressors reckon with")
    parser.add_argument("--num-turns", type=int, default=25)
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS), metavar="PLAN")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    backend = "nccl" if arguments.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    rows = summary(measure(arguments))
    dist.destroy_process_group()
    print_table(rows)
    if arguments.output:
        write_result(arguments.output, {"settings": settings_of(arguments, "plans"), "hooks": rows}, load)


if __name__ == "__main__":
    main()
