"""What a fit ends with: an exchange of what was trained since the last ones, whose result the model shows."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import torch
from torch import Tensor

from lightning_commopt.plan import DiLoCoPlan
from lightning_commopt.sync.diloco.counts import Counts
from lightning_commopt.sync.diloco.exchange import Arrived, GlobalWeights, LocalWeights
from lightning_commopt.sync.diloco.into_model import mix
from lightning_commopt.sync.diloco.left_out import LeftOut
from lightning_commopt.sync.diloco.outer import OuterSGD
from lightning_commopt.sync.diloco.report import Report
from lightning_commopt.sync.diloco.shown import ShowsWeights
from lightning_commopt.sync.diloco.under_way import UnderWay
from lightning_commopt.sync.gather import map_tensors

_MEAN = OuterSGD(lr=1.0, momentum=0.0, nesterov=False)


class EndsFits(ShowsWeights):
    """The part of `Rounds` that ends a fit; its attributes are described there."""

    plan: DiLoCoPlan
    counts: Counts
    num_steps: int
    changed: set[int]
    trained: set[str]
    left_out: LeftOut
    under_way: deque[UnderWay]
    is_behind: bool
    _num_joins = 0
    _introduced: list[GlobalWeights] | None = None  # what the exchange knows

    def expect_changes(self) -> None:
        """Is told that training goes on, also by other optimizers than the one whose steps count."""
        self.changed.update(range(len(self.fragments)))
        parameters = [pair for of in self.fragments for pair in of.fragment.parameters.items()]
        self.trained.update(name for name, x in parameters if x.requires_grad)
        self.set_at_end = None
        self.left_out.note_training()

    def finish(self, *, mixes: bool = True) -> None:
        """Ends a fit: exchanges what was trained since the last exchanges, and shows the result.

        All ranks must call it. What it computes is for the model only: training that goes on after `show_own` goes on
        as if it had not been called.

        Args:
            mixes: whether to mix what is under way into the weights; not into those that a callback has set since.

        Raises:
            UnequalStepsError: ranks have begun different exchanges.
        """
        self.show_own()
        self.wait()  # an exchange of the thread would mix its messages with those below
        changed = [index in self.changed for index in range(len(self.fragments))]
        *changed, is_under_way = self.exchange.meet_at_end(self.num_steps, [*changed, bool(self.under_way)])
        self.changed.update(index for index, is_changed in enumerate(changed) if is_changed)
        self._introduce()
        for under_way in self.under_way:
            self._join_early(under_way.arrived)
        if not is_under_way and self._was_changed_by_hooks():
            self.expect_changes()
        self.exchange.watch_end()
        final = [self._final(index, mixes=mixes) for index in range(len(self.fragments))]
        finished = self.exchange.finish(final)
        if finished is not None:
            for of, arrived in zip(final, finished.final, strict=True):
                of.take(arrived)
            if finished.joined is not None:
                self._join(finished.joined)
        # A fit that was resumed at its end trains nothing, and does not call the callback that has set them.
        self._final_weights = final if self.set_at_end is None else self.set_at_end
        self._show(self._final_weights)

    def _was_changed_by_hooks(self) -> bool:
        """Returns whether hooks have changed weights of fragments that were not trained since their last exchange.

        With mixing, or while an exchange is under way, a model has none of the global weights to compare with.
        """
        unchanged = [of for index, of in enumerate(self.fragments) if index not in self.changed]
        is_comparable = not self.plan.own_share and self.exchange.is_complete
        return bool(unchanged) and is_comparable and self.differs_from(unchanged)

    def finish_again(self) -> None:
        """Averages over the workers what a callback has put into the model since `finish`, such as their averages.

        All ranks must call it. Without such a callback on any rank it sends nothing but one number.
        """
        final = self._final_weights
        assert final is not None
        if self.differs_from(final):
            for of in final:
                local = LocalWeights.of(of.fragment)
                local.num_joins = self._num_joins
                of.take(self.exchange.run(of, local, Report(1.0), self._exchanges_before(), _MEAN))
            self._show(final)
            self.set_at_end = final

    def _introduce(self) -> None:
        """Tells the exchange of the fragments, and of what has arrived before a fit was resumed."""
        if self._introduced is not self.fragments:
            arrived = {under_way.index: under_way.arrived for under_way in self.under_way}
            self.exchange.begin(self.fragments, {index: x for index, x in arrived.items() if x is not None})
            self._introduced, self._num_joins = self.fragments, 0

    def _join_early(self, arrived: Arrived | None) -> None:
        if arrived is not None and arrived.joined is not None:
            self._join(arrived.joined)
            arrived.joined = None

    def _final(self, index: int, *, mixes: bool) -> GlobalWeights:
        """Returns a fragment's weights at the end of a fit: after an incomplete round the mean of the workers'."""
        of = self.fragments[index]
        arrived = next((other.arrived for other in self.under_way if other.index == index), None)
        if arrived is not None and arrived.has_missed:
            arrived = None
        latest = replace(of, momentum=None, state=map_tensors(Tensor.clone, of.state))
        if arrived is not None:
            latest.take(arrived)
        if index not in self.changed:
            return latest
        local = LocalWeights.of(of.fragment)
        local.wait()
        if arrived is not None and mixes:
            torch.lerp(latest.weights, local.flat, self.plan.own_share, out=local.flat)
        report = Report(self.counts.samples - self.counts.samples_before[index])
        local.num_joins = self._num_joins
        arrived = self.exchange.run(latest, local, report, self._exchanges_before(), _MEAN)
        self._join_early(arrived)
        latest.take(arrived)
        return latest

    def _exchanges_before(self) -> int:
        return self.num_steps // self.plan.sync_every

    def wait(self) -> None:
        """Waits for the exchanges that are under way, without applying them."""
        for under_way in self.under_way:
            under_way.wait(self.fragments[under_way.index].fragment)

    def _join(self, joined: list[Arrived]) -> None:
        """Takes the global weights of all fragments, as a rank that has missed an exchange."""
        for of, arrived in zip(self.fragments, joined, strict=True):
            of.take(arrived)
            mix(of, 0.0)
        self.counts.forget(len(self.fragments))
        self.trained.clear()
        self._num_joins += 1
        self.is_behind = False
