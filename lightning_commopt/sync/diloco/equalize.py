"""Makes tensors equal on all ranks, without sending those that are equal already."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy

from lightning_commopt.sync.diloco.fragments import ensure_normal_buffer
from lightning_commopt.sync.diloco.living import LivingRanks
from lightning_commopt.sync.gather import values_of_all_ranks


@torch.no_grad()
def equalize(tensors: Sequence[Tensor], living: LivingRanks | None = None) -> None:
    """Gives all ranks the values of the first rank, in place. All ranks must call it.

    Ranks compare checksums first: over a link of 10 Mbit/s a gigabyte takes a quarter of an hour, and ranks that start
    from the same seed or the same checkpoint need not send anything.

    Args:
        tensors: tensors of any dtypes. Dtypes, and shapes of parameters, must be equal on all ranks. A buffer whose
            shape differs from the first rank's, such as a cache that has grown, gets the first rank's shape.
        living: the ranks that take part; None for all ranks of the default group, all of which must live.

    Raises:
        ValueError: the shapes of a parameter differ, a parameter is lazy and has no shape yet, or a tensor is sparse.
    """
    if any(map(is_lazy, tensors)):
        raise ValueError(
            "the model has lazy modules whose parameters are not initialized: run a forward in setup or configure_model"
        )
    sparse = next((x for x in tensors if x.layout != torch.strided), None)
    if sparse is not None:
        raise ValueError(
            f"a buffer of layout {sparse.layout} and shape {tuple(sparse.shape)} cannot be exchanged, since only dense"
            " tensors can: register its indices and values as buffers, or keep it as a plain attribute"
        )
    own = [(tuple(x.shape), _checksum(x.detach())) for x in tensors]
    by_rank = values_of_all_ranks(own) if living is None else [*living.objects(own, "comparing weights").values()]
    different = []
    for x, *on_ranks in zip(tensors, *by_rank, strict=True):
        shapes = [shape for shape, _ in on_ranks]
        if isinstance(x, Parameter) and len({*shapes}) > 1:
            raise ValueError(
                f"all ranks must have the same model, but the shapes of a parameter on the ranks are {shapes}"
            )
        if x.shape != shapes[0]:
            x.data = x.new_empty(shapes[0])
        if len({*on_ranks}) > 1:
            different.append(x.detach())
    for dtype in sorted({x.dtype for x in different}, key=str):
        same_dtype = [x for x in different if x.dtype == dtype]
        flat = torch.cat([x.reshape(-1) for x in same_dtype])
        if living is None:
            dist.broadcast(flat, 0)
        else:
            flat = next(iter(living.tensors(flat, "sending weights").values()))
        for x, part in zip(same_dtype, flat.split([x.numel() for x in same_dtype]), strict=True):
            x.copy_(part.view(x.shape))


def tensors_of(module: Module) -> list[Tensor]:
    """Returns the parameters and buffers of a module, after making sure that all can be changed in place."""
    for part in module.modules():
        for name, x in [*part.named_buffers(recurse=False)]:
            ensure_normal_buffer(part, name, x)
    return [*module.parameters(), *module.buffers()]


def _checksum(x: Tensor) -> int:
    # It is a copy because a tensor cannot be resized after numpy(), and quantization observers resize their buffers.
    return zlib.crc32(x.to("cpu", copy=True).contiguous().view(-1).view(torch.uint8).numpy().data)
