"""A backward and its gradient sync as a small simulation of events.

Two things run side by side: backward, which makes buckets ready, and gradient sync, which compresses and sends them in
order. The link carries one message at a time, or shares its rate between several. Where gradient sync has no processor
of its own, whatever computes shares one: each takes what it needs, at most an equal part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from lightning_commopt.cost.shared_core import core_rates, wake_s

_TINY_S = 1e-12
"""Differences below it are rounding: a step of training has 1e-4 s or more, and a double 16 digits of it."""

_NUM_LANES = 2
"""Jobs that are under way at a time: on CPU a piece is computed while another is sent, DDP's own average has two
threads, and on CUDA buckets take turns on two streams."""


class Phase(NamedTuple):
    """A part of what one piece of a bucket needs."""

    on_link: bool  # whether it sends; otherwise it computes
    duration_s: float  # duration if nothing slows it down
    cpu_share: float  # share of a processor that it keeps busy meanwhile


class Job(NamedTuple):
    """A bucket, or a piece of one."""

    bucket: int  # number of the bucket, from 0
    ready_s: float  # work of backward that must be done before it can begin
    phases: tuple[Phase, ...]  # one after another


class Outcome(NamedTuple):
    """When a simulated backward had ended, and each bucket, in seconds since backward began."""

    backward_s: float
    ends_s: tuple[float, ...]

    @property
    def end_s(self) -> float:
        return max(self.backward_s, *self.ends_s) if self.ends_s else self.backward_s


class _Running:
    """A job under way: what is left of its phase, and the share of a processor that the phase needs."""

    def __init__(self, job: Job, least_s: float) -> None:
        self.job = job
        self.number = 0
        self._begin(least_s)

    @property
    def phase(self) -> Phase:
        return self.job.phases[self.number]

    def finish_phase(self, least_s: float) -> bool:
        """Begins the next phase; returns whether there is none."""
        self.number += 1
        if self.number == len(self.job.phases):
            return True
        self._begin(least_s)
        return False

    def _begin(self, least_s: float) -> None:
        """Begins a phase; a message takes ``least_s`` at least, most of which its threads wait."""
        on_link, self.left_s, self.cpu_share = self.phase
        if on_link and self.left_s < least_s:
            self.cpu_share *= self.left_s / least_s
            self.left_s = least_s


def simulate(
    jobs: Sequence[Job],
    backward_s: float,
    *,
    shares_core: bool = False,
    overlaps_buckets: bool = False,
    shares_link: bool = False,
    num_others: float = 0.0,
) -> Outcome:
    """Runs one backward.

    Args:
        jobs: what to do, in the order of buckets, at most two at a time. A job that would be ready after the end of
            backward is ready at its end.
        backward_s: work of backward.
        shares_core: backward and gradient sync have one processor together.
        overlaps_buckets: a lane takes the next bucket's job, as streams do; else a thread does one bucket after
            another, and computes one thing at a time.
        shares_link: messages of all lanes travel at once, each at its part of the rate; else one after another.
        num_others: threads of other programs that want this rank's processor, on average. For each of them, and for
            backward where that has the processor, a message's threads wait for their turn, see `wake_s`.
    """
    now_s = done_s = 0.0
    waiting, running = list(reversed(jobs)), list[_Running]()
    ends_s = [0.0] * (1 + max((job.bucket for job in jobs), default=-1))
    backward_end_s = math.nan
    while waiting or running or done_s < backward_s - _TINY_S:
        is_computing = done_s < backward_s - _TINY_S
        least_s = wake_s(num_others, beside_backward=shares_core and is_computing)
        while waiting and len(running) < _NUM_LANES and min(waiting[-1].ready_s, backward_s) <= done_s + _TINY_S:
            if running and not overlaps_buckets and running[0].job.bucket != waiting[-1].bucket:
                break
            running.append(_Running(waiting.pop(), least_s))
        active = _active(running, overlaps_buckets, shares_link)
        rates = _rates(active, is_computing, shares_core)
        steps_s = [job.left_s / rate for job, rate in zip(active, rates[1:], strict=True)]
        if is_computing:
            until_s = min([job.ready_s for job in waiting[-1:] if job.ready_s > done_s], default=backward_s)
            steps_s.append((min(until_s, backward_s) - done_s) / rates[0])
        step_s = min(steps_s)
        now_s += step_s
        done_s += step_s * rates[0] if is_computing else 0.0
        if is_computing and done_s >= backward_s - _TINY_S:
            backward_end_s = now_s
        for job, rate in zip(active, rates[1:], strict=True):
            job.left_s -= step_s * rate
            if job.left_s <= _TINY_S and job.finish_phase(least_s):
                running.remove(job)
                ends_s[job.job.bucket] = now_s
    return Outcome(backward_end_s if backward_s > 0 else 0.0, tuple(ends_s))


def _active(running: Sequence[_Running], overlaps_buckets: bool, shares_link: bool) -> list[_Running]:
    """Returns the jobs that advance: the first that sends, or all; and all that compute, or the first of them."""
    sending = [job for job in running if job.phase.on_link]
    computing = [job for job in running if not job.phase.on_link]
    return [*(sending if shares_link else sending[:1]), *(computing if overlaps_buckets else computing[:1])]


def _rates(active: Sequence[_Running], is_computing: bool, shares_core: bool) -> list[float]:
    """Returns the rate of backward, then of each job, 1 if nothing slows it down."""
    num_sending = sum(job.phase.on_link for job in active)
    parts = [1.0, *(1 / num_sending if job.phase.on_link else 1.0 for job in active)]
    needs = [1.0 if is_computing else 0.0, *(job.cpu_share for job in active)]
    if not shares_core:
        return parts
    rates = core_rates([need * part for need, part in zip(needs, parts, strict=True)])
    return [rate * part for rate, part in zip(rates, parts, strict=True)]
