"""What makes 4-bit gradients faithful: `int4` beside other ways of rounding, on the small GPT.

Simulates data parallelism in one process: the gradients of each rank's micro-batch are computed one after the other,
rounded, averaged, and the mean is rounded again, as `compressors/blockwise.py` does with a network between. `int4` and
`int8` go through the package's own kernels. Model, data, seeds and steps are those of `quality.py --tasks gpt`.

The difference to the uncompressed run of the same seed is what a variant costs, and luck: "perturbed" is the same with
gradients that are off by a millionth. "Error" is that of the mean of the step's gradients, relative and in the 2-norm,
averaged over the steps of a run. "EF" is error feedback.

python benchmarks/int4_variants.py --output benchmarks/results/int4_variants_HARDWARE_DATE.json
"""

import argparse
import math
import os
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import seed_everything
from results_file import write_result
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

from lightning_commopt.compressors.kernels import blockwise
from lightning_commopt.compressors.kernels.blockwise_format import INT4_CURVE, MIN_SCALE, BlockFormat
from lightning_commopt.train.workloads.gpt import GPT, StdlibSources

BASELINE = "none"
NUM_RANKS = 2
NUM_VALIDATION_BATCHES = 40  # of each rank
# Dettmers et al., QLoRA (arXiv:2305.14314), appendix E.
NF4 = torch.tensor([-1, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0, 0.0796, 0.1609, 0.2461, 0.3379])
NF4 = torch.cat([NF4, torch.tensor([0.4407, 0.5626, 0.7230, 1])])
E2M1 = torch.tensor([-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6]) / 6


class Rounding(NamedTuple):
    """Maps ``(n,)`` to what arrives of it, with so many bits for each element; all block sizes divide ``n``."""

    bits: float
    apply: Callable[[Tensor], Tensor]


def packaged(bits: int, block_size: int) -> Rounding:
    """Returns the rounding of the package."""
    block_format = BlockFormat(bits, block_size)

    def apply(flat: Tensor) -> Tensor:
        message = torch.empty(1, block_format.shard_bytes(flat.numel(), 1), dtype=torch.uint8)
        blockwise.encode(flat, None, message, block_format)
        sent = torch.empty_like(flat)
        blockwise.decode(message, sent, block_format)
        return sent

    return Rounding(8 * block_format.block_bytes / block_size, apply)


def perturbed(rounding: Rounding) -> Rounding:
    """Returns ``rounding`` of elements that are off by a millionth."""
    return Rounding(rounding.bits, lambda flat: rounding.apply(flat + 1e-6 * flat * torch.randn_like(flat)))


def to_levels(
    levels: Tensor,
    block_size: int = 32,
    *,
    has_sign: bool = False,
    scale_bits: int = 16,
    shrinks: tuple[float, ...] = (1.0,),
    noise: float = 0.0,
) -> Rounding:
    """Returns a rounding of each element to the nearest level times the largest magnitude of its block.

    Args:
        levels: ascending, from -1 on.
        block_size: of elements that share a scale.
        has_sign: the scale has the sign that makes the largest element -1; levels need not reach 1.
        scale_bits: 16 for bfloat16, 8 for powers of two in steps of 1/8.
        shrinks: factors of the scale; each block takes that with the least squared error.
        noise: added before an element is rounded, uniform and this wide, in units of the scale.
    """
    bounds = ((levels[1:] + levels[:-1]) / 2).tolist()

    def apply(flat: Tensor) -> Tensor:
        blocks = flat.view(-1, block_size)
        lowest, top = blocks.amin(1, keepdim=True), blocks.abs().amax(1, keepdim=True).clamp_min(MIN_SCALE)
        sign = torch.where(lowest == -top, 1.0, -1.0) if has_sign else 1.0
        best, least = blocks, torch.full_like(top, torch.inf)
        for shrink in shrinks:
            scale = top * shrink
            scale = (scale.bfloat16().float() if scale_bits == 16 else torch.exp2((8 * scale.log2()).ceil() / 8)) * sign
            values = blocks / scale
            if noise:
                values += noise * (torch.rand_like(values) - 0.5)
            codes = torch.zeros(values.shape, dtype=torch.uint8)
            for bound in bounds:  # three times as fast as torch.bucketize
                codes += values > bound
            sent = levels.index_select(0, codes.int().view(-1)).view_as(blocks) * scale
            error = (sent - blocks).square().sum(1, keepdim=True)
            best, least = torch.where(error < least, sent, best), torch.minimum(error, least)
        return best.view(-1)

    return Rounding(math.ceil(math.log2(len(levels))) + scale_bits / block_size, apply)


def rotated(rounding: Rounding, size: int) -> Rounding:
    """Returns ``rounding`` after random signs and a Hadamard matrix over ``size`` elements at a time."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix) / math.sqrt(2)

    def apply(flat: Tensor) -> Tensor:
        signs = torch.randint(0, 2, (size,)) * 2.0 - 1
        sent = rounding.apply(((flat.view(-1, size) * signs) @ matrix).view(-1))
        return ((sent.view(-1, size) @ matrix) * signs).view(-1)

    return Rounding(rounding.bits, apply)


def quadratic(bits: int) -> Tensor:
    """Returns levels along the curve of int4's, from -1 on."""
    codes = torch.arange(-(2 ** (bits - 1)), 2 ** (bits - 1))
    levels = codes * (codes.abs() + INT4_CURVE * 2 ** (bits - 4))
    return levels / -levels[0]


class Variant(NamedTuple):
    """How ranks average their gradients."""

    share: Rounding  # of what each rank sends
    mean: Rounding | None = None  # None for that of the shares
    kept: float = 0.0  # of the residual, in the next step: 0 without error feedback
    small_in_int8: bool = False  # embeddings and one-dimensional parameters


EXACT, INT4, INT8 = Rounding(32, lambda flat: flat), packaged(4, 32), packaged(8, 128)
SEVENTHS = torch.arange(-7, 8) / 7
EVEN, NORMAL = to_levels(SEVENTHS), to_levels(NF4)
VARIANTS = {
    BASELINE: Variant(EXACT),
    "none, perturbed": Variant(perturbed(EXACT)),
    "int8 + EF": Variant(INT8, kept=1.0),
    "int4": Variant(INT4),
    "int4, perturbed": Variant(perturbed(INT4)),
    "int4 + EF": Variant(INT4, kept=1.0),
    "int4 + EF, residual halved": Variant(INT4, kept=0.5),
    "int4, mean in int8": Variant(INT4, INT8),
    "int4, embeddings and 1-D in int8": Variant(INT4, small_in_int8=True),
    "int4's curve, 16 with 8-bit scale": Variant(to_levels(quadratic(4), 16, has_sign=True, scale_bits=8)),
    "int4's curve, 5 bits": Variant(to_levels(quadratic(5), has_sign=True)),
    "even": Variant(EVEN),
    "even + EF": Variant(EVEN, kept=1.0),
    "even, scale with sign": Variant(to_levels(torch.arange(-8, 8) / 8, has_sign=True)),
    "even, fitted scale": Variant(to_levels(SEVENTHS, shrinks=(1.0, 0.9, 0.8, 0.7, 0.6))),
    "even, rounded at random": Variant(to_levels(SEVENTHS, noise=1 / 7)),
    "even, 16 with 8-bit scale": Variant(to_levels(SEVENTHS, 16, scale_bits=8)),
    "even, Hadamard of 32": Variant(rotated(EVEN, 32)),
    "even, Hadamard of 128": Variant(rotated(EVEN, 128)),
    "NF4": Variant(NORMAL),
    "NF4 + EF": Variant(NORMAL, kept=1.0),
    "FP4": Variant(to_levels(E2M1)),
}


class Exchange:
    """Averages gradients over simulated ranks; ``is_small`` ``(n,)``: those of embeddings and 1-D parameters."""

    def __init__(self, variant: Variant, is_small: Tensor) -> None:
        self._kept = variant.kept
        self._in_int8 = is_small if variant.small_in_int8 else None
        self._share, self._mean = variant.share, variant.mean or variant.share
        self._residuals = torch.zeros(NUM_RANKS, is_small.numel())
        self.errors: list[float] = []  # of each step's mean, relative
        in_int8 = 0.0 if self._in_int8 is None else is_small.float().mean().item()
        self.bits = in_int8 * INT8.bits + (1 - in_int8) * (self._share.bits + self._mean.bits) / 2

    def average(self, gradients: Tensor) -> Tensor:
        """Returns the mean ``(n,)`` of ``gradients`` ``(W, n)``, rounded twice."""
        corrected = gradients + self._residuals
        shares = torch.stack([self._round(each, self._share) for each in corrected])
        average = shares.mean(0)
        mean = self._round(average, self._mean)
        if self._kept:
            self._residuals = corrected - shares
            # Each rank averages one shard, and keeps what all ranks lose there.
            own_shards = self._residuals.view(NUM_RANKS, NUM_RANKS, -1).diagonal().T
            own_shards += NUM_RANKS * (average - mean).view(NUM_RANKS, -1)
            self._residuals *= self._kept
        wanted = gradients.mean(0)
        self.errors.append(((mean - wanted).norm() / wanted.norm()).item())
        return mean

    def _round(self, flat: Tensor, rounding: Rounding) -> Tensor:
        sent = rounding.apply(flat)
        return sent if self._in_int8 is None else torch.where(self._in_int8, INT8.apply(flat), sent)


def loss_of(model: GPT, batch: Tensor) -> Tensor:
    """Returns the mean loss of a batch ``(B, T + 1)``."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def batches_of(rank: int, data: StdlibSources, seed: int) -> Iterator[Tensor]:
    """Returns the batches that Lightning gives a rank in the first epoch."""
    dataset = data.train_dataloader().dataset
    sampler: DistributedSampler[Tensor] = DistributedSampler(dataset, NUM_RANKS, rank, shuffle=True, seed=seed)
    return iter(DataLoader(dataset, batch_size=data.batch_size, sampler=sampler, drop_last=True))


def train(variant: Variant, seed: int, num_steps: int) -> dict[str, float]:
    """Makes one run; returns its last validation loss, the bits per element of both rounds, and the error."""
    seed_everything(seed, verbose=False)
    model, data = GPT(context=64), StdlibSources(context=64)
    data.setup("fit")
    trainer: Any = SimpleNamespace(estimated_stepping_batches=num_steps)
    model.trainer = trainer
    configured: Any = model.configure_optimizers()
    parameters = dict(model.named_parameters())
    small = {name for name, p in parameters.items() if p.ndim == 1} | {"token.weight", "position.weight"}
    is_small = torch.cat([torch.full((p.numel(),), name in small) for name, p in parameters.items()])
    exchange = Exchange(variant, is_small)
    steps = zip(*(batches_of(rank, data, seed) for rank in range(NUM_RANKS)), strict=True)
    for batches in islice(steps, num_steps):
        of_ranks = [torch.autograd.grad(loss_of(model, batch), list(parameters.values())) for batch in batches]
        mean = exchange.average(torch.stack([torch.cat([g.flatten() for g in gradients]) for gradients in of_ranks]))
        for p, gradient in zip(parameters.values(), mean.split([p.numel() for p in parameters.values()]), strict=True):
            p.grad = gradient.view_as(p)
        configured["optimizer"].step()
        configured["lr_scheduler"]["scheduler"].step()
    with torch.inference_mode():
        validation = islice(data.val_dataloader(), NUM_RANKS * NUM_VALIDATION_BATCHES)
        loss = torch.stack([loss_of(model, batch) for batch in validation]).mean().item()
    return {"loss": loss, "bits": exchange.bits, "error": float(np.mean(exchange.errors))}


def summary(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns per variant the differences to the uncompressed run of the same seed; of those, to their mean."""
    losses = {run["seed"]: run["loss"] for run in runs if run["variant"] == BASELINE}
    rows = {}
    for name in dict.fromkeys(run["variant"] for run in runs):
        of_name = [run for run in runs if run["variant"] == name]
        targets = dict.fromkeys(losses, np.mean(list(losses.values()))) if name == BASELINE else losses
        rows[name] = {
            "difference_percent": [float(100 * (run["loss"] / targets[run["seed"]] - 1)) for run in of_name],
            "bits": of_name[0]["bits"],
            "error": float(np.mean([run["error"] for run in of_name])),
        }
    return rows


def print_table(rows: dict[str, dict[str, Any]], num_steps: int) -> None:
    """Prints one row a variant."""
    table = Table(title=f"Small GPT: validation loss after {num_steps} steps, to the uncompressed run of the same seed")
    for heading in ("variant", "mean", "min to max", "bits", "error of the mean"):
        table.add_column(heading, no_wrap=True)
    for name, row in rows.items():
        all_of_it = row["difference_percent"]
        span = f"{min(all_of_it):+.2f} to {max(all_of_it):+.2f}"
        table.add_row(name, f"{np.mean(all_of_it):+.2f} %", span, f"{row['bits']:.2f}", f"{100 * row['error']:.1f} %")
    Console(width=max(100, Console().width)).print(table)


def main() -> None:
    """Trains, one seed after another, prints a table and stores the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-seeds", type=int, default=3, help="stored after each")
    parser.add_argument("--num-steps", type=int, default=600)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="VARIANT")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if BASELINE not in arguments.variants:
        parser.error(f"--variants must hold {BASELINE!r}, to compare with")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
    load, runs = os.getloadavg()[0], []
    settings = {key: value for key, value in vars(arguments).items() if key != "output"}
    for seed in range(arguments.num_seeds):
        for name in arguments.variants:
            runs.append({"variant": name, "seed": seed, **train(VARIANTS[name], seed, arguments.num_steps)})
            print(f"seed {seed}, {name}: loss {runs[-1]['loss']:.4f}", flush=True)
        rows = summary(runs)
        if arguments.output:
            write_result(arguments.output, {"settings": settings, "summary": rows, "runs": runs}, load)
    print_table(rows, arguments.num_steps)


if __name__ == "__main__":
    main()
