"""Gathers values of all ranks, without waiting forever for ranks that do not take part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commopt.compressors.channel import backends_of
from lightning_commopt.sync.store import key_space, poll

_PIECE_BYTES = 2**23
"""Maximum size of a piece, 8 MiB. The latency of a collective is small compared with the time of this on the wire."""
_ALL_PIECES_BYTES = 2**26
"""Maximum size of the pieces of all ranks together, 64 MiB, which the receiver's device must hold beside a model."""
_MIN_PIECE_BYTES = 2**16
"""Minimum size of a piece, 64 KiB, with any number of ranks, so that there are not too many collectives. It takes
precedence: above 1,024 ranks the pieces of all ranks exceed `_ALL_PIECES_BYTES`."""

T = TypeVar("T")


def map_tensors(fn: Callable[[Tensor], object], value: object) -> Any:
    """Returns a copy of nested dicts and lists with ``fn`` applied to every tensor; other objects raise a TypeError."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, dict):
        return {key: map_tensors(fn, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_tensors(fn, item) for item in value]
    if value is None or isinstance(value, int | float | str):
        return value
    raise TypeError(f"a state may hold tensors, numbers, strings, lists and dicts of them, not {value!r}")


def all_ranks_ready(position: str | None, patience_s: float, timeout_s: float) -> bool:
    """Returns, on all ranks, whether all ranks have reached the same point of training.

    It uses the store of the default group, since a collective that some ranks never enter would block the others and
    leave the group unusable.

    Args:
        position: a text for the point, equal on all ranks that are there; None on a rank that cannot take part.
        patience_s: seconds that rank 0 waits for the others.
        timeout_s: seconds that the others wait for the decision of rank 0.
    """
    store = key_space("meeting")
    rank, keys = dist.get_rank(), [str(rank) for rank in range(dist.get_world_size())]
    while rank and _rank_0_gave_up(store, position):
        store = key_space("meeting")
    store.set(str(rank), position or "")
    if rank:
        has_decided = position is not None and poll(lambda: store.check(["decision"]), timeout_s)
        return has_decided and store.get("decision") == b"go"
    have_come = position is not None and poll(lambda: store.check(keys), patience_s)
    agreed = have_come and all(store.get(key).decode() == position for key in keys)
    store.set("decision", "go" if agreed else "stay")
    for key in keys if have_come else ():
        store.delete_key(key)
    return agreed


def _rank_0_gave_up(store: dist.Store, position: str | None) -> bool:
    """Returns whether rank 0 has given up this meeting, which it held at another point than this rank's.

    This rank did not call it there. The next meeting is then the one that rank 0 holds at ``position``.
    """
    return position is not None and store.check(["decision", "0"]) and store.get("0").decode() not in ("", position)


def values_of_all_ranks(value: T) -> list[T]:
    """Returns the values of all ranks of the default group, in order of rank; without a group, this one alone."""
    if not dist.is_initialized():
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def gather_on_rank_0(value: object, device: torch.device) -> list[Any] | None:
    """Gathers nested dicts and lists of tensors and numbers over the default group. All ranks must call it.

    Args:
        value: this rank's value, with tensors on any device, which are sent in pieces of at most 8 MiB.
        device: a device whose tensors the group can gather. If the group can gather on the CPU, that is used instead.

    Returns:
        On rank 0 the values of all ranks, on the CPU; None on the other ranks.
    """
    device = torch.device("cpu") if "cpu" in backends_of() else device
    tensors: list[Tensor] = []

    def record(tensor: Tensor) -> Tensor:
        # Tensors arrive dense and keep their strides, since matrix products over other strides may round differently.
        if torch.empty_like(tensor, device="meta").stride() != tensor.stride():
            tensor = tensor.contiguous()
        tensors.append(tensor)
        return torch.empty_like(tensor, device="meta")

    skeleton = map_tensors(record, value)
    world_size, is_receiver = dist.get_world_size(), dist.get_rank() == 0
    skeletons: list[Any] | None = [None] * world_size if is_receiver else None
    dist.gather_object(skeleton, skeletons)
    received = [map_tensors(lambda meta: torch.empty_like(meta, device="cpu"), sent) for sent in skeletons or ()]
    buffers = [_byte_views(sent) for sent in received]
    own = [_as_bytes(tensor) for tensor in tensors]
    max_bytes = torch.tensor(sum(len(part) for part in own), device=device)
    dist.all_reduce(max_bytes, dist.ReduceOp.MAX)
    num_bytes = int(max_bytes.item())
    piece_bytes = min(_PIECE_BYTES, max(_MIN_PIECE_BYTES, _ALL_PIECES_BYTES // world_size))
    memory = torch.empty(1 + world_size * is_receiver, min(piece_bytes, num_bytes), dtype=torch.uint8, device=device)
    for start in range(0, num_bytes, piece_bytes):
        piece, *pieces = memory[:, : num_bytes - start]
        for part, place in _overlaps(own, start, start + len(piece)):
            piece[place].copy_(part)
        dist.gather(piece, pieces if is_receiver else None)
        for parts, arrived in zip(buffers, pieces, strict=True):
            for part, place in _overlaps(parts, start, start + len(arrived)):
                part.copy_(arrived[place])
    return received if is_receiver else None


def _byte_views(value: object) -> list[Tensor]:
    parts: list[Tensor] = []
    map_tensors(lambda tensor: parts.append(_as_bytes(tensor)), value)
    return parts


def _as_bytes(tensor: Tensor) -> Tensor:
    """Returns a view of the memory of a dense tensor; ``(num_bytes,)``."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _overlaps(parts: Sequence[Tensor], start: int, end: int) -> Iterator[tuple[Tensor, slice]]:
    """Yields each part's overlap with the bytes [start, end) of the concatenation, and its place in that range."""
    offset = 0
    for part in parts:
        low, high = max(start, offset), min(end, offset + len(part))
        if low < high:
            yield part[low - offset : high - offset], slice(low - start, high - start)
        offset += len(part)
