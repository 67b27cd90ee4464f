"""Validations after some time, as with ``val_check_interval="00:15:00"``."""

import inspect
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, cast

import pytest

from lightning_commopt import CommOptDDP, CommOptDiLoCo
from support.lightnings import Trainer
from support.strategy_models import Tiny, loader, trainer
from support.warm_ranks import run_ranks


class _Clocked(Tiny):
    """Keeps the steps after which it validates; only on rank 0 the time until the next validation is always over."""

    def __init__(self) -> None:
        super().__init__()
        self.validated: list[int] = []

    def on_train_start(self) -> None:
        if self.global_rank:
            cast(Any, self.trainer)._val_check_time_interval = 3600.0

    def on_validation_start(self) -> None:
        self.validated.append(self.global_step)


def _validate_by_the_clock(make_strategy: Callable[[], Any]) -> list[int]:
    model = _Clocked()
    run = trainer(make_strategy(), val_check_interval=timedelta(microseconds=1))
    run.fit(model, loader(), loader(8))
    return model.validated


@pytest.mark.skipif(
    "timedelta" not in str(inspect.signature(Trainer).parameters["val_check_interval"]), reason="needs Lightning 2.6"
)
@pytest.mark.parametrize(
    ("make_strategy", "expected"),
    [
        (CommOptDDP, [1, 2, 3, 4, 5, 6]),
        (partial(CommOptDDP, sigterm_every_n_steps=2), [1, 3, 5]),
        (partial(CommOptDiLoCo, sync_every=2), [2, 4, 6]),
    ],
)
def test_ranks_validate_together_after_some_time(make_strategy: Callable[[], Any], expected: list[int]) -> None:
    """If it fails, each rank's clock decides, so that some validate where others wait for their gradients."""
    assert run_ranks(_validate_by_the_clock, make_strategy, group_timeout_s=20) == [expected] * 2
