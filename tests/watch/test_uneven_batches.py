"""Ranks that have different numbers of training batches."""

import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_commopt import CommOptDDP
from lightning_commopt.callbacks import CommTimeMonitor
from lightning_commopt.watch.uneven_batches import UnevenBatchesError
from support.lightnings import Callback, CombinedLoader, ModelCheckpoint, Trainer
from support.ranks import run_ranks as run_fresh_ranks
from support.ranks import run_ranks_or_raise
from support.strategy_models import FEATURES, Params, Tiny, assert_same, numbers, trainer
from support.warm_ranks import run_ranks

LIMIT_S = 60
"""Against waiting for ever; the ranks need some seconds."""


class Rows(Dataset[Any]):
    """As many rows as are asked for, different on each rank."""

    def __init__(self, number: int) -> None:
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.rows = torch.randn(64, FEATURES, generator=generator)[:number]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.rows[index], self.rows[index].sum().sin()[None]


class Stream(IterableDataset[Any]):
    """Rows of which nobody knows how many come."""

    def __init__(self, number: int) -> None:
        self.rows = Rows(number)

    def __iter__(self) -> Iterator[Any]:
        return (self.rows[index] for index in range(len(self.rows)))


class Promising(Stream):
    """Says that it has more than come."""

    def __len__(self) -> int:
        return len(self.rows) + 4


class Counting(Callback):
    """Notes the batches that this rank trains on, and what Lightning knows of their number."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.val_steps: list[int] = []
        self.expected: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.expected.append(trainer.num_training_batches)

    def on_validation_start(self, trainer: Trainer, *args: Any) -> None:
        self.val_steps.append(trainer.global_step)


class Estimating(Tiny):
    """Asks how long the fit will be, as learning rate schedules do."""

    estimated = 0.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.estimated = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


def _loader(kind: type[Any], *num_batches: int) -> DataLoader[Any]:
    return DataLoader(kind(num_batches[dist.get_rank()] * 4), batch_size=4)


def _fit(
    kind: type[Any], num_batches: tuple[int, ...], strategy: dict[str, Any], **options: Any
) -> tuple[list[Any], Params, list[int], list[float]]:
    counting, module = Counting(), Estimating()
    defaults: dict[str, Any] = {"max_epochs": 2, "use_distributed_sampler": False, "limit_val_batches": 0}
    callbacks = [counting, *options.pop("callbacks", ())]
    run = trainer(CommOptDDP(**strategy), callbacks=callbacks, **{**defaults, **options})
    run.fit(module, _loader(kind, *num_batches), _loader(Rows, *[2] * dist.get_world_size()))
    return counting.batches, numbers(module), counting.val_steps, [module.estimated, *counting.expected]


def _error(*arguments: Any) -> str:
    """Returns the error of a fit that fails on every rank by itself."""
    with pytest.raises(UnevenBatchesError) as raised:
        _fit(*arguments)
    return str(raised.value)


def _traces_of_both(fit: Callable[..., Any], *arguments: Any) -> list[str]:
    """Returns the tracebacks of two ranks, of which one fails, and the other does as the first one's process ends."""
    ends = run_ranks_or_raise(fit, *arguments, world_size=2, limit_s=LIMIT_S)
    assert all(trace is not None for _, trace in ends), ends
    return [str(trace) for _, trace in ends]


def test_lengths_that_differ_are_an_error_before_training() -> None:
    """If it fails, a broken sampler makes ranks wait for each other, or pairs gradients of different epochs."""
    for error in run_ranks(_error, Rows, (3, 2), {}, limit_s=LIMIT_S):
        found = "Ranks have different numbers of training batches: 3 batches on rank 0; 2 batches on rank 1."
        assert error.startswith(found)
        assert "uneven_batches='drop'" in error


class Cycled(Rows):
    """The rows of the first three batches on rank 0, over and over; on the others as `Rows`."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return super().__getitem__(index % 12 if dist.get_rank() == 0 else index)


_FOUND = "Ranks have different numbers of training batches: 3 batches on rank 0; 5 batches on rank 1."
_WHAT_IS_DONE = (
    "uneven_batches='drop': every epoch ends after 3 batches on all ranks, which drops 2 batches in total.",
    "uneven_batches='pad': every epoch has 5 batches on all ranks; those with fewer start over, and 2 batches count",
)


def _drop_and_pad() -> None:
    dropped = _fit(Rows, (3, 5), {"uneven_batches": "drop"}, val_check_interval=0.5, limit_val_batches=1)
    limited = _fit(Rows, (5, 5), {}, val_check_interval=0.5, limit_val_batches=1, limit_train_batches=3)
    assert_same(dropped[1], limited[1])
    assert dropped[2:] == limited[2:] == ([1, 2, 3, 4, 5, 6], [6] + [3] * 6)

    padded = _fit(Rows, (3, 5), {"uneven_batches": "pad"}, val_check_interval=0.4, limit_val_batches=1)
    cycled = _fit(Cycled, (5, 5), {}, val_check_interval=0.4, limit_val_batches=1)
    assert_same(padded[1], cycled[1])
    assert padded[2:] == cycled[2:] == ([2, 4, 7, 9], [10] + [5] * 10)

    # The interval is longer than the epochs of rank 0 were before.
    assert _fit(Rows, (3, 5), {"uneven_batches": "pad"}, val_check_interval=4, limit_val_batches=1)[2] == [4, 9]
    with pytest.raises(ValueError, match=r"val_check_interval=4 .* uneven_batches has made 3 on all"):
        _fit(Rows, (3, 5), {"uneven_batches": "drop"}, val_check_interval=4, limit_val_batches=1)

    if "timedelta" in str(inspect.signature(Trainer).parameters["val_check_interval"]):  # of Lightning 2.6
        for policy in ("drop", "pad"):
            options: dict[str, Any] = {"val_check_interval": timedelta(hours=1), "limit_val_batches": 1}
            assert _fit(Rows, (3, 5), {"uneven_batches": policy}, **options)[2] == []

    # No batch is dropped or repeated before the end, so there is no warning; yet all ranks validate together.
    for policy, val_steps in (("drop", [1, 2]), ("pad", [2])):
        ended = _fit(
            *(Rows, (3, 5), {"uneven_batches": policy}), max_steps=2, val_check_interval=0.5, limit_val_batches=1
        )
        assert ended[2] == val_steps


def _check_warnings() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _drop_and_pad()
    said = [str(each.message) for each in caught if "uneven" in str(each.message)]
    assert len(said) == (2 if dist.get_rank() == 0 else 0)
    for message, what in zip(said, _WHAT_IS_DONE, strict=False):
        assert message.startswith(f"{_FOUND} {what}")


def test_drop_ends_epochs_early_and_pad_repeats_batches() -> None:
    """If it fails, training is not what the warning says."""
    run_fresh_ranks(_check_warnings, limit_s=LIMIT_S)  # a process warns once


def _run_out(short: int) -> None:
    # The monitor gathers the steps of an epoch that is shorter than a window.
    monitor = CommTimeMonitor(save_records=False, print_summary=False)
    _fit(Stream, (2, 4) if short == 0 else (4, 2), {}, callbacks=[monitor])


@pytest.mark.parametrize("short", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_stream_that_ends_on_one_rank_is_an_error(short: int) -> None:
    """If it fails, the other rank waits for half an hour, and nobody says why or what helps data without a length."""
    traces = _traces_of_both(_run_out, short)
    found = f"Rank {short} has ended epoch 0 after 2 batches, and rank {1 - short} continues"
    assert f"UnevenBatchesError: {found}" in traces[short]
    assert found in traces[1 - short]
    assert "limit_train_batches=N" in traces[short]
    assert "DistributedSampler" not in traces[short]


_GO_WELL: dict[str, tuple[int, tuple[Any, ...], dict[str, Any]]] = {
    "streams": (6, (Stream, (3, 3), {}), {}),
    "too short promises": (6, (Promising, (3, 3), {}), {}),
    "limited": (4, (Rows, (3, 4), {}), {"limit_train_batches": 2}),
    "max_steps": (2, (Rows, (3, 4), {}), {"max_steps": 2}),
    "allowed": (6, (Stream, (3, 3), {"uneven_batches": "allow"}), {}),
    "accumulated": (6, (Stream, (3, 3), {}), {"accumulate_grad_batches": 2}),
}


def _fits_that_go_well() -> None:
    for name, (num_batches, arguments, options) in _GO_WELL.items():
        assert len(_fit(*arguments, **options)[0]) == num_batches, name


def test_even_ranks_train_undisturbed() -> None:
    """If it fails, training that works without us ends in an error, or waits for ever."""
    run_ranks(_fits_that_go_well, limit_s=LIMIT_S)


def _resume_padded(folder: Path) -> list[int]:
    """Trains 7 steps in epochs of 5 batches, and again from step 4 on; returns how many batches each has had."""
    options: dict[str, Any] = {"max_steps": 7, "use_distributed_sampler": False, "enable_checkpointing": True}
    trained = []
    for ckpt_path in (None, folder / "step=4.ckpt"):
        saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=4)
        run = trainer(CommOptDDP(uneven_batches="pad"), callbacks=[counting := Counting(), saving], **options)
        run.fit(Tiny(), _loader(Rows, 3, 5), ckpt_path=ckpt_path)
        trained.append(len(counting.batches))
    return trained


def test_fit_that_is_resumed_shortly_before_its_end_stays_padded(tmp_path: Path) -> None:
    """If it fails, the rank with fewer batches ends the epoch in which the fit is resumed, and the others wait."""
    assert run_ranks(_resume_padded, tmp_path, limit_s=LIMIT_S, group_timeout_s=20) == [[7, 3]] * 2


def _combined(mode: Any, *num_batches: tuple[int, int]) -> Any:
    return CombinedLoader([_loader(Rows, *numbers) for numbers in num_batches], mode)


class OfTwo(Tiny):
    """Learns from two loaders, of which one may have run out."""

    def loss(self, batch: Any) -> Tensor:
        if not isinstance(batch[0], list):
            return super().loss(batch)
        return torch.stack([super(OfTwo, self).loss(each) for each in batch if each is not None]).sum()


class Reloading(OfTwo):
    """Makes its loaders anew for every epoch, in the second one with other numbers of batches."""

    def train_dataloader(self) -> Any:
        numbers = (3, 3) if self.current_epoch == 0 else (4, 2)
        return _loader(Rows, *numbers)


def _fit_combined(policy: str, loader: Any, module: Tiny, **options: Any) -> int:
    counting = Counting()
    run = trainer(
        CommOptDDP(uneven_batches=policy),  # type: ignore[arg-type]
        callbacks=[counting],
        use_distributed_sampler=False,
        **{"max_epochs": 1, **options},
    )
    run.fit(module, loader)
    return len(counting.batches)


class Endless(IterableDataset[Any]):
    """One row over and over."""

    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat(Rows(1)[0])


def _combine() -> None:
    endless = CombinedLoader([_loader(Rows, 3, 5), DataLoader(Endless(), batch_size=4)], "min_size")
    kept = _combined("max_size_cycle", (3, 5), (2, 4))
    shorter = _combined("max_size_cycle", (5, 5), (2, 3))
    for policy, loader, num_batches in (
        *(("drop", _combined("min_size", (3, 5), (2, 4)), 2), ("pad", _combined("min_size", (3, 5), (2, 4)), 4)),
        *(("drop", _combined("max_size", (3, 5), (2, 4)), 3), ("pad", _combined("max_size", (3, 5), (2, 4)), 5)),
        *(("pad", kept, 5), ("drop", kept, 3), ("pad", endless, 5), ("error", shorter, 5)),
    ):
        assert _fit_combined(policy, loader, OfTwo()) == num_batches, (policy, loader)
    assert _fit_combined("pad", None, Reloading(), max_epochs=2, reload_dataloaders_every_n_epochs=1) == 7


@pytest.mark.exhaustive
def test_combined_loaders_end_together() -> None:
    """If it fails, loaders that are combined, or made anew, hang in spite of the option."""
    run_ranks(_combine, limit_s=2 * LIMIT_S)


@pytest.mark.exhaustive
def test_promise_that_is_not_kept_is_an_error() -> None:
    """If it fails, a dataset with a wrong length hangs."""
    traces = _traces_of_both(_fit, Promising, (2, 3), {"uneven_batches": "drop"})
    assert "UnevenBatchesError: Rank 0 has ended epoch 0 after 2 batches, and rank 1 continues" in traces[0]


@pytest.mark.parametrize("policy", ["drop", pytest.param("pad", marks=pytest.mark.exhaustive)])
def test_policy_that_needs_lengths_refuses_streams(policy: str) -> None:
    """If it fails, a choice of the user is ignored."""
    for error in run_ranks(_error, Stream, (2, 2), {"uneven_batches": policy}, limit_s=LIMIT_S):
        assert f"uneven_batches='{policy}' needs to know before an epoch how many batches" in error


class StopsAlone(Callback):
    """Stops training on rank 0 only, after the second batch."""

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop = trainer.global_rank == 0 and batch_idx == 1


class SkipsAlone(Callback):
    """Ends the epoch on rank 0 only, within the third batch, as ``next`` of an iterator at its end does."""

    def on_before_backward(self, trainer: Trainer, module: Any, loss: Tensor) -> None:
        if trainer.global_rank == 0 and trainer.global_step == 2:
            raise StopIteration


def _end_alone(callback: type[Callback]) -> None:
    _fit(Rows, (4, 4), {}, callbacks=[callback()])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("callback", "why", "remedy"),
    [
        (StopsAlone, "trainer.should_stop was set", "Set it on all ranks in the same step: trainer.should_stop ="),
        (SkipsAlone, "on_train_batch_start returned -1, or StopIteration was raised", "make this happen on all ranks"),
    ],
)
def test_rank_that_ends_an_epoch_by_itself_is_an_error(callback: type[Callback], why: str, remedy: str) -> None:
    """If it fails, a stop on one rank hangs although all ranks have as many batches."""
    traces = _traces_of_both(_end_alone, callback)
    found = f"Rank 0 has ended epoch 0 after 2 batches, because {why} there, and rank 1 continues"
    assert f"UnevenBatchesError: {found}" in traces[0]
    assert remedy in traces[0]
    assert "Rank 0 has ended epoch 0 after 2 batches" in traces[1]
