"""GradientTimes: records when backward has computed each gradient."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn import Parameter

from lightning_commopt.cost.shared_core import NO_INTERRUPTS, Interrupts, interrupts_in
from lightning_commopt.cost.workload import Gradient
from lightning_commopt.measure.clock import Clock, HostClock, clock_for

_SCHEDSTAT = Path("/proc/thread-self/schedstat")
_STAT = Path("/proc/stat")


class _ThreadClock(HostClock):
    """The processor time of the calling thread."""

    mark = staticmethod(time.thread_time)


def work_clock(device: torch.device) -> Clock:
    """Returns the clock for arithmetic: processor time on CPU with one thread, which other programs do not disturb."""
    return _ThreadClock() if device.type == "cpu" and torch.get_num_threads() == 1 else clock_for(device)


class GradientTimes:
    """Marks the gradients of a few backwards, on the clock of the device; nothing waits for it.

    On CPU with one thread times are processor times of the thread that computes backward, so that what gradient sync
    takes from its core does not count. `close` removes the hooks. ``ranks_on_host`` share this host's processors; None
    for torchrun's ``LOCAL_WORLD_SIZE``, else this one only.
    """

    def __init__(
        self, parameters: Iterable[tuple[str, Parameter]], device: torch.device, ranks_on_host: int | None = None
    ) -> None:
        self._ranks_on_host = ranks_on_host or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._parameters = {name: parameter for name, parameter in parameters if parameter.requires_grad}
        self._clock = work_clock(device)
        self.has_cpu_times = isinstance(self._clock, _ThreadClock)
        self._backwards: list[dict[str, Any]] = []
        self._forward: tuple[float, float] | None = None  # processor time, and time in the run queue
        self._slowdowns: list[float] = []
        self._interrupts: list[Interrupts] = []
        self._cpu_s: list[tuple[float, float]] = []
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(name))
            for name, parameter in self._parameters.items()
        ]

    def _hook(self, name: str) -> Any:
        def mark(_: torch.Tensor) -> None:
            if self._backwards:
                self._backwards[-1].setdefault(name, self._clock.mark())

        return mark

    def begin_forward(self) -> None:
        """May be called right before a forward, to see how much other processes take of this thread's core."""
        self._forward = time.thread_time(), _queued_s()

    def begin_backward(self) -> None:
        """Must be called right before a backward."""
        cpu_s = time.thread_time()
        if self._forward is not None and cpu_s > self._forward[0]:
            self._slowdowns.append(1 + (_queued_s() - self._forward[1]) / (cpu_s - self._forward[0]))
            self._forward = None
        self._cpu_s.append((time.process_time(), cpu_s))
        if self.shares_core:
            self._interrupts.append(interrupts())
        self._backwards.append({"": self._clock.mark()})

    @property
    def num_backwards(self) -> int:
        """Backwards that have begun."""
        return len(self._backwards)

    @property
    def slowdown(self) -> float:
        """Factor by which waiting for its core, which other processes use too, made forward longer."""
        return max(1.0, median(self._slowdowns)) if self.has_cpu_times and self._slowdowns else 1.0

    @property
    def shares_core(self) -> bool:
        """Whether gradient sync shares its core with backward: on CPU, with one core for this rank."""
        return self.has_cpu_times and len(_cores()) <= self._ranks_on_host

    @property
    def comm_cpu_s(self) -> float:
        """Processor time of other threads of this process from one backward to the next; 0 if unknown."""
        if not self.has_cpu_times or len(self._cpu_s) < 2:
            return 0.0
        return median(
            (process - earlier_process) - (thread - earlier_thread)
            for (earlier_process, earlier_thread), (process, thread) in pairwise(self._cpu_s)
        )

    @property
    def interrupts(self) -> Interrupts:
        """The interrupts of a step, mostly for packets of the link, if gradient sync shares backward's core."""
        if len(self._interrupts) < 2:
            return NO_INTERRUPTS
        (first_s, _), (last_s, in_threads) = self._interrupts[0], self._interrupts[-1]
        return Interrupts((last_s - first_s) / (len(self._interrupts) - 1), in_threads)

    def arguments(self) -> dict[str, Any]:
        """Returns the measurements as keyword arguments of `Basis.of_steps`; for errors see `gradients`."""
        names = ("comm_cpu_s", "slowdown", "shares_core", "interrupts")
        return {"gradients": self.gradients(), **{name: getattr(self, name) for name in names}}

    def close(self) -> None:
        """Removes the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()

    def gradients(self) -> tuple[Gradient, ...]:
        """Returns all gradients in the order in which the last backward computed them; waits for the device.

        The first backward does not count if there are more.

        Raises:
            ValueError: no backward has computed a gradient.
        """
        backwards = [marks for marks in self._backwards if len(marks) > 1]
        if not backwards:
            raise ValueError("no backward has computed a gradient yet")
        counted = backwards[1:] or backwards
        self._clock.wait_for(list(counted[-1].values())[-1])
        order = [name for name in counted[-1] if name]
        order += [name for name in self._parameters if name not in counted[-1]]
        last_s, gradients = 0.0, []
        for name in order:
            last_s = max(last_s, self.slowdown * self._ready_s(name, counted))
            parameter = self._parameters[name]
            gradients.append(Gradient(name, tuple(parameter.shape), parameter.element_size(), last_s))
        return tuple(gradients)

    def _ready_s(self, name: str, backwards: list[dict[str, Any]]) -> float:
        seconds = self._clock.seconds
        times = [seconds(marks[name]) - seconds(marks[""]) for marks in backwards if name in marks]
        return median(times) if times else 0.0


def interrupts() -> Interrupts:
    """Returns what the cores of this process have spent in interrupts so far; 0 where the system counts none."""
    try:
        return interrupts_in(_STAT.read_text(), _cores(), os.sysconf("SC_CLK_TCK"))
    except (OSError, IndexError, ValueError):
        return NO_INTERRUPTS


def _cores() -> Collection[int]:
    """Returns the cores that this process may use; only Linux knows."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def _queued_s() -> float:
    """Returns how long this thread has waited for a core while it could run; 0 where the system does not count that."""
    try:
        return int(_SCHEDSTAT.read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
