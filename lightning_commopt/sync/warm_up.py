"""Runs a compressor without other ranks, so that its kernels are compiled before the first backward."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commopt.compressors import Compressor, Layout
from lightning_commopt.compressors.base import finish
from lightning_commopt.compressors.channel import AloneChannel, Channel
from lightning_commopt.compressors.kernels import c_library, dispatch
from lightning_commopt.compressors.shards import ShardedCompressor
from lightning_commopt.text.validation import warn_once

_NUM_STEPS = 2  # two steps cover both kinds of steps of a compressor that alternates
_FIRST_STEPS = (0, 2**30)  # with a late start of compression, the first is before the start and the second after it
# Triton specialises kernels on whether addresses, offsets and sizes are multiples of 2, 4 or 16, so the shapes cover
# these cases. The matrices are large enough to be compressed at every sensible matrix rank.
_SHAPES = (
    ((512, 320), (64,)),
    ((257, 513), (7,)),
    ((384, 258), (384, 258)),
    ((7,), (512, 320)),
    ((7,), (257, 513), (5,)),
)
_LARGEST_BLOCK = 256  # the largest ``block_size`` that `BlockInt8` and `BlockInt4` allow
SHARD_SIZES = (1, 16 * _LARGEST_BLOCK)
"""Sizes of shards, in elements, that together need all kernels: within a single block, and a multiple of 16 blocks."""


def prepare_kernels(
    run: Callable[[], None], device: torch.device, *, has_c_kernels: bool = True, option: str = "comm_hook"
) -> None:
    """Compiles the kernels that ``run`` needs: the C kernels on CPU, else the Triton kernels; see `compile_kernels`."""
    if device.type != "cpu":
        compile_kernels(run, device, option=option)
    elif has_c_kernels:
        c_library.load()


def compile_kernels(
    run: Callable[[], None], device: torch.device, group: dist.ProcessGroup | None = None, *, option: str = "comm_hook"
) -> None:
    """Compiles the Triton kernels that ``run`` needs. All ranks must call it.

    If one rank of ``group`` cannot compile them, no rank uses Triton, because Triton and plain torch do not compute the
    same bits. The warning about that names ``option`` as the option that needs the kernels.
    """
    had_triton = dispatch.has_triton()
    error = _try_triton(run) if had_triton else None
    works = torch.tensor(had_triton and error is None, dtype=torch.int32, device=device)
    dist.all_reduce(works, dist.ReduceOp.MIN, group=group)
    if had_triton and not works.item():
        dispatch.do_without_triton()
        first_line = str(error).strip().partition("\n")[0]
        reason = "on another rank" if error is None else f"{type(error).__name__}: {first_line}"
        warn_once(
            f"Triton cannot compile the kernels of {option} ({reason}): all ranks compute in plain torch, which takes"
            " longer and waits for the device in every bucket. Triton before 3.5 needs a C compiler, such as gcc."
        )


def _try_triton(run: Callable[[], None]) -> Exception | None:
    """Returns the exception that Triton raises; None if plain torch raises too, which is the compressor's own error."""
    try:
        run()
    except Exception as error:
        try:
            with dispatch.in_plain_torch():
                run()
        except Exception:
            return None
        return error
    return None


def run_on_samples(
    compressor: Compressor, channel: Channel, dtypes: Collection[torch.dtype], device: torch.device
) -> None:
    """Runs a compressor on small buckets that together need all its kernels; see `run_alone`."""
    with torch.no_grad():
        for dtype in floating_point(dtypes):
            for shapes in (*_SHAPES, ((channel.size, 16 * _LARGEST_BLOCK),)):  # the last one has 16 blocks per shard
                layout = Layout.of([torch.empty(shape, device="meta") for shape in shapes], dtype)
                for first_step in _FIRST_STEPS:
                    flat = torch.ones(layout.numel, dtype=dtype, device=device)
                    run_alone(compressor, layout, flat, channel, first_step)


def run_alone(compressor: Compressor, layout: Layout, flat: Tensor, channel: Channel, first_step: int = 0) -> None:
    """Runs two steps, and one with a residual, as if all ranks had the same gradients; sends nothing."""
    state, alone = compressor.init(layout, flat.device, first_step), AloneChannel.like(channel)
    for carried in (*[None] * _NUM_STEPS, torch.zeros_like(flat)):
        finish(compressor.rounds(flat, layout, state, alone, carried))
    compressor.residual(layout, state)


def run_on_shards(
    compressor: ShardedCompressor, channel: Channel, dtypes: Collection[torch.dtype], device: torch.device
) -> None:
    """Runs a compressor of shards on small shards that together need all its kernels; see `run_on_samples`."""
    alone = AloneChannel.like(channel)
    with torch.no_grad():
        for dtype in floating_point(dtypes):
            for numel in SHARD_SIZES:
                columns = torch.ones(channel.size, numel, dtype=dtype, device=device)
                state = compressor.init(numel, channel.size, device)
                finish(compressor.rounds([columns], [torch.empty_like(columns[0])], state, alone))
                compressor.residual(state, numel, channel.size)


def floating_point(dtypes: Collection[torch.dtype]) -> list[torch.dtype]:
    """Returns the floating-point dtypes, whose numbers are compressed, in the same order on all ranks."""
    return sorted({dtype for dtype in dtypes if dtype.is_floating_point}, key=str)
