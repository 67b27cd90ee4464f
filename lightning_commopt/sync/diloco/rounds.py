"""Rounds: which fragment is exchanged after which step."""

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
    """The exchanges of one model in the course of a fit, whose weights are equal on all ranks at its beginning.

    For ``trained``, the names of parameters that were trained before, see `split_model`.

    Attributes:
        fragments: the global weights.
        left_out: the parameters that are in no fragment.
        counts: what this rank has trained on.
        num_steps: number of optimizer steps so far.
        steps_before: for each fragment, their number at its last exchange.
        changed: numbers of the fragments that may have been trained since their last exchange.
        trained: names of the parameters that required a gradient in a step since their last exchange.
        under_way: the exchanges that have begun, and are not applied yet.
        is_behind: whether the others have gone on without this rank, so that training is in vain until it joins again.
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
        buffers = {name: x for of in self.fragments for name, x in of.fragment.buffers.items()}
        parts = split_model(module, self.plan.fragments, self.plan.fragment_by, trained, buffers)
        self._leave_out(module, parts)
        return [GlobalWeights.of(fragment, self.outer) for fragment in parts]

    def _leave_out(self, module: Module, parts: Iterable[Fragment]) -> None:
        known = [x for part in parts for x in part.parameters.values()]
        self.left_out = LeftOut(module.named_parameters(), known, earlier=self.left_out)

    def find_added(self, module: Module) -> None:
        """Leaves out also what the model has got since it was divided."""
        self._leave_out(module, [of.fragment for of in self.fragments])

    def divide_again(self, module: Module) -> None:
        """Divides the model anew, when parameters were unfrozen or added. All ranks must call it after the same step.

        The exchanges under way are applied early. Global weights, momentum and residuals are kept for each parameter.
        Unfrozen and new parameters must be equal on all ranks.
        """
        self.wait()
        while self.under_way:
            self._apply(self.under_way.popleft())
        old = self.fragments
        trained = [name for of in old for name in of.fragment.parameters]
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
            has_signal: returns whether this rank has received a signal to end or to save; called likewise.
            num_steps: steps since the last call; of each fragment one exchange begins if any was due after one of them.
            batch: number of the batch, which all ranks must have in the same exchange.

        Returns:
            What was applied to the model, each with the number of its fragment.

        Raises:
            UnequalStepsError: ranks have taken different numbers of steps.
        """
        self.num_steps += num_steps
        self.expect_changes()
        applied = self._apply_due()
        lateness = [((self.num_steps - offset) % self.plan.sync_every, i) for i, offset in enumerate(self.plan.offsets)]
        # In the order in which they are due, so that none waits for another until its fragment is exchanged again.
        for late, index in sorted(lateness, reverse=True):
            if late < num_steps:
                others = {"loss_scale": loss_scale(), "has_signal": float(has_signal()), "batch": batch}
                self._begin(index, self.num_steps - late, self.counts.report(index, num_steps=self.num_steps, **others))
        return [*applied, *self._apply_due()]

    def _begin(self, index: int, after: int, report: Callable[[], Report]) -> None:
        of, local = self.fragments[index], LocalWeights.of(self.fragments[index].fragment)
        self._introduce()
        local.num_joins = self._num_joins
        local.trained = self.trained.intersection(of.fragment.parameters)
        step = self._exchanges_before()
        future = self._thread.future(local.flat)
        sync = self.observers.exchange(BucketInfo(index, local.flat.nbytes, tuple(of.fragment.parameters), True))
        under_way = UnderWay(index, after + self.plan.overlap, future=future, sync=sync)

        def exchange() -> Arrived:
            return self.exchange.run(of, local, report(), step, self.outer)

        self.steps_before[index] = self.num_steps
        self.changed.discard(index)
        self.trained.difference_update(of.fragment.parameters)
        self.under_way.append(under_way)
        self._thread.submit(lambda: under_way.run(local, exchange, lambda: self.exchange.bytes_sent), [future])

    def _apply_due(self) -> list[tuple[int, Arrived]]:
        applied = []
        while self.under_way and self.under_way[0].due <= self.num_steps:
            under_way = self.under_way.popleft()
            applied.append((under_way.index, self._apply(under_way)))
        return [(index, arrived) for index, arrived in applied if not arrived.has_missed]

    def _apply(self, under_way: UnderWay) -> Arrived:
        of, sync = self.fragments[under_way.index], under_way.sync
        if sync is not None:
            sync.note(DUE)
        arrived = under_way.wait(of.fragment)
        self._take(of, arrived)
        if sync is not None:
            sync.note(APPLIED)
        return arrived

    def _take(self, of: GlobalWeights, arrived: Arrived) -> None:
        """Puts what has arrived into the model; nothing if the others went on without this rank."""
        own_share = self.plan.own_share
        if arrived.has_missed:
            self.is_behind = True
            return
        if arrived.joined is not None:
            self._join(arrived.joined)
            arrived.joined, own_share = None, 0.0
        of.take(arrived)
        mix(of, own_share)

    def meet(self, value: bool = False) -> bool:
        """Returns whether ``value`` is true on any rank, before other collectives that all ranks come to between steps.

        A rank that has left out a step comes here while others wait for it in an exchange: both must notice. Exchanges
        under way are waited for. All ranks must call it.

        Raises:
            UnequalStepsError: ranks have begun different exchanges.
        """
        self.wait()  # an exchange of the thread would mix its messages with those below
        return self.exchange.meet(self.num_steps, value)

    @property
    def is_exact(self) -> bool:
        """Whether all ranks have the same global weights, or will from what is under way; call `wait` before."""
        arrived = [under_way.arrived for under_way in self.under_way]
        return self.exchange.is_complete and all(x is None or x.is_complete for x in arrived)

    def close(self) -> bool:
        """Ends the thread; returns whether all exchanges have succeeded."""
        return self._thread.close()
