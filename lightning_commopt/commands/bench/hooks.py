"""A comm hook's compressor as a case: it averages one bucket, like those of DDP."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_commopt.commands.bench.groups import Memory, Ranks
from lightning_commopt.commands.bench.operations import Call
from lightning_commopt.compressors import Layout, compressor_from_config
from lightning_commopt.compressors.channel import Channel
from lightning_commopt.compressors.hierarchical import place_on_nodes
from lightning_commopt.compressors.kernels import c_library
from lightning_commopt.measure.link.bench_result import Case

_STEP = 1_000_000  # after every start_step: compressed from the first call on
_TILE_NUMEL = 65_521  # a prime: no two blocks of a compressor are equal


def check_hooks(comm_hooks: Sequence[Any]) -> None:
    """Raises ValueError for a comm hook that is unknown, has a wrong option, or is "none", which is no hook."""
    for comm_hook in comm_hooks:
        try:
            compressor = compressor_from_config(comm_hook)
        except (ValueError, TypeError) as error:
            raise ValueError(f"--comm-hook: {error}") from None
        if compressor is None:
            raise ValueError("--comm-hook none is DDP's own all-reduce: name the collective all_reduce instead")


def prepare_hook(case: Case, ranks: Ranks, channel: Channel, memory: Memory, ranks_per_node: int) -> Call:
    """Returns a comm hook's case over all ranks, ready to run; the bucket is one matrix, as square as possible.

    Raises:
        ValueError: the comm hook is unknown, or does not support these ranks.
    """
    check_hooks([case.comm_hook])
    configured = compressor_from_config(case.comm_hook)
    assert configured is not None
    compressor, _ = place_on_nodes(configured, ranks.size, ranks_per_node)
    if compressor.claims.has_c_kernels:
        c_library.load()
    dtype = getattr(torch, case.dtype)
    flat, other = memory.views(dtype, case.count)
    num_rows = next(rows for rows in range(math.isqrt(case.count), 0, -1) if case.count % rows == 0)
    shape = torch.Size((num_rows, case.count // num_rows))
    layout = Layout((shape,), ((shape[1], 1),), dtype)
    state = compressor.init(layout, flat.device, _STEP)

    def run() -> None:
        rounds = compressor.rounds(flat, layout, state, channel)
        with torch.no_grad(), contextlib.suppress(StopIteration):
            pending = next(rounds)
            while True:
                pending = rounds.send(pending.wait())

    tile = torch.randn(_TILE_NUMEL, generator=torch.Generator().manual_seed(ranks.index)).to(flat)

    def fill() -> None:
        for part in flat.split(_TILE_NUMEL):
            part.copy_(tile[: len(part)])

    def num_unlike_first() -> int:
        other.copy_(flat)
        dist.broadcast(other, ranks.members[0], group=ranks.group)
        return int((other != flat).sum())

    return Call(run, fill, num_unlike_first)
