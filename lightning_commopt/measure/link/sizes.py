"""Message sizes in the notation of nccl-tests: a number of bytes, or of K, M or G, which are powers of 1024."""

from __future__ import annotations

import re

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_MAX_BYTES = 2**40
_MAX_SIZES = 200


def parse_size(name: str, text: str) -> int:
    """Returns the bytes of a size such as "8", "64K" or "1.5g"; errors name the option.

    >>> parse_size("-b", "8"), parse_size("-e", "1.5k")
    (8, 1536)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)", text.strip().upper(), re.ASCII)
    size = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 1 <= size <= _MAX_BYTES or size != int(size):
        raise ValueError(f"{name} must be a number of bytes, or of K, M or G (powers of 1024), got {text!r}")
    return int(size)


def sizes_between(first_bytes: int, last_bytes: int, *, factor: float = 2, step_bytes: int | None = None) -> list[int]:
    """Returns sizes as nccl-tests does: each the last one times ``factor``, or plus ``step_bytes``.

    Raises:
        ValueError: the sizes do not grow, or are too many.

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
