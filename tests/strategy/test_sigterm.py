"""``sigterm_every_n_steps``: how often ranks agree on SIGTERM, and that all of them end together."""

import os
import signal
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_commopt import CommOptDDP, CommOptDiLoCo
from support.collectives import counted_collectives, needs_hooks
from support.lightnings import OnExceptionCheckpoint
from support.strategy_models import Params, Tiny, assert_same, loader, numbers, trainer
from support.warm_ranks import run_ranks

_STEPS = 6  # two epochs of 12 batches, four for a step


class _Plain(Tiny):
    """Logs nothing, so that only gradients and SIGTERM are synchronized."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


class _Terminated(_Plain):
    """Sends SIGTERM to its own process, on one rank in one step."""

    def __init__(self, rank: int, step: int) -> None:
        super().__init__()
        self.rank, self.step = rank, step
        self.has_sent = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if (self.global_rank, self.global_step) == (self.rank, self.step) and not self.has_sent:
            self.has_sent = True
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)


def _count(every_n_steps: int | None) -> tuple[Counter[str], Params]:
    model = _Plain()
    run = trainer(CommOptDDP(sigterm_every_n_steps=every_n_steps), accumulate_grad_batches=4)
    loop = run.fit_loop.epoch_loop
    with counted_collectives() as counted:
        run.fit(model, loader(96))
    assert "_broadcast_sigterm_tensor" not in vars(loop)
    assert run.global_step == _STEPS
    return counted, numbers(model)


def _count_both() -> list[tuple[Counter[str], Params]]:
    return [_count(None), _count(4)]


@needs_hooks
def test_number_of_collectives() -> None:
    """If it fails, ranks still wait for each other in every batch, or the option changes what is trained."""
    for (usual, expected), (fewer, got) in run_ranks(_count_both):
        # Without the option one before each of 24 batches; with it none there, but a check before steps 0 and 4 and
        # one after each of the two epochs.
        assert usual["BROADCAST"] - fewer["BROADCAST"] == 24
        assert fewer["ALLREDUCE"] - usual["ALLREDUCE"] == 4
        assert_same(got, expected)


def _terminate(folder: Path, rank: int, step: int, make_strategy: Callable[[], Any]) -> tuple[str, int, int]:
    model = _Terminated(rank, step)
    run = trainer(
        make_strategy(),
        accumulate_grad_batches=4,
        callbacks=[OnExceptionCheckpoint(folder)],
        enable_checkpointing=True,
        limit_val_batches=0,
    )
    with pytest.raises(BaseException) as raised:  # noqa: PT011 - SIGTERMException is a SystemExit of Lightning's
        run.fit(model, loader(96))
    saved = torch.load(folder / "on_exception.ckpt", weights_only=True)
    return type(raised.value).__name__, run.global_step, saved["global_step"]


@pytest.mark.parametrize(
    ("rank", "sent_in", "make_strategy", "ends_at"),
    [
        (1, 0, partial(CommOptDDP, sigterm_every_n_steps=2), 2),
        (0, 1, partial(CommOptDDP, sigterm_every_n_steps=100), 3),
        (1, 0, partial(CommOptDiLoCo, sync_every=2), 2),
        (1, 0, partial(CommOptDiLoCo, sync_every=3, fragments=3, overlap=1), 2),
        pytest.param(0, 0, partial(CommOptDDP, sigterm_every_n_steps=1), 1, marks=pytest.mark.exhaustive),
    ],
    ids=["a later step", "the end of an epoch", "DiLoCo", "an overlapped exchange", "the next step"],
)
def test_all_ranks_end_before_the_same_step(
    rank: int, sent_in: int, make_strategy: Callable[[], Any], ends_at: int, tmp_path: Path
) -> None:
    """If it fails, a rank that got SIGTERM leaves the others in a collective, or training goes on after it."""
    ended = run_ranks(_terminate, tmp_path, rank, sent_in, make_strategy)
    assert ended == [("SIGTERMException", ends_at, ends_at)] * 2


def _without_broadcast() -> list[str]:
    run = trainer(CommOptDDP(sigterm_every_n_steps=2), max_epochs=1)
    loop_class: Any = type(run.fit_loop.epoch_loop)
    broadcast = loop_class._broadcast_sigterm_tensor
    del loop_class._broadcast_sigterm_tensor
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with pytest.raises(AttributeError, match="_broadcast_sigterm_tensor"):  # this Lightning cannot do without
                run.fit(_Plain(), loader())
    finally:
        loop_class._broadcast_sigterm_tensor = broadcast
    return [str(warning.message) for warning in caught if "sigterm" in str(warning.message)]


@needs_hooks
def test_a_lightning_without_the_broadcast() -> None:
    """If it fails, the option silently does nothing with an older Lightning."""
    first, second = run_ranks(_without_broadcast)
    assert second == []  # it is the same on all ranks
    assert len(first) == 1
    assert "sigterm_every_n_steps=2 has no effect: this version of Lightning does not broadcast SIGTERM" in first[0]
