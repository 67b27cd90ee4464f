"""How often ranks agree on SIGTERM and on SLURM's signal, and that they end, or save a checkpoint, together."""

import os
import random
import signal
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commopt import CommOptDDP, CommOptDiLoCo
from lightning_commopt.sync.checkpoint import KEY
from lightning_commopt.watch import sigterm_notice, times
from support.collectives import counted_collectives, needs_hooks
from support.lightnings import Callback, OnExceptionCheckpoint, needs_sigterm_broadcast
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


@needs_sigterm_broadcast
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


_PLACES = (
    *("on_train_epoch_start", "on_train_batch_start", "training_step", "on_before_optimizer_step"),
    *("on_train_batch_end", "on_validation_epoch_start", "validation_step", "on_validation_epoch_end"),
)


class _TerminatedAnywhere(Tiny):
    """Sends SIGTERM to its own process when it comes to a place for the n-th time."""

    def __init__(self, place: str, number: int) -> None:
        super().__init__()
        self.remaining = number
        if place:
            setattr(self, place, partial(self._come, getattr(self, place)))

    def _come(self, inner: Callable[..., Any], *args: Any) -> Any:
        self.remaining -= 1
        if self.remaining == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return inner(*args)


def _terminate_anywhere(folder: Path, places: list[tuple[str, int]], strategies: list[Any]) -> list[tuple[str, int]]:
    ended = []
    for number, strategy in enumerate(strategies):
        saves = OnExceptionCheckpoint(folder / str(number))
        run = trainer(strategy, callbacks=[saves], enable_checkpointing=True, max_epochs=200)
        with (
            mock.patch.object(sigterm_notice, "_LOOK_S", 0.01),
            pytest.raises(BaseException) as raised,  # noqa: PT011 - SIGTERMException is a SystemExit of Lightning's
        ):
            run.fit(_TerminatedAnywhere(*places[dist.get_rank()]), loader(48), loader(36))
        saved = torch.load(folder / str(number) / "on_exception.ckpt", weights_only=True)
        assert saved["global_step"] == run.global_step
        assert run.received_sigterm
        ended.append((type(raised.value).__name__, run.global_step))
    return ended


def _random_places(seed: int) -> list[tuple[str, int]]:
    draw = random.Random(seed)
    places = [(draw.choice(_PLACES), draw.randint(1, 3)) for _ in range(3)]
    return places if seed % 2 else [*places[:2], ("", 0)]  # a scheduler may want the host of some ranks only


@needs_sigterm_broadcast
@pytest.mark.parametrize(
    "places",
    [
        pytest.param([("", 0), ("", 0), ("training_step", 3)], id="one rank alone"),
        pytest.param([("training_step", 3), ("on_train_batch_end", 3), ("on_train_batch_start", 4)], id="near a batch"),
        pytest.param(
            [("validation_step", 1), ("on_validation_epoch_start", 1), ("validation_step", 2)], id="validation"
        ),
        *[pytest.param(_random_places(seed), id=str(seed), marks=pytest.mark.exhaustive) for seed in range(12)],
    ],
)
def test_ranks_end_together_wherever_they_get_sigterm(places: list[tuple[str, int]], tmp_path: Path) -> None:
    """If it fails, ranks meet in different collectives, and a launcher kills them before they have saved."""
    strategies = [CommOptDDP(), CommOptDDP(comm_hook="int8", uneven_batches="allow")]
    first, *others = run_ranks(_terminate_anywhere, tmp_path, places, strategies, world_size=3)
    assert [name for name, _ in first] == ["SIGTERMException"] * 2
    assert others == [first] * 2


class _NotesWhere(Callback):
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.in_validation, self.num_batches = trainer.validating, trainer.fit_loop.epoch_loop.total_batch_idx + 1


def _terminate_in_validation(places: list[tuple[str, int]]) -> tuple[str, bool, int, int]:
    noted, model = _NotesWhere(), _TerminatedAnywhere(*places[dist.get_rank()])
    with (
        mock.patch.object(times, "STALLED_S", 60.0),  # however late the other rank is
        pytest.raises(BaseException) as raised,  # noqa: PT011 - SIGTERMException is a SystemExit of Lightning's
    ):
        trainer(CommOptDDP(), callbacks=[noted], num_sanity_val_steps=0).fit(model, loader(48), loader(480))
    return type(raised.value).__name__, noted.in_validation, noted.num_batches, model.remaining


@needs_sigterm_broadcast
def test_a_long_validation_ends_once_all_ranks_have_got_sigterm() -> None:
    """If it fails, a launcher kills ranks in the middle of a validation."""
    places = [("validation_step", 2), ("on_train_batch_end", 6)]  # rank 1 in the last batch before it
    first, second = run_ranks(_terminate_in_validation, places)
    assert first == ("SIGTERMException", True, 6, 0)  # 0: no further batch
    assert second == first


class _QueuedAgain(_Plain):
    """Sends SLURM's signal to its own process in a step, or in a validation after it, which differ by rank."""

    def __init__(self, sent_in: list[tuple[str, int]]) -> None:
        super().__init__()
        self.sent_in = sent_in

    def _send_in(self, stage: str) -> None:
        if self.sent_in[self.global_rank] == (stage, self.global_step):
            os.kill(os.getpid(), signal.SIGUSR1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self._send_in("training")
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_start(self) -> None:
        self._send_in("validation")


def _queue_again(
    folder: Path, sent_in: list[tuple[str, int]], make_strategy: Callable[[], Any]
) -> tuple[list[str], int, bool, Params, Params]:
    without, model = _Plain(), _QueuedAgain(sent_in)
    trainer(make_strategy()).fit(without, loader(), loader(8))
    rank = str(dist.get_rank())
    of_one_node = dict.fromkeys(("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"), "2") | {"SLURM_NODEID": "0"}
    of_a_task = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train"}
    os.environ.update({**of_one_node, **of_a_task, "PATH": f"{folder}:{os.environ['PATH']}"})
    trainer(make_strategy(), default_root_dir=folder).fit(model, loader(), loader(8))
    saved = torch.load(folder / "hpc_ckpt_1.ckpt", weights_only=True)
    requests = (folder / "requests").read_text().splitlines()
    return requests, saved["global_step"], KEY in saved, numbers(model), numbers(without)


@needs_sigterm_broadcast
@pytest.mark.parametrize(
    ("sent_in", "make_strategy", "saved_after"),
    [
        ([("training", 2), ("training", 0)], partial(CommOptDDP, comm_hook="int8"), 1),
        ([("validation", 3), ("training", 2)], partial(CommOptDDP, comm_hook="int8"), 3),
        pytest.param(
            *([("training", 1), ("training", 0)], partial(CommOptDiLoCo, sync_every=2), 2), marks=pytest.mark.exhaustive
        ),
        ([("training", 1), ("training", 0)], partial(CommOptDiLoCo, sync_every=3, fragments=3, overlap=1), 2),
    ],
    ids=["in different steps", "in a validation", "DiLoCo", "overlapped exchanges"],
)
def test_ranks_save_together_what_slurm_queues_again(
    sent_in: list[tuple[str, int]], make_strategy: Callable[[], Any], saved_after: int, tmp_path: Path
) -> None:
    """If it fails, a job that SLURM ends waits for ever in a handler, without a checkpoint or without its residuals."""
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/requests\n')
    (tmp_path / "scontrol").chmod(0o755)
    for requests, step, has_state, got, expected in run_ranks(_queue_again, tmp_path, sent_in, make_strategy):
        assert (requests, step, has_state) == (["requeue 7"], saved_after, True)
        assert_same(got, expected)


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
