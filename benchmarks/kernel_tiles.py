"""How fast our Triton kernels are on this GPU with tiles of other sizes: which constants they should have.

Each kernel runs on tensors that do not fit in the cache, with every size of its tiles and number of warps; a line has
the best mean of four launches out of three, and the bandwidth for the bytes that the kernel reads and writes. ``copy``
is torch's copy of float32. Compiling them all takes minutes on one core, which others can take off it beforehand:

for i in 0 1 2 3; do python benchmarks/kernel_tiles.py --compile-part $i --num-parts 4 & done; wait
python benchmarks/kernel_tiles.py --output benchmarks/results/kernel_tiles_HARDWARE_DATE.json
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from results_file import write_result
from torch import Tensor

from lightning_commopt.compressors.kernels import (
    blockwise_triton,
    elementwise_triton,
    low_rank_tiles_triton,
    low_rank_triton,
)
from lightning_commopt.compressors.kernels.blockwise_format import BlockFormat, Undo
from lightning_commopt.compressors.kernels.factors import Matrix, Parts, factors_numel

SHAPES = ((3072, 1024), (1024, 1024), (4096, 1024), (1024, 4096))  # of a large transformer
_NUM_LAUNCHES, _NUM_TURNS = 4, 3


class Job(NamedTuple):
    """A kernel with tiles of one size.

    Attributes:
        kernel: in words.
        tile: its size, in words.
        num_bytes: that it reads and writes.
        prepare: sets the size.
        launch: launches it.
    """

    kernel: str
    tile: str
    num_bytes: float
    prepare: Callable[[], None]
    launch: Callable[[], Any]


def of_elements(flat: Tensor, residual: Tensor) -> Iterator[Job]:
    """Yields the kernels of `elementwise`."""
    n, half, yes = flat.numel(), flat.bfloat16(), torch.ones((), dtype=torch.bool, device=flat.device)
    rows = half.view(2, -1)
    kernels: list[tuple[str, float, Callable[[], Any]]] = [
        ("bfloat16 to float32", 6 * n, lambda: elementwise_triton.convert(half, residual)),
        ("narrow", 6 * n, lambda: elementwise_triton.narrow(flat, None, 0.5, half)),
        ("narrow, residual", 10 * n, lambda: elementwise_triton.narrow(flat, residual, 0.5, half)),
        ("widen, residual", 18 * n, lambda: elementwise_triton.widen(flat, residual, half, 0.5, yes)),
        ("sum_rows", 3 * n, lambda: elementwise_triton.sum_rows(rows, None, half[: n // 2], torch.float32)),
    ]
    yield Job("copy", "torch", 8 * n, lambda: None, lambda: residual.copy_(flat))
    yield Job("bfloat16 to float32", "torch", 6 * n, lambda: None, lambda: residual.copy_(half))
    for block, num_warps in product((1024, 2048, 4096, 8192), (4, 8)):
        if block >= 128 * num_warps:
            prepare = setting(elementwise_triton, _BLOCK=block, _NUM_WARPS=num_warps)
            for kernel, num_bytes, launch in kernels:
                yield Job(kernel, f"{block}, {num_warps} warps", num_bytes, prepare, launch)


def of_blocks(flat: Tensor, residual: Tensor, block_format: BlockFormat) -> Iterator[Job]:
    """Yields the kernels of `blockwise`, for two ranks."""
    n, bits = flat.numel(), block_format.bits
    row_bytes = block_format.shard_bytes(n, 2)
    sent, received = (torch.zeros(2, row_bytes, dtype=torch.uint8, device=flat.device) for _ in range(2))
    mean, own = sent[0].clone(), residual[: n // 2]
    undo = Undo(sent, received, mean, residual, 0, torch.ones(32, dtype=torch.bool, device=flat.device))
    code = 2.0 * row_bytes
    kernels: list[tuple[str, float, Callable[[], Any]]] = [
        ("encode", 4 * n + code, lambda: blockwise_triton.encode(flat, None, sent, block_format)),
        ("encode, residual", 12 * n + code, lambda: blockwise_triton.encode(flat, residual, sent, block_format)),
        ("reduce", 1.5 * code, lambda: blockwise_triton.reduce(received, mean, None, block_format)),
        ("reduce, residual", 4 * n + 1.5 * code, lambda: blockwise_triton.reduce(received, mean, own, block_format)),
        ("decode", 4 * n + code, lambda: blockwise_triton.decode(sent, flat, block_format)),
        ("decode, residual", 4 * n + code, lambda: blockwise_triton.decode(sent, flat, block_format, undo)),
    ]
    for tile, num_warps in product((1024, 2048, 4096, 8192), (2, 4, 8)):
        if 8 <= tile // (32 * num_warps) <= 32:
            prepare = setting(blockwise_triton, _TILE_NUMEL=tile, _NUM_WARPS=num_warps)
            for kernel, num_bytes, launch in kernels:
                yield Job(f"int{bits}: {kernel}", f"{tile}, {num_warps} warps", num_bytes, prepare, launch)


def of_matrices(flat: Tensor, residual: Tensor, r: int) -> Iterator[Job]:
    """Yields the kernels of `low_rank`, with loops that are unrolled and loops that are not."""
    start, matrices = 0, list[Matrix]()
    while start + sum(m * k for m, k in SHAPES) <= flat.numel() and len(matrices) < 20:
        for m, k in SHAPES:
            matrices.append(Matrix(start, m, k, r))
            start += m * k
    parts, yes = Parts(tuple(matrices)), torch.ones((), dtype=torch.bool, device=flat.device)
    p, q = (torch.randn(factors_numel(shapes), device=flat.device) for shapes in (parts.p_shapes, parts.q_shapes))
    sent, products = (p.clone(), q.clone()), {True: p.clone(), False: q.clone()}

    def compress(by_rows: bool, is_folded: bool) -> Callable[[], None]:
        kept, factors = (residual, sent) if is_folded else (None, None)
        return lambda: low_rank_triton.compress(
            flat, kept, parts, factors, q if by_rows else p, products[by_rows], None, 0.5, by_rows
        )

    sides = ((64, 64), (128, 64), (64, 128), (128, 32), (32, 128), (256, 32))
    for by_rows, (m, k), num_warps, limit in product((True, False, None), sides, (2, 4, 8), (8, 0)):
        if not 16 <= m * k // (32 * num_warps) <= 64:
            continue
        tiles = {is_unrolled: {by_rows: (m, k, num_warps)} for is_unrolled in (True, False)}
        prepare = setting(low_rank_tiles_triton, _TILES=tiles, _MAX_UNROLLED=limit)
        tile = f"{m} x {k}, {num_warps} warps, {'unrolled' if limit else 'loops'}"
        if by_rows is None:
            write = lambda: low_rank_triton.decompress(flat, residual, parts, sent, (p, q), p, yes)  # noqa: E731
            yield Job(f"rank {r}: decompress", tile, 4 * start, prepare, write)
            continue
        way = "by rows" if by_rows else "by columns"
        yield Job(f"rank {r}: compress {way}, residual", tile, 12 * start, prepare, compress(by_rows, True))
        yield Job(f"rank {r}: compress {way}", tile, 4 * start, prepare, compress(by_rows, False))


def setting(module: Any, **constants: Any) -> Callable[[], None]:
    """Returns a function that gives a module other constants, and forgets the plans that were made with the last."""

    def prepare() -> None:
        for name, value in constants.items():
            setattr(module, name, value)
        low_rank_tiles_triton.plan_for.cache_clear()

    return prepare


def all_jobs(numel: int) -> Iterator[Job]:
    """Yields all kernels, on a bucket of so many elements."""
    torch.manual_seed(0)
    flat, residual = (1e-3 * torch.randn(numel, device="cuda") for _ in range(2))
    yield from of_elements(flat, residual)
    for block_format in (BlockFormat(8, 128), BlockFormat(4, 32)):
        yield from of_blocks(flat, residual, block_format)
    for r in (4, 1):
        yield from of_matrices(flat, residual, r)


def measure(job: Job) -> float:
    """Returns the seconds of a launch."""
    seconds = []
    for turn in range(_NUM_TURNS + 1):  # the first one warms up
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(_NUM_LAUNCHES):
            job.launch()
        end.record()
        torch.cuda.synchronize()
        if turn:
            seconds.append(begin.elapsed_time(end) / 1e3 / _NUM_LAUNCHES)
    return min(seconds)


def main() -> None:
    """Measures, prints a line for each kernel and size, and stores the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=304 * 2**20, help="elements of the bucket")
    parser.add_argument("--compile-part", type=int, help="only compile this part of the kernels, from 0 on")
    parser.add_argument("--num-parts", type=int, default=1)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here, which all of this needs")
    if arguments.compile_part is not None:
        for at, job in enumerate(all_jobs(2**24)):
            if at % arguments.num_parts == arguments.compile_part:
                job.prepare()
                job.launch()
        torch.cuda.synchronize()
        return
    load, rows = os.getloadavg()[0], []
    for job in all_jobs(arguments.numel):
        job.prepare()
        seconds = measure(job)
        rows.append({"kernel": job.kernel, "tile": job.tile, "ms": 1e3 * seconds, "bytes": job.num_bytes})
        print(
            f"{job.kernel}; {job.tile}: {1e3 * seconds:.3f} ms, {job.num_bytes / seconds / 1e12:.2f} TB/s", flush=True
        )
        if arguments.output:
            write_result(arguments.output, {"settings": {"numel": arguments.numel}, "kernels": rows}, load)


if __name__ == "__main__":
    main()
