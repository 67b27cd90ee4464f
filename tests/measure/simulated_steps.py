"""Steps of ranks that compute, all-reduce buckets over a link and wait for each other, in the unit of a computation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_FORWARD, _BACKWARD, _OPTIMIZER = 0.3, 0.65, 0.05


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Ranks and the link between them.

    Attributes:
        world_size: number of ranks.
        num_buckets: of equal size; a bucket is averaged when all ranks have it and the one before is done.
        transfer: how long the link takes for all buckets.
        jitter: standard deviation of the logarithm of a rank's time in a step.
        spikes: share of a rank's steps that take 0.3 to 3 longer.
        asymmetry: how much slower one rank always is.
    """

    world_size: int
    num_buckets: int = 5
    transfer: float = 0.5
    jitter: float = 0.05
    spikes: float = 0.02
    asymmetry: float = 0.0


class Windows(NamedTuple):
    """Times of windows of steps, ``(num_windows, world_size, num_steps)`` each."""

    wire_s: NDArray[np.float64]
    step_s: NDArray[np.float64]
    exposed_s: NDArray[np.float64]

    def window(self, index: int, num_steps: int) -> dict[str, NDArray[np.float64]]:
        """Returns the first steps of one window, as `find_straggler` takes them."""
        return {name: getattr(self, name)[index, :, :num_steps] for name in self._fields}


def simulate(
    cluster: Cluster,
    num_windows: int,
    num_steps: int,
    rng: np.random.Generator,
    *,
    slow: NDArray[np.int64] | None = None,
    sleep: float = 0.0,
    in_backward: bool = False,
) -> Windows:
    """Runs windows of steps.

    Args:
        cluster: that trains.
        num_windows: independent runs.
        num_steps: of each.
        rng: of all randomness.
        slow: the rank of each window that sleeps in every step.
        sleep: for how long.
        in_backward: spread over backward, else in forward.
    """
    shape, windows = (num_windows, cluster.world_size), np.arange(num_windows)
    pace = np.ones(shape)
    pace[windows, rng.integers(cluster.world_size, size=num_windows)] += cluster.asymmetry
    delay = np.zeros(shape)
    if slow is not None:
        delay[windows, slow] = sleep
    began, times = np.zeros(shape), []
    for _ in range(num_steps):
        compute = rng.lognormal(0, cluster.jitter, shape) * pace
        compute += (rng.random(shape) < cluster.spikes) * rng.uniform(0.3, 3, shape)
        forward, backward = _FORWARD * compute, _BACKWARD * compute
        if in_backward:
            backward = backward + delay
        else:
            forward = forward + delay
        wire, done = np.zeros(shape), np.full(shape, -np.inf)
        for bucket in range(1, cluster.num_buckets + 1):
            ready = began + forward + backward * bucket / cluster.num_buckets
            sent = np.maximum(ready, done)
            takes = rng.lognormal(0, 0.1, (num_windows, 1)) * rng.lognormal(0, 0.03, shape)
            done = sent.max(axis=1, keepdims=True) + takes * cluster.transfer / cluster.num_buckets
            wire += done - sent
        ended = done + _OPTIMIZER * compute
        times.append((wire, ended - began, done - ready))
        began = ended
    return Windows(*(np.stack(part, axis=2) for part in zip(*times, strict=True)))
