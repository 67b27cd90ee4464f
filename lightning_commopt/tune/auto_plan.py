"""AutoPlan: ``plan="auto"`` of a strategy, in every fit that it makes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_commopt.compat.lightning import batches_that_stepped, num_steps_of
from lightning_commopt.compat.torch import add_step_hook
from lightning_commopt.compat.wrapping import wrap_method
from lightning_commopt.compressors.configs import without_imports
from lightning_commopt.compressors.kernels import c_library
from lightning_commopt.plan import CommPlan, OptionError, Plan
from lightning_commopt.sync.groups import borrow_host_group
from lightning_commopt.sync.strategies import PlannedStrategy, TunedBuckets, TunedStrategy, trainer_of
from lightning_commopt.text.validation import info, warn
from lightning_commopt.tune.options import TuneOptions
from lightning_commopt.tune.training import Buckets, TunedTraining
from lightning_commopt.tune.tuner import Tuner
from lightning_commopt.tune.verdict import summary

_KEY = "plan='auto'"
"""Key of the chosen plan in a checkpoint, beside the names of modules. No module can have this name."""


_Strategy = TypeVar("_Strategy", bound=PlannedStrategy)
_TrainersStrategy = TypeVar("_TrainersStrategy", bound=TunedStrategy)


class AutoPlan(ABC, Generic[_Strategy]):
    """Tunes the fits of a strategy; without options it does nothing. See `FitPlan`, and `LoopPlan` for Fabric.

    Args:
        strategy: the strategy that trains.
        options: what may be chosen; None if ``plan`` is not "auto".
    """

    _tells_verdict = True  # whether the verdict is logged; otherwise the caller of `describe` prints it
    _max_regret = 0.01  # share of a fit's time, over all its steps, that searching may cost

    def __init__(self, strategy: _Strategy, options: TuneOptions | None) -> None:
        self._strategy = strategy
        self._options = options
        self._base: Plan | None = None
        self._resumed: Plan | None = None
        self._tuner: Tuner | None = None
        self._is_due = False
        self._found: dict[str, Any] = {}

    def start_fit(self, *, is_fit: bool = True) -> None:
        """Begins a fit, before the model is wrapped; nothing without ``is_fit``, as in a validation alone."""
        if self._options is None or not is_fit:
            return
        strategy, self._resumed = self._strategy, None
        self._is_due = strategy.world_size > 1
        if not self._is_due:
            info("plan='auto': one rank has no gradients to synchronize, so there is nothing to choose.")
            return
        if strategy.root_device.type == "cpu" and any(hook.claims.has_c_kernels for hook in self._options.lossy):
            c_library.load()  # compiles once per machine, so that no step waits for it
        if self._base is None:
            self._base = strategy.plan
        elif strategy.plan != self._base:
            self._resumed = strategy.plan  # an earlier fit has chosen it

    @property
    def is_wanted(self) -> bool:
        """Whether ``plan`` is "auto"."""
        return self._options is not None

    @property
    def has_decided(self) -> bool:
        """Whether no search is under way, on any rank; a later one may follow."""
        return self._tuner is not None and self._tuner.has_decided

    def begin_batch(self, batch: Any, batch_idx: int) -> None:
        """Must be called before every batch of a fit, on all ranks."""
        if self._is_due:
            self._is_due = False
            assert self._options is not None
            assert self._base is not None
            try:
                group = borrow_host_group()
            except RuntimeError as error:
                warn(
                    f"plan='auto': the ranks cannot connect over gloo ({error}), so the plan is not changed.",
                    on_every_rank=True,
                )
                return
            self._tuner = Tuner(
                *(group, self._training(), self._options, self._base, self._resumed, self._max_regret),
                tells_verdict=self._tells_verdict,
            )
        if self._tuner is not None and not self._tuner.is_over:
            self._tuner.begin_batch(batch, batch_idx)

    @abstractmethod
    def _training(self) -> TunedTraining:
        """Returns the training that the strategy is in."""

    def describe(self) -> dict[str, Any]:
        """Returns what was found in this fit, or in the last one; JSON-serializable, and empty except on rank 0."""
        tuner = self._tuner
        if tuner is None or tuner.director is None:
            return self._found
        return summary(tuner.director, tuner.plans, tuner.history.stretches)

    def end_fit(self, keep: Callable[[Any], None] | None = None) -> None:
        """Ends a fit; reports what was found on rank 0. By default the strategy keeps the chosen plan."""
        tuner, self._is_due = self._tuner, False
        if tuner is None:
            return
        self._found, self._tuner = self.describe(), None
        plan = tuner.kept_plan
        tuner.close()
        if keep is not None:
            keep(plan)
        elif self._strategy.plan != plan:
            self._strategy.apply_plan(plan)
        if self._found and self._tells_verdict and self._found["verdict"] != tuner.last_logged:
            info(f"plan='auto': {self._found['verdict']}")

    def add_choice(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Returns the state for a checkpoint with the plan of this moment, if it was chosen."""
        plan = self._strategy.plan if self._tuner is None else self._tuner.kept_plan
        if self._options is None or self._base is None or plan == self._base:
            return saved
        choice = type(plan)(**{name: getattr(plan, name) for name in plan.searched})
        try:
            return {**saved, _KEY: choice.to_json()}
        except ValueError:  # a compressor without a name
            return saved

    def resume_choice(self, saved: Any) -> None:
        """Continues with the plan that a checkpoint holds, if this fit may choose it."""
        text = saved.get(_KEY) if isinstance(saved, dict) else None
        if text is None or self._options is None or self._base is None or self._tuner is not None:
            return
        try:
            with without_imports():  # compressors that may be chosen are imported, and the checkpoint is not trusted
                choice = type(self._base).from_json(text)
        except (OptionError, TypeError) as error:
            warn(f"plan='auto': the plan in the checkpoint cannot be used: {error}")
            return
        plan = self._base.replaced(**{name: getattr(choice, name) for name in choice.searched})
        if self._options.fits(plan, self._base):
            self._resumed = plan
            self._strategy.apply_plan(plan)


class _StepCounter:
    """Counts the steps of optimizers, also of optimizers that a module uses without Lightning's wrapper.

    Under manual optimization Lightning counts either batches, including those that only accumulate, or only steps of
    its wrappers.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self.num_steps = 0
        handles = [add_step_hook(optimizer, self._count) for optimizer in optimizers]
        self._handles = [handle for handle in handles if handle is not None]

    def _count(self, *_: Any) -> None:
        self.num_steps += 1

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


class _PlanOfFits(AutoPlan[_TrainersStrategy]):
    """Tunes the fits of a Trainer's strategy."""

    _counter: _StepCounter | None = None
    _unwrap: Callable[[], None] | None = None
    _has_trained = False

    def start_fit(self, *, is_fit: bool = True) -> None:
        super().start_fit(is_fit=is_fit)
        if self._is_due:
            self._unwrap = wrap_method(self._strategy, "on_train_end", self._end_training)

    def begin_batch(self, batch: Any, batch_idx: int) -> None:
        if self._has_trained:
            # LearningRateFinder has trained for some steps, and this batch belongs to the fit itself.
            self.end_fit()
            self.start_fit()
        super().begin_batch(batch, batch_idx)

    def end_fit(self, keep: Callable[[Any], None] | None = None) -> None:
        super().end_fit(keep)
        self._has_trained = False
        if self._unwrap is not None:
            self._unwrap()
            self._unwrap = None
        if self._counter is not None:
            self._counter.close()
            self._counter = None

    def _end_training(self, inner: Callable[..., None], *args: Any) -> None:
        self._has_trained = True
        if self._tuner is not None:
            self._tuner.return_group()
        inner(*args)

    def _training_with(self, **options: Any) -> TunedTraining:
        """Returns the fit that the strategy is in, with what depends on how its model is wrapped."""
        strategy, trainer = self._strategy, trainer_of(self._strategy)
        times: dict[str, Any]
        if trainer.lightning_module.automatic_optimization:
            times = {
                "step": lambda: batches_that_stepped(trainer),
                "num_steps_left": lambda: num_steps_of(trainer) - batches_that_stepped(trainer),
                "accumulated": trainer.accumulate_grad_batches,
            }
        else:  # the training step decides how many batches are accumulated
            counter = self._counter = _StepCounter(trainer.optimizers)
            times = {"step": lambda: counter.num_steps, "num_steps_left": lambda: math.inf, "accumulated": None}
        return TunedTraining(
            strategy=strategy,
            begin_backward=(strategy, "pre_backward"),
            end_backward=(strategy, "post_backward"),
            pauses=[(strategy, "on_validation_start"), (strategy, "save_checkpoint")],
            **times,
            **options,
        )


class FitPlan(_PlanOfFits[TunedBuckets]):
    """Tunes the fits of a Trainer's strategy with DDP: its buckets and compressors, by predictions."""

    def _training(self) -> TunedTraining:
        strategy = self._strategy

        def wrapper() -> DistributedDataParallel:
            assert isinstance(strategy.model, DistributedDataParallel)
            return strategy.model

        def apply_plan(plan: CommPlan) -> None:
            with strategy.without_init_sync():
                strategy.apply_plan(plan)

        return self._training_with(
            parameters=lambda: wrapper().module.named_parameters(),
            buckets=Buckets(wrapper, strategy.sync_observers),
            apply_plan=apply_plan,
        )


class ShardedFitPlan(_PlanOfFits[TunedStrategy]):
    """Tunes the fits of a Trainer's strategy for sharded models: tries each compressor that may be chosen.

    Nothing is predicted, and averages are not guarded: FSDP2 keeps no gradients that a compressor has not seen.
    """

    def _training(self) -> TunedTraining:
        strategy = self._strategy
        assert self._base is not None
        assert self._options is not None
        assert strategy.model is not None
        return self._training_with(
            parameters=strategy.model.named_parameters,
            tries=[self._base.replaced(comm_hook=hook) for hook in self._options.lossy],
            apply_plan=strategy.apply_plan,
        )


def without_choice(saved: Any) -> Any:
    """Returns the state in a checkpoint without what `AutoPlan.add_choice` has added."""
    return {name: state for name, state in saved.items() if name != _KEY} if isinstance(saved, dict) else saved
