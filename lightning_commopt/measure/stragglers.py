"""Finds the rank that the others wait for, from the time that each spends in collectives; no common clock is needed.

A collective ends for all ranks soon after the last one has joined, so the last rank spends the least time in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MIN_STEPS = 8  # with fewer steps no rank is named
_LATE = 0.05
_LATE_STEPS = 0.75
_SLOWDOWN = 0.12


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """The rank that the others wait for."""

    rank: int  # its number
    slowdown: float  # how much longer it computes than the others, as a share of their time; median over steps
    share: float  # of the steps, in which the others waited for it


def find_straggler(
    *, wire_s: NDArray[np.float64], step_s: NDArray[np.float64], exposed_s: NDArray[np.float64]
) -> Straggler | None:
    """Finds the rank that makes the others wait.

    The suspect is the rank with the least time on the wire in most steps. The others' wait in a step is the median of
    their time on the wire, less its own. It is named if

    - they waited at least 5 % of their computing time in at least three steps of four: a rank that is late once in a
      while, by however much, does not count, nor do two that are late alternately, as any two are in a quiet run; and
    - its last gradient was ready 12 % of that time later than theirs, in the median over steps. The wire counts a delay
      once for every bucket that waits for it: with 20 buckets, a rank that is 1 % slower keeps the others on the wire
      for some 10 % longer. The exposed time counts it once.

    The exposed time alone is not enough either: a rank may be slow in backward while no other waits for it, because the
    link is slower still. ``docs/comm_time.md`` has the errors in a simulation, and in fits.

    Args:
        wire_s: ``(world_size, num_steps)``, seconds in which a rank had a collective under way.
        step_s: ``(world_size, num_steps)``, of whole steps.
        exposed_s: ``(world_size, num_steps)``, from the last gradient to the last bucket.

    Returns:
        The rank; None with one rank, with fewer steps than `MIN_STEPS`, or if none stands out.

    Raises:
        ValueError: the shapes differ, or are not of two dimensions.
    """
    if wire_s.ndim != 2 or not wire_s.shape == step_s.shape == exposed_s.shape:
        shapes = [values.shape for values in (wire_s, step_s, exposed_s)]
        raise ValueError(f"wire_s, step_s and exposed_s must be (world_size, num_steps), all alike, got {shapes}")
    world_size, num_steps = wire_s.shape
    if world_size < 2 or num_steps < MIN_STEPS:
        return None
    rank = int(np.bincount(wire_s.argmin(axis=0), minlength=world_size).argmax())
    others = np.arange(world_size) != rank
    compute_s = float(np.median((step_s - exposed_s)[others]))
    if not compute_s > 0:
        return None
    waited_s = np.median(wire_s[others], axis=0) - wire_s[rank]
    share = float(np.mean(waited_s >= _LATE * compute_s))
    later_s = np.median(exposed_s[others], axis=0) - exposed_s[rank]
    slowdown = float(np.median(later_s)) / compute_s
    if share < _LATE_STEPS or slowdown < _SLOWDOWN:
        return None
    return Straggler(rank=rank, slowdown=slowdown, share=share)
