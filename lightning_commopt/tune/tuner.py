"""Tuner: carries out the decisions of rank 0 on every rank of a fit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_commopt.compat.wrapping import wrap_method
from lightning_commopt.compressors.registry import compressor_name
from lightning_commopt.cost.predict import Costs
from lightning_commopt.measure.recorder import issued_by
from lightning_commopt.plan import Plan
from lightning_commopt.sync.groups import BorrowedGroups
from lightning_commopt.text.validation import info, warn
from lightning_commopt.tune.calibration import MEASURING_S, Calibration, Shortlist, shortlist, unpredicted
from lightning_commopt.tune.director import CALIBRATE, Director
from lightning_commopt.tune.guard import Guard, error_limit
from lightning_commopt.tune.options import TuneOptions
from lightning_commopt.tune.search import Report
from lightning_commopt.tune.step_timer import StepTimer
from lightning_commopt.tune.training import TunedTraining, load_choice, save_choice
from lightning_commopt.tune.verdict import History, text_to_log

_ROW = 128
"""Number of values that a rank sends after a visit: the times of its steps, at most `WATCH_STEPS`, the guard's error,
and the time of the change of plan. A fixed size saves a message with the size, so it must exceed their number."""


class Tuner:
    """Runs the steps of a fit with the plans that the director on rank 0 wants timed.

    All ranks must create it at the same point, and call `begin_batch` before every batch. They exchange a message of a
    kilobyte at the end of every visit: after some steps during a search, and after a hundred once a plan is chosen.

    Args:
        group: gloo group of all ranks that only this tuner uses.
        training: training on several ranks, in which a step begins now.
        options: what may be chosen.
        base: the user's plan.
        resumed: a plan that was chosen before, and that the strategy has; None to search.
        max_regret: share of the fit's time that searching may cost.
        tells_verdict: log the result of each search; that a search begins is logged anyway.

    Attributes:
        plans: the user's plan, and the candidates; the same on all ranks.
        director: decides, on rank 0; None on the others.
        history: times of the steps, on rank 0.
        has_decided: whether no search is under way.
        last_logged: the text that was logged last, on rank 0.
    """

    def __init__(
        self,
        group: BorrowedGroups,
        training: TunedTraining,
        options: TuneOptions,
        base: Plan,
        resumed: Plan | None,
        max_regret: float,
        *,
        tells_verdict: bool = True,
    ) -> None:
        self._training, self._strategy = training, training.strategy
        self._tells_verdict = tells_verdict
        self._options = options
        self.plans = [base]
        self._group = group
        self._timer = StepTimer(self._strategy.root_device)
        self._calibration: Calibration | None = None
        self._costs: Costs = {}
        self._forbidden: set[Any] = set()
        self._chosen = 0
        self._arm, self._num_left, self._step = 0 if resumed is None else 1, 0, -1
        self._change_s = 0.0
        self._guard: Guard | None = None
        self.director: Director | None = None
        self.last_logged = ""
        self.history = History()
        fit = training.describe(base) if self._strategy.global_rank == 0 else None
        known = None if fit is None or resumed is not None else load_choice(fit, options, base)
        self._fit, self._saved = fit, known
        self._share_plans([] if known is None else [known])
        if resumed is not None:
            self.plans.append(resumed)
        measured = {*filter(None, (base.comm_hook, *options.lossy))} if training.buckets is not None else set()
        if self._strategy.global_rank == 0:
            self.director = Director(
                training.num_steps_left(),
                arm=self._arm,
                has_known=known is not None,
                is_predictable=training.buckets is not None,
                max_regret=max_regret,
                # DDP lays out the buckets of a static graph one step later.
                num_settling_steps=3 if getattr(base, "static_graph", None) else 2,
                measuring_s=MEASURING_S * len(measured),
            )
        self._undo = [wrap_method(*training.end_backward, self._end_backward)]
        self._undo += [wrap_method(*pause, self._exclude) for pause in training.pauses]
        self._undo += [wrap_method(*forward, self._add_inputs) for forward in training.forwards]
        self._decide()

    @property
    def kept_plan(self) -> Plan:
        """The plan that training continues with if the search ends here: not one that is only tried."""
        return self._strategy.plan if self.has_decided else self.plans[self._chosen]

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to decide."""
        return self._num_left == 0

    def begin_batch(self, batch: Any, batch_idx: int) -> None:
        """Ends the previous step, if the batch begins a new one; then changes the plan if that is due."""
        step = self._training.step()
        is_new = step != self._step
        if is_new and self._step >= 0:
            if batch_idx == 0:
                self._timer.exclude()  # the dataloaders started again
            self._timer.end_step()
            self._num_left -= 1
        self._step = step
        if self._calibration is not None:
            self._calibration.begin_batch(is_new_step=is_new)
        if self._num_left == 0:
            with issued_by("plan='auto'"):
                self._end_visit()
            if self.is_over:
                return
            if self._calibration is not None:
                self._calibration.begin_batch(is_new_step=True)
        if self._guard is not None and is_new:
            self._guard.begin_step()
        self._timer.add_batch(batch)

    def close(self) -> None:
        """Stops timing; the plan stays."""
        while self._undo:
            self._undo.pop()()
        if self._calibration is not None:
            self._calibration.close()
            self._calibration = None
        self._guard_plan(None)

    def return_group(self) -> None:
        """Returns the group to the pool. All ranks must call it, before `close`."""
        if not self.is_over:
            self._group.return_to_pool()

    def _guard_plan(self, plan: Plan | None) -> None:
        """Guards the averages of a lossy plan that was chosen; None to stop."""
        buckets = self._training.buckets
        is_lossy = plan is not None and plan.is_lossy and buckets is not None
        if self._guard is not None and not is_lossy:
            self._guard.close()
            self._guard = None
        elif self._guard is None and is_lossy and buckets is not None:
            self._guard = Guard(buckets.model, self._group.all_ranks)

    def _end_backward(self, inner: Callable[..., None], *args: Any) -> None:
        inner(*args)
        if self._guard is not None:
            self._guard.end_backward()

    def _exclude(self, inner: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self._timer.exclude()
        inner(*args, **kwargs)

    def _add_inputs(self, inner: Callable[..., None], inputs: Any) -> None:
        self._timer.add_batch(inputs)
        inner(inputs)

    def _end_visit(self) -> None:
        seconds, ended_s = self._timer.take(), time.perf_counter()
        if self._calibration is not None:
            self._end_calibration(self._calibration)
            self._calibration = None
        elif self._arm == CALIBRATE:
            self._list_tries()
        if self._arm == CALIBRATE:
            ended_s, before_s = time.perf_counter(), ended_s
            if self.director is not None:
                self.director.aside_s = ended_s - before_s
        row = torch.full((_ROW,), math.nan, dtype=torch.float64, device="cpu")
        row[: len(seconds)] = torch.tensor(seconds, dtype=torch.float64, device="cpu")
        row[-2], row[-1] = math.nan if self._guard is None else self._guard.error, self._change_s
        rows = [torch.empty_like(row) for _ in range(self._strategy.world_size)]
        dist.all_gather(rows, row, group=self._group.all_ranks)
        if self.director is not None:
            slowest = torch.stack(rows).amax(dim=0).tolist()  # NaN where one rank has it
            plan = self.plans[max(0, self._arm)]
            self.history.add(plan.name, slowest[: len(seconds)], is_timed=self.director.is_timed)
            self._check(slowest[-2])
            self.director.advance(Report(tuple(slowest[: len(seconds)]), slowest[-1]))
            self._save_choice()
        self._decide()
        self._change_s = time.perf_counter() - ended_s

    def _decide(self) -> None:
        """Carries out what rank 0 has decided."""
        message = torch.zeros(5, dtype=torch.float64, device="cpu")
        if (director := self.director) is not None:
            decided = [*director.visit, director.is_timed, director.chosen, director.measuring_limit_s]
            message = torch.tensor(decided, dtype=torch.float64, device="cpu")
        dist.broadcast(message, src=0, group=self._group.all_ranks)
        arm, self._num_left, is_timed, self._chosen = map(int, message[:4].tolist())
        if arm != self._arm:
            self._change_to(arm, float(message[4]))
        self._guard_plan(self.plans[arm] if arm > 0 and not is_timed else None)
        self.has_decided = self.is_over or not is_timed
        self._timer.restart(is_exact=bool(is_timed))
        self._log_search()
        if self.is_over:
            self.close()
            self._group.return_to_pool()

    def _log_search(self) -> None:
        """Logs that a search begins, and later its result, each once."""
        text = "" if self.director is None else text_to_log(self.director, self.plans)
        is_wanted = self.director is not None and (self._tells_verdict or self.director.is_searching)
        if is_wanted and text not in ("", self.last_logged):
            self.last_logged = text
            info(f"plan='auto': {text}")

    def _check(self, error: float) -> None:
        """Forbids the compressor in use if the guard finds its averages to be far off; on rank 0."""
        hook = self.plans[max(0, self._arm)].comm_hook
        assert self.director is not None
        if hook is not None and error > error_limit(hook):
            self._forbidden.add(hook)
            self.director.forbid([arm for arm, plan in enumerate(self.plans) if arm and plan.comm_hook == hook])
            if self._fit is not None:
                save_choice(self._fit, self.plans[0])  # the next fit must not begin with it
            warn(
                f"plan='auto': averages with comm_hook={compressor_name(hook)!r} are off by {error:.2g} of the"
                f" gradient's norm, above its limit of {error_limit(hook):.2g}. Training continues with"
                f" {self.plans[0].name}."
            )

    def _change_to(self, arm: int, measuring_limit_s: float) -> None:
        self._arm = arm
        plan = self.plans[max(0, arm)]
        buckets = self._training.buckets
        is_observable = plan.comm_hook is not None or buckets is None or bool(buckets.observers)
        if arm == CALIBRATE and buckets is not None:
            self._calibration = Calibration(self._training, self._options, measuring_limit_s)
        # DDP's own average must be wrapped to be observed, and back.
        if plan != self._strategy.plan or not is_observable:
            self._training.apply_plan(plan)

    def _list_tries(self) -> None:
        """Makes the plans to try the candidates, if nothing can be predicted."""
        kept = self.plans[self._chosen]
        tries = sorted(self._training.tries, key=lambda plan: plan != kept)
        if self.director is not None:
            self.director.shortlist = unpredicted(self.plans[0], tries)
        self._share_plans(tries)

    def _end_calibration(self, calibration: Calibration) -> None:
        """Measures compressors, and has rank 0 choose the candidates."""
        calibration.close()
        steps = calibration.steps()
        self._costs = calibration.measure(self._costs)
        is_rank_0 = self.director is not None
        ranks: list[Any] | None = [None] * self._strategy.world_size if is_rank_0 else None
        dist.gather_object(steps, ranks, dst=0, group=self._group.all_ranks)
        plans: list[Plan] = []
        if self.director is not None and ranks is not None:
            kept: Any = self.plans[self._chosen] if self._chosen else None
            found: Shortlist | None
            try:
                basis = calibration.basis(ranks, self._costs, self.director.base_s)
                found = shortlist(basis, self._options, kept, self._forbidden)
            except Exception as error:  # a prediction must not end a fit, and the other ranks wait
                warn(f"plan='auto': step times cannot be predicted ({type(error).__name__}: {error}).")
                found = None if kept is None else unpredicted(self.plans[0], [kept])
            self.director.shortlist = found
            self.director.not_measured = tuple(map(compressor_name, calibration.not_measured))
            plans = [] if found is None else [candidate.plan for candidate in found.candidates]
        self._share_plans(plans)

    def _share_plans(self, plans: Sequence[Plan]) -> None:
        """Makes the candidates of rank 0 known to all ranks."""
        base = self.plans[0]
        hooks = (base.comm_hook, *self._options.lossy)
        names = [name for name in base.searched if name != "comm_hook"]
        chosen = [({name: getattr(plan, name) for name in names}, hooks.index(plan.comm_hook)) for plan in plans]
        sent: list[Any] = [chosen]  # not the compressors, whose classes may be the user's
        dist.broadcast_object_list(sent, src=0, group=self._group.all_ranks)
        self.plans = [base, *(base.replaced(**options, comm_hook=hooks[index]) for options, index in sent[0])]

    def _save_choice(self) -> None:
        if self.director is None or self._fit is None or not self.director.searches:
            return
        chosen = self.plans[self.director.chosen]
        if chosen not in (self._saved, self.plans[0]):
            self._saved = chosen
            save_choice(self._fit, chosen)
