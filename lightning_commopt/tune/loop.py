"""LoopPlan: ``plan="auto"`` in a loop in Fabric, where no hooks report the beginning, the end and the steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.compat.wrapping import wrap_method
from lightning_commopt.plan import CommPlan
from lightning_commopt.sync.ddp.gradient_sync import GradientSync
from lightning_commopt.sync.ddp.modules import ModuleSyncs, SyncedModule
from lightning_commopt.sync.strategies import BucketedStrategy
from lightning_commopt.text.validation import warn
from lightning_commopt.tune.auto_plan import AutoPlan
from lightning_commopt.tune.options import TuneOptions
from lightning_commopt.tune.training import Buckets, TunedTraining

ApplyPlan = Callable[[CommPlan, Sequence[GradientSync]], None]


class LoopPlan(AutoPlan[BucketedStrategy]):
    """Tunes the module that a loop trains.

    A step ends with an optimizer step after a synchronized backward. Several optimizers make one step: it ends where
    the first of them steps again. A step does not end between a forward and its backward, as the plan may change at the
    end of a step.

    Which modules are trained shows in their backwards, in which all ranks take part: a rank may keep a module alive
    that others have dropped.

    Args:
        strategy: the strategy of Fabric.
        options: what may be chosen; None if ``plan`` is not "auto".
        syncs: the gradient syncs of the modules that are set up.
        apply_plan: changes the plan of the modules with these syncs, and of later ones; all ranks call it.
    """

    def __init__(
        self, strategy: BucketedStrategy, options: TuneOptions | None, syncs: ModuleSyncs, apply_plan: ApplyPlan
    ) -> None:
        super().__init__(strategy, options)
        self._syncs = syncs
        self._apply_plan = apply_plan
        self._base = strategy.plan
        self._has_started = False
        self._trained: list[SyncedModule] = []  # modules that had a backward since the last step
        self._tuned: SyncedModule | None = None
        self._stepped: list[ref[Any]] = []  # optimizers that have stepped; an id may be used again, on some ranks
        self._num_steps = 0

    def start_loop(self) -> None:
        """Must be called whenever a module is set up, in the process group."""
        if self._options is not None and not self._has_started:
            self._has_started = True
            wrap_method(self._syncs, "end_backward", self._note)
            self.start_fit()

    def end_optimizer_step(self, optimizer: Any) -> None:
        """Must be called after every optimizer step, on all ranks."""
        if not self._trained or any(module.is_awaited for module in self._trained):
            return
        if all(stepped() is not optimizer for stepped in self._stepped):
            self._stepped.append(ref(optimizer))
            return
        self._stepped = [ref(optimizer)]
        trained, self._trained = self._trained, []
        self._num_steps += 1
        if self._tuner is not None and trained != [self._tuned]:
            self._restart_for_other_modules(trained)
        if self._is_due and len(trained) > 1:
            self._is_due = False
            warn(
                f"plan='auto' is for one module, but a step of this loop trains {len(trained)}: the plan is not"
                " changed. Choose a plan with 'commopt predict' and apply_plan."
            )
        if self._is_due:
            self._tuned = trained[0]
        self.begin_batch(None, 1)

    def _note(self, inner: Callable[[SyncedModule], None], module: SyncedModule) -> None:
        inner(module)
        if module not in self._trained:
            self._trained.append(module)

    def _restart_for_other_modules(self, trained: Sequence[SyncedModule]) -> None:
        """Ends tuning for one module, and starts it for others, which get the plan that was chosen."""
        assert self._tuner is not None
        self._tuner.return_group()
        self.end_fit(lambda plan: self._apply_plan(plan, [module.sync for module in trained]))
        self.start_fit()

    def _training(self) -> TunedTraining:
        assert self._tuned is not None
        tuned, strategy = self._tuned, self._strategy

        def model() -> DistributedDataParallel:
            assert tuned.sync.model is not None
            return tuned.sync.model

        def apply_plan(plan: CommPlan) -> None:
            with strategy.without_init_sync():
                self._apply_plan(plan, [tuned.sync])

        return TunedTraining(
            strategy=strategy,
            parameters=lambda: model().module.named_parameters(),
            buckets=Buckets(model, strategy.sync_observers),
            apply_plan=apply_plan,
            step=lambda: self._num_steps,
            num_steps_left=lambda: math.inf,
            accumulated=None,
            begin_backward=(tuned, "begin"),
            end_backward=(tuned, "end"),
            forwards=[(tuned, "forward")],
            pauses=[(strategy, "save_checkpoint")],
        )
