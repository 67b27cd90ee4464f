"""Makes tensors equal on all ranks, without sending those that are equal already."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy

from lightning_commopt.sync.diloco.fragments import ordinary_buffer
from lightning_commopt.sync.diloco.living import LivingRanks
from lightning_commopt.sync.gather import values_of_all_ranks


@torch.no_grad()
def equalize(tensors: Sequence[Tensor], living: LivingRanks | None = None) -> None:
    """Gives all ranks the values of the first one, in place. All ranks must call it.

    Over a link of 10 Mbit/s a gigabyte takes a quarter of an hour, and ranks that start from the same seed or the same
    checkpoint need none of it: they compare checksums first.

    Args:
        tensors: of any dtypes, which are the same on all ranks, as are the shapes of parameters. A buffer that has
            another shape than on the first rank, such as a cache that has grown, gets that shape.
        living: the ranks that take part; None for all of the default group, which none may have left.

    Raises:
        ValueError: a parameter has another shape on another rank or none yet, or a tensor is sparse.
    """
    if any(map(is_lazy, tensors)):
        raise ValueError("the model has lazy modules without parameters: run a forward in setup or configure_model")
    sparse = next((x for x in tensors if x.layout != torch.strided), None)
    if sparse is not None:
        raise ValueError(
            f"a buffer of layout {sparse.layout} and shape {tuple(sparse.shape)} cannot be exchanged: register its"
            " indices and values as buffers, or keep it as a plain attribute"
        )
    mine = [(tuple(x.shape), _checksum(x.detach())) for x in tensors]
    everyone = values_of_all_ranks(mine) if living is None else [*living.objects(mine, "comparing weights").values()]
    differ = []
    for x, *of_ranks in zip(tensors, *everyone, strict=True):
        shapes = [shape for shape, _ in of_ranks]
        if isinstance(x, Parameter) and len({*shapes}) > 1:
            raise ValueError(f"all ranks must have the same model, got a parameter of shapes {shapes} on them")
        if x.shape != shapes[0]:
            x.data = x.new_empty(shapes[0])
        if len({*of_ranks}) > 1:
            differ.append(x.detach())
    for dtype in sorted({x.dtype for x in differ}, key=str):
        alike = [x for x in differ if x.dtype == dtype]
        flat = torch.cat([x.reshape(-1) for x in alike])
        if living is None:
            dist.broadcast(flat, 0)
        else:
            flat = next(iter(living.tensors(flat, "sending weights").values()))
        for x, part in zip(alike, flat.split([x.numel() for x in alike]), strict=True):
            x.copy_(part.view(x.shape))


def tensors_of(module: Module) -> list[Tensor]:
    """Returns the parameters and buffers of a module, all of which can be changed in place."""
    for part in module.modules():
        for name, x in [*part.named_buffers(recurse=False)]:
            ordinary_buffer(part, name, x)
    return [*module.parameters(), *module.buffers()]


def _checksum(x: Tensor) -> int:
    # A copy, as numpy() lets its tensor no longer be resized, which observers of quantization do in a forward.
    return zlib.crc32(x.to("cpu", copy=True).contiguous().view(-1).view(torch.uint8).numpy().data)
