"""Bandwidth of collectives, as nccl-tests defines it.

Source: nccl-tests, doc/PERFORMANCE.md, and the ``...GetBw`` functions in src.
"""

from __future__ import annotations

_SHARE_OF_OTHERS = ("reduce_scatter", "all_gather", "all_to_all")
_WHOLE = ("broadcast", "reduce", "send_recv")
COLLECTIVES = ("all_reduce", *_SHARE_OF_OTHERS, *_WHOLE)
"""The collectives that have a bus factor."""


def algorithm_bandwidth(num_bytes: float, seconds: float) -> float:
    """Returns the bytes of a collective over the time that it took.

    >>> algorithm_bandwidth(1e9, 0.1)
    10000000000.0

    Args:
        num_bytes: of the message; for reduce_scatter, all_gather and all_to_all of all ranks' parts together.
        seconds: from its start to its end.

    Returns:
        Bytes a second.

    Raises:
        ValueError: ``num_bytes`` is negative, or ``seconds`` not above 0.
    """
    if not num_bytes >= 0:
        raise ValueError(f"num_bytes must be at least 0, got {num_bytes!r}")
    if not seconds > 0:
        raise ValueError(f"seconds must be above 0, got {seconds!r}")
    return num_bytes / seconds


def bus_factor(collective: str, world_size: int) -> float:
    """Returns how many times its message a collective makes each rank's link carry, each way, at the very least.

    >>> [bus_factor("all_reduce", n) for n in (1, 2, 8)]
    [0.0, 1.0, 1.75]

    Args:
        collective: one of `COLLECTIVES`.
        world_size: ranks that take part.

    Returns:
        ``2 (n - 1) / n`` for all_reduce, ``(n - 1) / n`` for reduce_scatter, all_gather and all_to_all, else 1.

    Raises:
        ValueError: the collective is unknown, or there is no rank.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size!r}")
    if collective == "all_reduce":
        return 2 * (world_size - 1) / world_size
    if collective in _SHARE_OF_OTHERS:
        return (world_size - 1) / world_size
    if collective in _WHOLE:
        return 1.0
    raise ValueError(f"collective must be one of {', '.join(map(repr, COLLECTIVES))}, got {collective!r}")


def bus_bandwidth(collective: str, algorithm_bandwidth: float, world_size: int) -> float:
    """Returns what a link would have to carry: comparable with its rate, whatever the number of ranks.

    >>> bus_bandwidth("all_reduce", 10e9, 8)
    17500000000.0

    Args:
        collective: one of `COLLECTIVES`.
        algorithm_bandwidth: in bytes a second.
        world_size: ranks that take part.

    Returns:
        Bytes a second.

    Raises:
        ValueError: the collective is unknown, or there is no rank.
    """
    return algorithm_bandwidth * bus_factor(collective, world_size)
