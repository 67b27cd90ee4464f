"""The options of a bench, validated; message sizes in nccl-tests' notation: bytes, or K, M or G (powers of 1024)."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from lightning_commopt.text.validation import check_choice, check_integer, check_switch

# In send_recv each rank sends to the next one, in a ring.
SINGLE = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "send_recv")
COMPOUND = ("reduce_broadcast", "reduce_scatter_all_gather")  # pairs of collectives that are equivalent to all_reduce
COLLECTIVES = (*SINGLE, *COMPOUND)

DTYPES = ("float32", "float16", "bfloat16", "float64", "int8", "uint8", "int32", "int64")
REDOPS = ("sum", "min", "max")
PLACES = ("out", "in")
LOADS = ("idle", "compute")
SCOPES = ("all", "node", "across")

_ALIASES = {
    "float": "float32",
    "half": "float16",
    "double": "float64",
    "int": "int32",
    "sendrecv": "send_recv",
    "alltoall": "all_to_all",
}

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}  # as nccl-tests has them
_MAX_BYTES = 2**40  # 1 TiB is more than any device has; a mistyped size must not be allocated
_MAX_SIZES = 200  # more is a mistaken -i: each size takes about a second, 7 x 0.1 s by default


def parse_size(name: str, text: str) -> int:
    """Returns the bytes of a size such as "8", "64K" or "1.5g"; errors name the option.

    >>> parse_size("-b", "8"), parse_size("-e", "1.5k")
    (8, 1536)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)", text.strip().upper(), re.ASCII)
    size = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 1 <= size <= _MAX_BYTES or size != int(size):
        raise ValueError(f"{name} must be a number of bytes, or of K, M or G (powers of 1024), got {text!r}")
    return int(size)


def sizes_between(first_bytes: int, last_bytes: int, *, factor: float = 2, step_bytes: int | None = None) -> list[int]:
    """Returns sizes as nccl-tests does: each the last one times ``factor``, or plus ``step_bytes``.

    Raises:
        ValueError: the sizes do not grow, or there are too many.

    >>> sizes_between(8, 64)
    [8, 16, 32, 64]
    >>> sizes_between(1000, 2500, step_bytes=500)
    [1000, 1500, 2000, 2500]
    """
    if last_bytes < first_bytes:
        raise ValueError(f"-e must be at least -b, got -b {first_bytes} and -e {last_bytes}")
    if step_bytes is None and not factor > 1:
        raise ValueError(f"-f must be above 1, got {factor:g}")
    sizes: list[int] = []
    size = float(first_bytes)
    while size <= last_bytes:
        if not sizes or round(size) > sizes[-1]:
            sizes.append(round(size))
        size = size * factor if step_bytes is None else size + step_bytes
        if len(sizes) > _MAX_SIZES:
            raise ValueError(f"-b, -e, -f and -i make more than {_MAX_SIZES} sizes: take a larger -f or -i")
    return sizes


def size_text(num_bytes: int) -> str:
    """Returns a size as `parse_size` reads it, in the largest unit that keeps it whole.

    >>> size_text(2**20), size_text(1500)
    ('1M', '1500')
    """
    for unit in ("G", "M", "K"):
        if num_bytes and num_bytes % _UNITS[unit] == 0:
            return f"{num_bytes // _UNITS[unit]}{unit}"
    return str(num_bytes)


def check_predicted(predicted: Sequence[int], sizes_bytes: Collection[int]) -> None:
    """Checks that there are times to predict from.

    Raises:
        ValueError: all are of one size, which shows neither a latency nor a bandwidth, and others are to be predicted.
    """
    others = [size_text(size) for size in predicted if size not in sizes_bytes]
    if others and len(set(sizes_bytes)) == 1:
        raise ValueError(
            f"--predict {','.join(others)} needs the times of two sizes or more, got one, {size_text(*sizes_bytes)};"
            f" -b and -e choose the sizes, best up to {others[-1]}"
        )


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What to measure, and how often; a ValueError if a value is unknown or out of range."""

    collectives: Sequence[str] = ("all_reduce",)  # see `COLLECTIVES`
    sizes_bytes: Sequence[int]  # sizes as nccl-tests counts them: what all_gather receives and reduce_scatter sends
    dtypes: Sequence[str] = ("float32",)  # see `DTYPES`
    redops: Sequence[str] = ("sum",)  # see `REDOPS`
    places: Sequence[str] = ("in",)  # "in" and "out" of place, if a collective supports both
    comm_hooks: Sequence[Any] = ()  # compressors to measure too, for `compressor_from_config`
    loads: Sequence[str] = ("idle",)  # "idle", and "compute": matrix products run on the device meanwhile
    scopes: Sequence[str] = ("all",)  # groups: "all" ranks, the ranks of each "node", or one per node "across" nodes
    root: int = 0  # root rank for broadcast and reduce
    num_iters: int | None = None  # calls in a repetition; None: enough of them to last ``block_s``
    num_warmups: int = 2  # calls before the first repetition, after the one that is checked
    num_repetitions: int = 7  # repetitions of every case, interleaved with the repetitions of the other cases
    block_s: float = 0.1  # least duration of a repetition, unless ``num_iters`` is given
    is_checked: bool = True  # verify results

    def __post_init__(self) -> None:
        choices = {
            "collectives": COLLECTIVES,
            "dtypes": DTYPES,
            "redops": REDOPS,
            "places": PLACES,
            "loads": LOADS,
            "scopes": SCOPES,
        }
        for name, allowed in choices.items():
            values = tuple(dict.fromkeys(_ALIASES.get(value, value) for value in getattr(self, name)))
            for value in values:
                check_choice(name, value, allowed)
            if not values and name != "collectives":
                raise ValueError(f"{name} must not be empty")
            object.__setattr__(self, name, values)
        object.__setattr__(self, "comm_hooks", tuple(self.comm_hooks))
        object.__setattr__(self, "sizes_bytes", tuple(sorted(set(self.sizes_bytes))))
        for size in self.sizes_bytes:
            check_integer("sizes_bytes", size, at_least=1)
        if not self.sizes_bytes or not (self.collectives or self.comm_hooks):
            raise ValueError("there is nothing to measure: name sizes, and collectives or comm hooks")
        check_integer("root", self.root, at_least=0)
        for name in ("num_iters", "num_repetitions"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), at_least=1)
        check_integer("num_warmups", self.num_warmups, at_least=1)
        check_switch("is_checked", self.is_checked)
        if isinstance(self.block_s, bool) or not isinstance(self.block_s, Real) or not 0 < self.block_s <= 600:
            raise ValueError(f"block_s must be a number of seconds above 0, up to 600, got {self.block_s!r}")

    def to_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return plain
