"""EndsFits: the last exchange of a fit, of what was trained since the exchanges before, whose result the model gets."""

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
    """The part of `Rounds` that ends a fit. `Rounds` describes the attributes."""

    plan: DiLoCoPlan
    counts: Counts
    num_steps: int
    changed: set[int]
    trained: set[str]
    left_out: LeftOut
    under_way: deque[UnderWay]
    is_behind: bool
    _num_joins = 0
    _introduced: list[GlobalWeights] | None = None  # the fragments that were passed to `Exchange.begin`

    def expect_changes(self) -> None:
        """Records that training has continued, by any optimizer, so that the weights of all fragments may change."""
        self.changed.update(range(len(self.fragments)))
        parameters = [pair for global_state in self.fragments for pair in global_state.fragment.parameters.items()]
        self.trained.update(name for name, x in parameters if x.requires_grad)
        self.set_at_end = None
        self.left_out.note_training()

    def finish(self, *, mixes: bool = True) -> None:
        """Ends a fit: exchanges what was trained since the last exchanges, and puts the result into the model.

        All ranks must call it. The result is for the model only: after `show_own`, training continues as if this method
        had not been called.

        Args:
            mixes: whether to mix results of exchanges under way into the weights; false if a callback has set weights
                since these exchanges began.

        Raises:
            UnequalStepsError: ranks have begun different exchanges.
        """
        self.show_own()
        self.wait()  # the messages of an exchange in the thread would be paired with those below
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
            for global_state, arrived in zip(final, finished.final, strict=True):
                global_state.take(arrived)
            if finished.joined is not None:
                self._join(finished.joined)
        # A fit that was resumed at its end does not train, and so does not call the callback that has set `set_at_end`.
        self._final_weights = final if self.set_at_end is None else self.set_at_end
        self._show(self._final_weights)

    def _was_changed_by_hooks(self) -> bool:
        """Returns whether hooks have changed weights of fragments that were not trained since their last exchange.

        With mixing, or while an exchange is under way, the model does not have the global weights, so there is nothing
        to compare with.
        """
        unchanged = [global_state for index, global_state in enumerate(self.fragments) if index not in self.changed]
        is_comparable = not self.plan.own_share and self.exchange.is_complete
        return bool(unchanged) and is_comparable and self.differs_from(unchanged)

    def finish_again(self) -> None:
        """Averages over the workers the weights that a callback has set since `finish`, such as its running averages.

        All ranks must call it. If no rank has such a callback, it sends one number only.
        """
        final = self._final_weights
        assert final is not None
        if self.differs_from(final):
            for global_state in final:
                local = LocalWeights.of(global_state.fragment)
                local.num_joins = self._num_joins
                global_state.take(self.exchange.run(global_state, local, Report(1.0), self._exchanges_before(), _MEAN))
            self._show(final)
            self.set_at_end = final

    def _introduce(self) -> None:
        """Passes the fragments to the exchange, and the results that had arrived before the fit was resumed."""
        if self._introduced is not self.fragments:
            arrived = {under_way.index: under_way.arrived for under_way in self.under_way}
            self.exchange.begin(self.fragments, {index: x for index, x in arrived.items() if x is not None})
            self._introduced, self._num_joins = self.fragments, 0

    def _join_early(self, arrived: Arrived | None) -> None:
        if arrived is not None and arrived.joined is not None:
            self._join(arrived.joined)
            arrived.joined = None

    def _final(self, index: int, *, mixes: bool) -> GlobalWeights:
        """Returns a fragment's weights at the end of a fit.

        They are the mean of the workers' weights if the fragment was trained since its last exchange.
        """
        global_state = self.fragments[index]
        arrived = next((other.arrived for other in self.under_way if other.index == index), None)
        if arrived is not None and arrived.has_missed:
            arrived = None
        latest = replace(global_state, momentum=None, state=map_tensors(Tensor.clone, global_state.state))
        if arrived is not None:
            latest.take(arrived)
        if index not in self.changed:
            return latest
        local = LocalWeights.of(global_state.fragment)
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
        """Waits for the exchanges under way, without applying their results."""
        for under_way in self.under_way:
            under_way.wait(self.fragments[under_way.index].fragment)

    def _join(self, joined: list[Arrived]) -> None:
        """Gives this rank, which has missed an exchange, the global weights of all fragments."""
        for global_state, arrived in zip(self.fragments, joined, strict=True):
            global_state.take(arrived)
            mix(global_state, 0.0)
        self.counts.forget(len(self.fragments))
        self.trained.clear()
        self._num_joins += 1
        self.is_behind = False
