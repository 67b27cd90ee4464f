"""Calibration: measures the inputs of predictions in a few steps, and returns the plans that are worth trying."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from lightning_commopt.compat.wrapping import wrap_method
from lightning_commopt.compressors import Compressor
from lightning_commopt.compressors.catalog import ready_compressors
from lightning_commopt.cost.basis import Basis
from lightning_commopt.cost.buckets import buckets_of
from lightning_commopt.cost.candidates import candidates
from lightning_commopt.cost.compressor_cost import CompressorCost, measure_costs
from lightning_commopt.cost.gradient_times import GradientTimes
from lightning_commopt.cost.predict import Candidate, Costs, Prediction, predict
from lightning_commopt.measure.clock import clock_for
from lightning_commopt.measure.record import StepRecord
from lightning_commopt.measure.recorder import StepRecorder
from lightning_commopt.plan import CommPlan
from lightning_commopt.sync.ddp.observed import before_backward
from lightning_commopt.tune import limits
from lightning_commopt.tune.options import TuneOptions
from lightning_commopt.tune.training import TunedTraining

NUM_STEPS = 6
"""Steps that a calibration observes: `_NUM_SETTLING_STEPS`, and three whose median counts."""

MEASURING_S = 0.2
"""Time to measure a compressor on a processor that does nothing else, see ``docs/explanation/auto.md``."""

MAX_CANDIDATES = 6
"""Maximum number of plans in a shortlist: a first search tries half of them, and a second one the rest."""

_MIN_GAIN = 0.01
"""A plan is tried if it is predicted to save this share of a step. It is half of what a search requires
(`MIN_GAIN` in `limits`), because predictions are off by some percent to either side."""

_MIN_SHARE_OF_BEST = 2 / 3
"""A compressor must be predicted to save this share of the largest predicted gain to be tried before other layouts. It
is a judgement: one that is further behind rarely wins, and a layout may be mispredicted by as much."""

_MIN_BYTES = 2**18
"""Size of gradients from which on compressors that were not allowed are mentioned: the steps of smaller models do not
separate the link's rate from its latency."""

_MIN_RATIO = 2
"""Factor by which the number of buckets of another layout must differ from the layouts before: closer ones differ by
less than the noise of a search."""

_UNKNOWN = Prediction(step_s=math.nan, low_s=math.nan, high_s=math.nan, exposed_s=0.0)

_NUM_SETTLING_STEPS = 3
"""Number of first steps that do not count: DDP rebuilds its buckets after the first, or with a static graph after the
second, and memory is allocated in the next."""


class Calibration:
    """Records the steps of this rank while it exists: phases, buckets, and when each gradient is ready.

    Args:
        training: the training, in which a step begins now. If its plan has no comm hook, the model must be wrapped
            again while the calibration observes it, see `GradientSync.attach`.
        options: the compressors to measure.
        limit_s: seconds in which to measure those that are not in use.
    """

    def __init__(self, training: TunedTraining, options: TuneOptions, limit_s: float) -> None:
        assert training.buckets is not None
        self._buckets, self._strategy = training.buckets, training.strategy
        self._options = options
        self._limit_s = limit_s
        self.not_measured: list[Compressor] = []
        device = self._strategy.root_device
        self._recorder = StepRecorder(clock_for(device))
        parameters = training.buckets.model().module.named_parameters()
        self._times = GradientTimes(parameters, device, self._strategy.num_processes)
        self._step = 0
        self._buckets.observers.add(self._recorder)
        self._undo = [
            wrap_method(*training.begin_backward, self._before_backward),
            wrap_method(*training.end_backward, self._after_backward),
        ]

    def begin_batch(self, *, is_new_step: bool) -> None:
        """Marks the end of the wait for a batch; the first one of a step ends the step before."""
        if is_new_step and self._step:
            self._recorder.end_step(self._step, 0)
        self._step += is_new_step
        self._recorder.enter("forward")
        self._times.begin_forward()

    def steps(self) -> list[StepRecord]:
        """Returns the steps, without the `_NUM_SETTLING_STEPS` first ones; waits for the device."""
        return self._recorder.take(self._recorder.num_pending)[_NUM_SETTLING_STEPS:]

    def close(self) -> None:
        """Stops observing."""
        while self._undo:
            self._undo.pop()()
        self._times.close()
        self._buckets.observers.remove(self._recorder)

    def measure(self, known: Costs) -> Costs:
        """Measures the compressors for which ``limit_s`` suffices. All ranks of a machine do so at the same time.

        `not_measured` then has the allowed compressors that were not measured, now or before.

        Args:
            known: costs that earlier calibrations have measured.

        Returns:
            These, and those measured now.
        """
        began_s, longest_s, own = time.perf_counter(), MEASURING_S, self._strategy.plan.comm_hook
        gradients, costs = self._times.gradients(), dict[Compressor | None, CompressorCost]()
        for compressor in dict.fromkeys((own, *self._options.lossy)):
            start_s = time.perf_counter()
            is_needed = compressor is None or (compressor == own and own not in known)
            if not is_needed and start_s - began_s + longest_s > self._limit_s:
                self.not_measured += [compressor] if compressor not in known else []
                continue
            costs |= measure_costs([compressor], gradients, self._strategy.root_device, self._strategy.world_size)
            longest_s = max(longest_s, time.perf_counter() - start_s)
        return {**known, **costs}

    def basis(self, ranks: list[list[StepRecord]], costs: Costs, step_s: float) -> Basis:
        """Returns, on rank 0, what the steps of all ranks with the user's plan show.

        Args:
            ranks: the steps of each rank.
            costs: costs of the compressors, measured on this rank.
            step_s: time of a step that is not observed.

        Raises:
            ValueError: nothing can be predicted from these steps.
        """
        plan = self._strategy.plan
        assert isinstance(plan, CommPlan)
        return Basis.of_steps(
            plan,
            ranks,
            costs,
            num_ranks=self._strategy.world_size,
            device=self._strategy.root_device.type,
            step_s=step_s,
            **self._times.arguments(),
        )

    def _before_backward(self, inner: Callable[..., None], *args: Any) -> None:
        inner(*args)
        before_backward(self._buckets.model())
        self._recorder.enter("backward")
        self._times.begin_backward()

    def _after_backward(self, inner: Callable[..., None], *args: Any) -> None:
        self._recorder.enter("other")
        inner(*args)


class Shortlist(NamedTuple):
    """The plans to try.

    Attributes:
        base: the user's plan.
        candidates: the most promising first; empty if nothing promises to be faster.
        not_allowed: the largest share of a step that each compressor that was not allowed would save, by its name.
    """

    base: Candidate[Any]
    candidates: tuple[Candidate[Any], ...]
    not_allowed: dict[str, float]

    @property
    def expected(self) -> list[float | None]:
        """What `Search` expects of the user's plan and the candidates."""
        ratios = [candidate.prediction.high_s / self.base.prediction.step_s for candidate in self.candidates]
        return [1.0, *(None if math.isnan(ratio) else ratio for ratio in ratios)]

    @property
    def handicaps(self) -> dict[int, float]:
        """What `Search` requires of lossy candidates, unless the user's own compressor is lossy."""
        hooks = [candidate.plan.comm_hook for candidate in (self.base, *self.candidates)]
        is_lossy = [hook is not None and hook.claims.is_lossy for hook in hooks]
        return {arm: limits.LOSSY_HANDICAP for arm, lossy in enumerate(is_lossy) if lossy and not is_lossy[0]}


def unpredicted(base: Any, tries: Sequence[Any]) -> Shortlist:
    """Returns all plans to try, for a model whose steps nothing predicts."""
    return Shortlist(Candidate(base, _UNKNOWN), tuple(Candidate(plan, _UNKNOWN) for plan in tries), {})


def shortlist(
    basis: Basis, options: TuneOptions, kept: CommPlan | None = None, forbidden: Collection[Compressor | None] = ()
) -> Shortlist:
    """Returns the plans that are worth trying, from what steps with the user's plan have shown.

    A plan that was ``kept`` from an earlier search comes first, whatever is predicted for it. Plans with a compressor
    that is ``forbidden`` are left out.

    There are at most `MAX_CANDIDATES` others, none of them slower than the best beyond the 95 % intervals of both.
    First come the best plans with each compressor that is predicted to save nearly as much as the best of all, the
    fastest first. Then other layouts alternate with the remaining compressors. The next layout is the one whose number
    of buckets differs most from those before, at least by a factor of 2, because predictions are least certain about
    the cost of a bucket besides its bytes.
    """
    base = basis.plan
    own = basis.predict(base)
    predicted = candidates(basis, (base.comm_hook, *options.lossy))
    others = [other for other in predicted if other.plan not in (base, kept) and options.fits(other.plan, base)]
    allowed = [other for other in others if other.plan.comm_hook not in forbidden]
    promising = [other for other in allowed if other.prediction.step_s < (1 - _MIN_GAIN) * own.step_s]
    slowest_s = min([other.prediction.high_s for other in promising], default=0.0)
    promising = [other for other in promising if other.prediction.low_s < slowest_s]
    best_s = min([own.step_s, *(other.prediction.step_s for other in allowed)])
    chosen = _ordered_by_diversity(promising, own.step_s, basis)
    if kept is not None:
        is_known = kept.comm_hook is None or kept.comm_hook in basis.costs
        chosen.insert(0, Candidate(kept, basis.predict(kept) if is_known else _UNKNOWN))
    return Shortlist(Candidate(base, own), tuple(chosen), _not_allowed(basis, options, best_s))


def _ordered_by_diversity(
    promising: Sequence[Candidate[CommPlan]], own_s: float, basis: Basis
) -> list[Candidate[CommPlan]]:
    """Returns candidates in the order in which to try them; ``promising`` begins with the fastest."""
    best: dict[Compressor | None, Candidate[CommPlan]] = {}
    for candidate in promising:
        best.setdefault(candidate.plan.comm_hook, candidate)
    gains = {hook: own_s - candidate.prediction.step_s for hook, candidate in best.items()}
    chosen = [candidate for hook, candidate in best.items() if gains[hook] >= _MIN_SHARE_OF_BEST * max(gains.values())]
    rest = [candidate for candidate in best.values() if candidate not in chosen]
    num_buckets = {candidate.plan: len(buckets_of(candidate.plan, basis.workload.gradients)) for candidate in promising}

    def ratio(candidate: Candidate[CommPlan]) -> float:
        """Returns how many times more or fewer buckets it has than the nearest chosen one with its compressor."""
        own, hook = num_buckets[candidate.plan], candidate.plan.comm_hook
        numbers = [num_buckets[other.plan] for other in chosen if other.plan.comm_hook == hook]
        return min((max(own, number) / min(own, number) for number in numbers), default=1.0)

    while promising and len(chosen) < MAX_CANDIDATES:
        other = max(promising, key=ratio)
        more = [other] if ratio(other) >= _MIN_RATIO else []
        more += [rest.pop(0)] if rest else []
        if not more:
            break
        chosen += more
    return chosen[:MAX_CANDIDATES]


def _not_allowed(basis: Basis, options: TuneOptions, best_s: float) -> dict[str, float]:
    """Returns what other compressors would save beyond the best allowed plan if their arithmetic cost nothing."""
    if options.has_fixed_hook or basis.workload.gradient_bytes < _MIN_BYTES:
        return {}
    saved = {}
    for name, compressor in ready_compressors().items():
        if compressor.claims.is_recommended and compressor.claims.is_lossy and compressor not in options.lossy:
            plan = dataclasses.replace(basis.plan, comm_hook=compressor)
            step_s = predict(plan, basis.workload, basis.link, {}).step_s
            saved[name] = 1 - step_s / best_s
    return {name: share for name, share in saved.items() if share >= _MIN_GAIN}
