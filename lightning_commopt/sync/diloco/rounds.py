"""Rounds: decides which fragment is exchanged after which step, and carries the exchanges out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable

from torch.nn import Module

from lightning_commopt.measure.observer import APPLIED, DUE, BucketInfo, Observers
from lightning_commopt.plan import DiLoCoPlan
from lightning_commopt.sync.diloco.counts import Counts
from lightning_commopt.sync.diloco.ending import EndsFits
from lightning_commopt.sync.diloco.exchange import Arrived, Exchange, GlobalWeights, LocalWeights
from lightning_commopt.sync.diloco.fragments import Fragment, split_model
from lightning_commopt.sync.diloco.into_model import carry_over, mix
from lightning_commopt.sync.diloco.left_out import LeftOut
from lightning_commopt.sync.diloco.outer import OuterSGD
from lightning_commopt.sync.diloco.report import Report
from lightning_commopt.sync.diloco.under_way import UnderWay
from lightning_commopt.sync.executors import WorkerThread


class Rounds(EndsFits):
    """The exchanges of one model in the course of a fit.

    Args:
        plan: the plan.
        module: the model; its weights must be equal on all ranks.
        exchange: averages fragments over the workers.
        trained: names of parameters that were trained before; see `split_model`.
        observers: notified of every exchange.

    Attributes:
        fragments: the global state of each fragment.
        left_out: the parameters that are in no fragment.
        counts: what this rank has trained on.
        num_steps: number of optimizer steps so far.
        steps_before: for each fragment, the number of steps at its last exchange.
        changed: indices of fragments that may have been trained since their last exchange.
        trained: names of parameters that required a gradient in a step since their last exchange.
        under_way: exchanges that have begun and are not applied yet.
        is_behind: whether the others have continued without this rank, so that what it trains is dropped until it
            joins again.
    """

    def __init__(
        self,
        plan: DiLoCoPlan,
        module: Module,
        exchange: Exchange,
        trained: Collection[str] = (),
        observers: Observers | None = None,
    ) -> None:
        self.plan, self.exchange = plan, exchange
        self.observers = Observers() if observers is None else observers
        self.outer = OuterSGD(lr=plan.outer_lr, momentum=plan.outer_momentum, nesterov=plan.nesterov)
        self.fragments: list[GlobalWeights] = []
        self.left_out = LeftOut([], [])
        self.fragments = self._divide(module, trained)
        self.num_steps = 0
        self.steps_before = [0] * plan.fragments
        self.counts = Counts(samples_before=[0.0] * plan.fragments)
        self.under_way: deque[UnderWay] = deque()
        self._thread = WorkerThread()
        self.changed: set[int] = set()
        self.trained: set[str] = set()
        self.is_behind = False

    def _divide(self, module: Module, trained: Collection[str]) -> list[GlobalWeights]:
        buffers = {name: x for global_state in self.fragments for name, x in global_state.fragment.buffers.items()}
        parts = split_model(module, self.plan.fragments, self.plan.fragment_by, trained, buffers)
        self._leave_out(module, parts)
        return [GlobalWeights.of(fragment, self.outer) for fragment in parts]

    def _leave_out(self, module: Module, parts: Iterable[Fragment]) -> None:
        known = [x for part in parts for x in part.parameters.values()]
        self.left_out = LeftOut(module.named_parameters(), known, earlier=self.left_out)

    def find_added(self, module: Module) -> None:
        """Adds parameters that were added to the model since it was divided to `left_out`."""
        self._leave_out(module, [global_state.fragment for global_state in self.fragments])

    def divide_again(self, module: Module) -> None:
        """Divides the model again after parameters were unfrozen or added. All ranks must call it after the same step.

        Exchanges under way are applied early. Each parameter keeps its global weights, momentum and residual. Unfrozen
        and new parameters must be equal on all ranks.
        """
        self.wait()
        while self.under_way:
            self._apply(self.under_way.popleft())
        old = self.fragments
        trained = [name for global_state in old for name in global_state.fragment.parameters]
        self.fragments = self._divide(module, [*trained, *self.left_out.unfrozen()])
        carry_over(old, self.fragments, self.exchange)

    def step(
        self,
        loss_scale: Callable[[], float] = float,
        has_signal: Callable[[], bool] = bool,
        num_steps: int = 1,
        batch: int = 0,
    ) -> list[tuple[int, Arrived]]:
        """Counts optimizer steps and begins the exchanges that follow them. All ranks must call it.

        Args:
            loss_scale: returns the scale of this rank's gradient scaler; called if an exchange begins.
            has_signal: returns whether this rank has received a signal to end or to save; called if an exchange begins.
            num_steps: number of steps since the last call. If several exchanges of a fragment were due after these
                steps, only one begins.
            batch: number of the batch, which must be equal on all ranks in the same exchange.

        Returns:
            For each result that was applied to the model, the index of its fragment and the result.

        Raises:
            UnequalStepsError: ranks have taken different numbers of steps.
        """
        self.num_steps += num_steps
        self.expect_changes()
        applied = self._apply_due()
        lateness = [((self.num_steps - offset) % self.plan.sync_every, i) for i, offset in enumerate(self.plan.offsets)]
        # Exchanges begin in the order in which they are due, so that none has to wait until its fragment is due again.
        for late, index in sorted(lateness, reverse=True):
            if late < num_steps:
                others = {"loss_scale": loss_scale(), "has_signal": float(has_signal()), "batch": batch}
                self._begin(index, self.num_steps - late, self.counts.report(index, num_steps=self.num_steps, **others))
        return [*applied, *self._apply_due()]

    def _begin(self, index: int, after: int, report: Callable[[], Report]) -> None:
        global_state, local = self.fragments[index], LocalWeights.of(self.fragments[index].fragment)
        self._introduce()
        local.num_joins = self._num_joins
        local.trained = self.trained.intersection(global_state.fragment.parameters)
        step = self._exchanges_before()
        future = self._thread.future(local.flat)
        sync = self.observers.exchange(
            BucketInfo(index, local.flat.nbytes, tuple(global_state.fragment.parameters), True)
        )
        under_way = UnderWay(index, after + self.plan.overlap, future=future, sync=sync)

        def exchange() -> Arrived:
            return self.exchange.run(global_state, local, report(), step, self.outer)

        self.steps_before[index] = self.num_steps
        self.changed.discard(index)
        self.trained.difference_update(global_state.fragment.parameters)
        self.under_way.append(under_way)
        self._thread.submit(lambda: under_way.run(local, exchange, lambda: self.exchange.bytes_sent), [future])

    def _apply_due(self) -> list[tuple[int, Arrived]]:
        applied = []
        while self.under_way and self.under_way[0].due <= self.num_steps:
            under_way = self.under_way.popleft()
            applied.append((under_way.index, self._apply(under_way)))
        return [(index, arrived) for index, arrived in applied if not arrived.has_missed]

    def _apply(self, under_way: UnderWay) -> Arrived:
        global_state, sync = self.fragments[under_way.index], under_way.sync
        if sync is not None:
            sync.note(DUE)
        arrived = under_way.wait(global_state.fragment)
        self._take(global_state, arrived)
        if sync is not None:
            sync.note(APPLIED)
        return arrived

    def _take(self, global_state: GlobalWeights, arrived: Arrived) -> None:
        """Applies the result of an exchange to the model, unless the others made the exchange without this rank."""
        own_share = self.plan.own_share
        if arrived.has_missed:
            self.is_behind = True
            return
        if arrived.joined is not None:
            self._join(arrived.joined)
            arrived.joined, own_share = None, 0.0
        global_state.take(arrived)
        mix(global_state, own_share)

    def meet(self, value: bool = False) -> bool:
        """Returns whether ``value`` is true on any rank. All ranks must call it between two steps.

        It is called before other collectives between steps, to detect a rank that has skipped a step and so comes here
        while others wait for it in an exchange. It first waits for exchanges under way.

        Raises:
            UnequalStepsError: ranks have begun different exchanges.
        """
        self.wait()  # the messages of an exchange in the thread would be paired with those below
        return self.exchange.meet(self.num_steps, value)

    @property
    def is_exact(self) -> bool:
        """Whether all ranks have the same global weights once exchanges under way are applied; call `wait` before."""
        arrived = [under_way.arrived for under_way in self.under_way]
        return self.exchange.is_complete and all(x is None or x.is_complete for x in arrived)

    def close(self) -> bool:
        """Ends the thread; returns whether all exchanges have succeeded."""
        return self._thread.close()
