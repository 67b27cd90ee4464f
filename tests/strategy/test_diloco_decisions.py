"""What ranks decide in a fit with DiLoCo: all the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from support.diloco_fits import fit
from support.ranks import run_ranks
from support.strategy_models import Tiny


class _Deciding(Tiny):
    """Lets all ranks decide within a batch, logs beside that, and ends the fit when rank 0 wants to."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        strategy, rank = self.trainer.strategy, self.global_rank
        self.decided = [strategy.reduce_boolean_decision(x) for x in (True, rank == 0)]
        self.decided += [strategy.reduce_boolean_decision(x, all=False) for x in (False, rank == 0)]
        self.total = float(strategy.reduce(torch.ones(()), reduce_op="sum"))
        self.log("rank", float(rank), sync_dist=True)
        return super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        stop = self.global_step == 1 and self.global_rank == 0
        self.trainer.should_stop = self.trainer.strategy.reduce_boolean_decision(stop, all=False)


def _decide() -> tuple[list[bool], float, float, int]:
    model = _Deciding()
    fit(model, max_epochs=1)
    return model.decided, model.total, float(model.trainer.callback_metrics["rank"]), model.global_step


def test_what_a_step_asks_all_ranks_has_their_answer() -> None:
    """If it fails, ranks go different ways after a decision that they have made together."""
    for rank, answers in enumerate(run_ranks(_decide)):
        assert answers == ([True, False, False, True], 2.0, float(rank), 2)
