"""Calibration: measures in a few steps with the user's plan what predictions lean on; and which plans these promise."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lightning_commopt.compat.loops import wrap_method
from lightning_commopt.compressors import Compressor
from lightning_commopt.compressors.catalog import ready_compressors
from lightning_commopt.cost.basis import Basis
from lightning_commopt.cost.candidates import Candidate, candidates
from lightning_commopt.cost.compressor_cost import CompressorCost, measure_costs
from lightning_commopt.cost.gradient_times import GradientTimes
from lightning_commopt.cost.predict import Costs, buckets_of, predict
from lightning_commopt.measure.clock import clock_for
from lightning_commopt.measure.record import StepRecord
from lightning_commopt.measure.recorder import StepRecorder
from lightning_commopt.sync.observed import before_backward
from lightning_commopt.tune.host import Host
from lightning_commopt.tune.options import TuneOptions

NUM_STEPS = 6
MEASURING_S = 0.2
"""Seconds that it takes to measure a compressor on a processor that does nothing else."""
MAX_CANDIDATES = 6
_MIN_GAIN = 0.01  # that a prediction must promise; the search wants more
_NEAR = 2 / 3  # of the largest predicted gain: what a compressor must promise to be tried before other layouts
_MIN_BYTES = 2**18  # of gradients: the steps of smaller models do not separate the link's rate from its latency
_MIN_RATIO = 2  # of the numbers of buckets
_NUM_SETTLING_STEPS = 3  # DDP lays out its buckets after the first, or, with a static graph, the second


class Calibration:
    """Records the steps of this rank while it exists: phases, buckets, and when each gradient is ready.

    Args:
        host: where a step begins; without a comm hook of its own its model must be wrapped
            again while the calibration observes it, see `attach`.
        options: the compressors to measure.
        limit_s: seconds in which to measure those that are not in use.
    """

    def __init__(self, host: Host, options: TuneOptions, limit_s: float) -> None:
        self._host, self._strategy = host, host.strategy
        self._options = options
        self._limit_s = limit_s
        self.not_measured: list[Compressor] = []
        device = self._strategy.root_device
        self._recorder = StepRecorder(clock_for(device))
        parameters = host.model().module.named_parameters()
        self._times = GradientTimes(parameters, device, self._strategy.num_processes)
        self._step = 0
        self._strategy.sync_observers.add(self._recorder)
        self._undo = [
            wrap_method(*host.begin_backward, self._before_backward),
            wrap_method(*host.end_backward, self._after_backward),
        ]

    def begin_batch(self, *, is_new_step: bool) -> None:
        """Marks the end of the wait for a batch; the first one of a step ends the step before."""
        if is_new_step and self._step:
            self._recorder.end_step(self._step, 0)
        self._step += is_new_step
        self._recorder.enter("forward")
        self._times.begin_forward()

    def steps(self) -> list[StepRecord]:
        """Returns the steps, without those in which DDP laid out its buckets; waits for the device."""
        return self._recorder.take(self._recorder.num_pending)[_NUM_SETTLING_STEPS:]

    def close(self) -> None:
        """Stops observing."""
        while self._undo:
            self._undo.pop()()
        self._times.close()
        self._strategy.sync_observers.remove(self._recorder)

    def measure(self) -> Costs:
        """Measures the compressors that the limit suffices for; all ranks of a machine at the same time.

        `not_measured` then has those that were allowed, and left out.
        """
        began_s, longest_s, own = time.perf_counter(), MEASURING_S, self._strategy.plan.comm_hook
        gradients, costs = self._times.gradients(), dict[Compressor | None, CompressorCost]()
        for compressor in dict.fromkeys((own, *self._options.lossy)):
            start_s = time.perf_counter()
            if compressor is not None and compressor != own and start_s - began_s + longest_s > self._limit_s:
                self.not_measured.append(compressor)
                continue
            costs |= measure_costs([compressor], gradients, self._strategy.root_device, self._strategy.world_size)
            longest_s = max(longest_s, time.perf_counter() - start_s)
        return costs

    def basis(self, ranks: list[list[StepRecord]], costs: Costs, step_s: float) -> Basis:
        """Returns what the steps of all ranks show, whose plan is the user's; on rank 0.

        Args:
            ranks: the steps of each rank.
            costs: of the compressors, on this rank.
            step_s: a step that is not observed.

        Raises:
            ValueError: nothing can be predicted from these steps.
        """
        return Basis.of_steps(
            self._strategy.plan,
            ranks,
            costs,
            num_ranks=self._strategy.world_size,
            device=self._strategy.root_device.type,
            step_s=step_s,
            **self._times.arguments(),
        )

    def _before_backward(self, inner: Callable[..., None], *args: Any) -> None:
        inner(*args)
        before_backward(self._host.model())
        self._recorder.enter("backward")
        self._times.begin_backward()

    def _after_backward(self, inner: Callable[..., None], *args: Any) -> None:
        self._recorder.enter("other")
        inner(*args)


class Shortlist(NamedTuple):
    """What to try.

    Attributes:
        base: the user's plan.
        candidates: the most promising first; empty if nothing promises to be faster.
        not_allowed: by name of a compressor that was not allowed, the share of a step that it would save at most.
    """

    base: Candidate
    candidates: tuple[Candidate, ...]
    not_allowed: dict[str, float]


def shortlist(basis: Basis, options: TuneOptions) -> Shortlist:
    """Returns the plans that are worth trying, from what steps with the user's plan have shown.

    They are at most `MAX_CANDIDATES`, none of them slower than the best beyond the 95 % intervals of both. The first
    are the best with each compressor that promises nearly as much as the best of all, the fastest first. Then other
    layouts take turns with the compressors that are left: the layout whose number of buckets differs most from those
    before, at least by a factor of 2, as what a bucket costs besides its bytes is what predictions miss most.
    """
    base = basis.plan
    own = basis.predict(base)
    found = candidates(basis, (base.comm_hook, *options.lossy))
    found = [one for one in found if one.plan != base and options.fits(one.plan, base)]
    promising = [one for one in found if one.prediction.step_s < (1 - _MIN_GAIN) * own.step_s]
    slowest_s = min([one.prediction.high_s for one in promising], default=0.0)
    promising = [one for one in promising if one.prediction.low_s < slowest_s]
    best_s = min([own.step_s, *(one.prediction.step_s for one in found)])
    chosen = _diverse(promising, own.step_s, basis)
    return Shortlist(Candidate(base, own), tuple(chosen), _not_allowed(basis, options, best_s))


def _diverse(promising: Sequence[Candidate], own_s: float, basis: Basis) -> list[Candidate]:
    """Returns candidates in the order in which to try them; ``promising`` begins with the fastest."""
    best: dict[Compressor | None, Candidate] = {}
    for one in promising:
        best.setdefault(one.plan.comm_hook, one)
    gains = {hook: own_s - one.prediction.step_s for hook, one in best.items()}
    chosen = [one for hook, one in best.items() if gains[hook] >= _NEAR * max(gains.values())]
    rest = [one for one in best.values() if one not in chosen]
    num_buckets = {one.plan: len(buckets_of(one.plan, basis.workload.gradients)) for one in promising}

    def ratio(one: Candidate) -> float:
        own = num_buckets[one.plan]
        same = [num_buckets[other.plan] for other in chosen if other.plan.comm_hook == one.plan.comm_hook]
        return min((max(own, number) / min(own, number) for number in same), default=1.0)

    while promising and len(chosen) < MAX_CANDIDATES:
        other = max(promising, key=ratio)
        more = [other] if ratio(other) >= _MIN_RATIO else []
        more += [rest.pop(0)] if rest else []
        if not more:
            break
        chosen += more
    return chosen[:MAX_CANDIDATES]


def _not_allowed(basis: Basis, options: TuneOptions, best_s: float) -> dict[str, float]:
    """Returns what compressors would save beside the best allowed plan, if their arithmetic cost nothing."""
    if options.has_fixed_hook or basis.workload.gradient_bytes < _MIN_BYTES:
        return {}
    saved = {}
    for name, compressor in ready_compressors().items():
        if compressor.claims.is_recommended and compressor.claims.is_lossy and compressor not in options.lossy:
            plan = dataclasses.replace(basis.plan, comm_hook=compressor)
            step_s = predict(plan, basis.workload, basis.link, {}).step_s
            saved[name] = 1 - step_s / best_s
    return {name: share for name, share in saved.items() if share >= _MIN_GAIN}
