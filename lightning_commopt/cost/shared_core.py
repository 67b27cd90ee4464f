"""What it costs a rank if its threads share a core: waiting for a turn, the work of gloo's threads, interrupts.

The rest of `cost` describes a machine with a core for each thread. There nothing waits (`wake_s` is 0), nothing is
slowed down (`core_rates` are 1), no other program takes part of a core (`competing_threads` is 0), and interrupts are
not asked for (`NO_INTERRUPTS`). What gloo's threads use of a core of their own only bounds how fast a message can be.
Machines of one or two busy cores, such as the hosts of the network lab on which predictions are tested, need the rest.
Everything here is a pure function of numbers that others have measured.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from statistics import fmean
from typing import NamedTuple

WAKE_S = 3e-3
"""Time that the threads of a message wait for another thread on their core, about a time slice of Linux's scheduler.
Chosen on a ViT and an MLP in the network lab, see ``docs/evidence/predict.md``."""

GLOO_CPU_S = 0.9e-3
"""Processor time of a collective of two ranks over gloo besides its bytes: its threads are woken and wait. Chosen on
the same models as `WAKE_S`. What a run has used beyond it counts as work on the bytes."""

_INTERRUPTS_PER_SAMPLE = 2.0
"""True time in interrupts over the sampled time, as a tick of the timer waits while interrupts are off. Chosen on
arithmetic beside transfers in the network lab at 0.3 to 2.5 Gbit/s, which took longer by 1.5 to 2.5 times what ticks
had found (``benchmarks/interrupts.py``, ``docs/evidence/predict.md``)."""

_MAX_INTERRUPTED_SHARE = 0.5
"""Interrupts take this share of backward at most: a larger one is more likely a wrong count than true (a judgement)."""

_IRQ, _SOFTIRQ = 6, 7
"""The columns of ``/proc/stat`` that count interrupts, see proc(5)."""


class Interrupts(NamedTuple):
    """Time in interrupts, of one core."""

    seconds: float
    in_threads: bool  # counted as processor time of the threads that were interrupted, too


NO_INTERRUPTS = Interrupts(0.0, False)


def competing_threads(slowdown: float) -> float:
    """Returns how many other threads want a core, on average, if its own takes ``slowdown`` times as long."""
    return slowdown - 1


def wake_s(num_others: float, *, beside_backward: bool) -> float:
    """Returns the least time that a message takes where other threads want the core of its own.

    Args:
        num_others: threads of other programs that want the core, see `competing_threads`.
        beside_backward: backward computes on that core meanwhile.
    """
    return WAKE_S * (num_others + beside_backward)


def core_rates(needs: Sequence[float]) -> list[float]:
    """Returns how fast each thread on one core advances, 1 if nothing slows it down.

    Each takes what it needs, but an equal part at most while the core is busy.

    Args:
        needs: share of the core that each would keep busy alone.

    >>> core_rates((0.25, 0.5)), core_rates((1.0, 0.25))
    ([1.0, 1.0], [0.75, 1.0])
    """
    if sum(needs) <= 1:
        return [1.0] * len(needs)
    free_share, shares = 1.0, [0.0] * len(needs)
    order = sorted(range(len(needs)), key=needs.__getitem__)
    for place, index in enumerate(order):
        shares[index] = min(needs[index], free_share / (len(order) - place))
        free_share -= shares[index]
    return [1.0 if need == 0 else max(got / need, 1e-9) for got, need in zip(shares, needs, strict=True)]


def message_cpu_s(cpu_s: float, wakes: float) -> float:
    """Returns the processor time of a collective of two ranks, if collectives with ``wakes`` wakes took ``cpu_s``."""
    return min(GLOO_CPU_S, cpu_s / wakes)


def interrupts_in(stat: str, cores: Collection[int], ticks_per_s: float) -> Interrupts:
    """Returns what some cores have spent in interrupts so far, on average.

    Kernels without ``CONFIG_IRQ_TIME_ACCOUNTING`` sample it, and count it as time of the thread that was interrupted.

    Args:
        stat: text of ``/proc/stat``.
        cores: their numbers.
        ticks_per_s: unit of its times.

    Raises:
        IndexError, ValueError: the text has no such counts.
    """
    rows = [row.split() for row in stat.splitlines() if row.startswith("cpu")]
    names = {"cpu", *(f"cpu{core}" for core in cores)}
    whole, *own = [(int(row[_IRQ]), int(row[_SOFTIRQ])) for row in rows if row[0] in names]
    seconds = fmean(map(sum, own)) / ticks_per_s
    is_sampled = whole[0] == 0  # a tick interrupts no other interrupt
    return Interrupts(seconds * (_INTERRUPTS_PER_SAMPLE if is_sampled else 1.0), is_sampled)


def undisturbed_share(interrupts_s: float, hidden_share: float, backward_s: float) -> float:
    """Returns the share of backward's time in which no interrupt took its core.

    Args:
        interrupts_s: time in interrupts in a step, spread over the time of its gradient sync.
        hidden_share: share of gradient sync that backward hides.
        backward_s: measured, interrupts included.
    """
    return 1 - min(_MAX_INTERRUPTED_SHARE, hidden_share * interrupts_s / max(backward_s, 1e-9))
