"""DiLoCo with hooks that set weights themselves, and modules whose state is not their tensors."""

from __future__ import annotations

import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_commopt import CommOptDiLoCo
from lightning_commopt.text import validation
from support.diloco_fits import MEANS, fit
from support.lightnings import Callback, LightningModule, ModelCheckpoint, Trainer
from support.strategy_models import (
    AveragingWeights,
    BatchNormed,
    Gan,
    Params,
    Tiny,
    assert_same,
    loader,
    numbers,
    trainer,
)
from support.warm_ranks import run_ranks


class _Doubling(Callback):
    """Ends a fit after the first epoch, and doubles the weights then, as a callback that averages them sets them."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.before = numbers(pl_module)
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.mul_(2)


def _stopped() -> tuple[Params, Params]:
    doubling = _Doubling()
    doubled = fit(Tiny(), doubling, sync_every=3)
    return doubling.before, doubled


def test_what_callbacks_set_at_the_end_of_a_stopped_fit_stays() -> None:
    """If it fails, the averages of EMAWeightAveraging are lost after a whole round, or ``on_train_end`` sees others."""
    first, second = run_ranks(_stopped)
    for before, doubled in (first, second):
        assert_same(before, first[0])
        assert_same(doubled, {name: 2 * x for name, x in before.items()})


def _average() -> list[tuple[Params, Params]]:
    seen = []
    # With a step in the last epoch, an exchange would follow it; or one is under way when that begins.
    for samples, overlap in [(56, 0), (48, 1)]:
        model, averaging = BatchNormed(), AveragingWeights()
        strategy = CommOptDiLoCo(sync_every=4, fragments=2, overlap=overlap)
        run = trainer(strategy, max_epochs=3, callbacks=[averaging])
        run.fit(model, loader(samples), loader(8))  # a validation sets gradients to None
        seen.append((averaging.average, numbers(model)))
    return seen


def test_stochastic_weight_averaging_ends_with_the_mean_of_the_averages() -> None:
    """If it fails, the epoch that computes BatchNorm's statistics moves the averages, or mixes them with others."""
    for (first, final), (second, other) in zip(*run_ranks(_average), strict=True):
        assert_same(final, other)
        assert_same(
            {name: final[name] for name in first}, {name: (x + second[name]) / 2 for name, x in first.items()}, 1e-5
        )


class _Swapping(Callback):
    """Puts other weights into the model for a validation, as a callback with a moving average of them does."""

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.before = deepcopy(pl_module.state_dict())
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.zero_()

    def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        assert not any(parameter.any() for parameter in pl_module.parameters())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.load_state_dict(self.before)


def _swapped() -> tuple[Params, Params]:
    finals = []
    for callbacks in [], [_Swapping()]:
        model = BatchNormed()
        trainer(CommOptDiLoCo(sync_every=4), max_epochs=2, callbacks=callbacks).fit(model, loader(56), loader(8))
        finals.append(numbers(model))
    return finals[0], finals[1]


def test_weights_that_a_callback_shows_in_a_validation_are_not_trained() -> None:
    """If it fails, training goes on from a moving average that was there for a validation, which saw other weights."""
    for plain, swapped in run_ranks(_swapped):
        assert_same(swapped, plain)


class _OnlyCritic(Gan):
    """Trains nothing but what its second optimizer has, or all by optimizers that Lightning does not see."""

    def __init__(self, is_hidden: bool) -> None:
        super().__init__()
        self.is_hidden = is_hidden
        self.own: list[Params] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizers: Any = self.optimizers(use_pl_optimizer=not self.is_hidden)
        optimizer = optimizers[0 if self.is_hidden else 1]
        optimizer.zero_grad()
        self.manual_backward(torch.stack([((x - self.global_rank) ** 2).sum() for x in self.parameters()]).sum())
        optimizer.step()
        self.own.append(numbers(self))


def _without_counted_steps(is_hidden: bool) -> tuple[Params, Params]:
    validation.warn_once.cache_clear()
    model = _OnlyCritic(is_hidden)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        final = fit(model, **MEANS)
    is_told = any("no step of the first optimizer was counted" in str(warning.message) for warning in seen)
    assert is_told == (model.global_rank == 0)
    return model.own[-1], final


@pytest.mark.parametrize("is_hidden", [False, True])
def test_a_fit_without_steps_that_count_ends_with_the_mean(is_hidden: bool) -> None:
    """If it fails, all that was trained is lost."""
    (first, final), (second, other) = run_ranks(_without_counted_steps, is_hidden)
    assert any((first[name] != second[name]).any() for name in first)
    assert_same(final, other)
    assert_same(final, {name: (x + second[name]) / 2 for name, x in first.items()}, rtol=1e-6)


class _Clipping(Tiny):
    """Limits its weights after each batch."""

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.1, 0.1)
        self.clipped = numbers(self)


def _clip() -> tuple[Params, Params]:
    model = _Clipping()
    final = fit(model, sync_every=3, **MEANS)
    return model.clipped, final


def test_what_a_hook_does_after_the_last_exchange_stays() -> None:
    """If it fails, a fit whose last round is whole ends with weights that were not clipped after the last batch."""
    (clipped, final), (_, other) = run_ranks(_clip)
    assert_same(final, clipped, rtol=1e-6)
    assert_same(final, other)


class _Setting(Tiny):
    """Sets its weights when training begins, to other ones on each rank."""

    def on_train_start(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(0.1 + self.global_rank)


class _SettingLater(_Setting):
    """Sets them right before the first batch, as others do in ``on_train_epoch_start``."""

    def on_train_start(self) -> None:
        pass

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 0:
            super().on_train_start()


class _Teaching(Tiny):
    """Learns from a frozen layer that follows its own."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(6, 6).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weight = next(self.layers.parameters())
        return super().training_step(batch, batch_idx) + (weight - self.teacher.weight.mean()).square().sum()

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            self.teacher.weight.lerp_(next(self.layers.parameters()).mean(), 0.1)


def _fit_all() -> list[Params]:
    starting = Tiny()
    with torch.no_grad():
        for parameter in starting.parameters():
            parameter.fill_(0.1)
    return [fit(model) for model in (starting, _Setting(), _SettingLater(), _Teaching())]


def test_ranks_end_with_equal_weights_whatever_their_modules_do() -> None:
    """If it fails, weights that a hook sets count as training, or frozen weights make ranks differ."""
    first, second = run_ranks(_fit_all)
    for a, b in zip(first, second, strict=True):
        assert_same(a, b)
    starting, setting, setting_later, _ = first
    assert_same(setting, starting)
    assert_same(setting_later, starting)


class _Averaging(Callback):
    """Averages weights like Lightning's WeightAveraging, which saves the average in place of the model's weights."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.average, self.count = deepcopy(pl_module.state_dict()), 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.count += 1 + trainer.global_rank
        for name, x in pl_module.state_dict().items():
            self.average[name].lerp_(x, 0.5 if self.count % 4 else 0.25)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.load_state_dict(self.average)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["current_model_state"], checkpoint["state_dict"] = checkpoint["state_dict"], self.average

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.average = deepcopy(checkpoint["state_dict"])
        pl_module.load_state_dict(checkpoint["current_model_state"])


def _resume(folder: Path) -> list[tuple[Params, Params]]:
    fits = []
    for callbacks in ([], [_Averaging()]):
        dirpath = folder / str(len(callbacks))
        saving = ModelCheckpoint(dirpath=dirpath, filename="{epoch}", save_top_k=-1)
        uninterrupted = fit(_Teaching(), *callbacks, saving, enable_checkpointing=True)
        fits.append((uninterrupted, fit(_Teaching(), *callbacks, ckpt_path=dirpath / "epoch=0.ckpt")))
    return fits


def test_a_fit_resumes_with_what_each_rank_has_moved_or_averaged(tmp_path: Path) -> None:
    """If it fails, all ranks go on with the frozen weights of rank 0, or with the state of its callbacks."""
    for fits in run_ranks(_resume, tmp_path):
        for uninterrupted, resumed in fits:
            assert_same(resumed, uninterrupted)


class _SavingAtEnd(Callback):
    """Saves before strategies learn of the end, as ModelCheckpoint does if nothing else has made it save."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def _resume_at_end(folder: Path) -> dict[str, tuple[Params, Params]]:
    path, ending, model = folder / "ended.ckpt", folder / "ending.ckpt", Tiny()
    callbacks = [_Averaging(), _SavingAtEnd(ending)]
    run = trainer(CommOptDiLoCo(sync_every=4), callbacks=callbacks, limit_val_batches=0)
    run.fit(model, loader())
    run.save_checkpoint(path)
    dist.barrier()
    ended = numbers(model)
    options: dict[str, Any] = {"sync_every": 4, "ckpt_path": path}
    return {
        "saved": (_weights(path), ended),
        "saved by a callback": (_weights(ending), ended),
        "resumed": (fit(Tiny(), _Averaging(), **options), ended),
        "without the callback": (fit(Tiny(), **options), ended),
        "longer": (
            fit(Tiny(), _Averaging(), **options, max_epochs=3),
            fit(Tiny(), _Averaging(), sync_every=4, max_epochs=3),
        ),
    }


def _weights(path: Path) -> Params:
    return {name: x.double().numpy() for name, x in torch.load(path, weights_only=True)["state_dict"].items()}


def test_a_checkpoint_of_an_ended_fit_has_the_mean_of_the_averages(tmp_path: Path) -> None:
    """If it fails, the checkpoint has the average of rank 0, or a fit that resumes at its end the plain weights."""
    for rank in run_ranks(_resume_at_end, tmp_path):
        for of, (got, expected) in rank.items():
            assert_same(got, expected, of=of)


class _Computing(Tiny):
    """Saves copies of its weights."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return {name: x.clone() for name, x in super().state_dict(*args, **kwargs).items()}


class _Saving(Callback):
    def __init__(self) -> None:
        self.saved: list[Params] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        state = trainer.strategy.lightning_module_state_dict()
        self.saved.append({name: x.clone().numpy() for name, x in state.items()})


def _save() -> tuple[list[Params], Params, list[Params], Params]:
    plain, computing = _Saving(), _Saving()
    return plain.saved, fit(Tiny(), plain), computing.saved, fit(_Computing(), computing)


def test_a_state_that_a_module_computes_is_one_of_the_global_weights() -> None:
    """If it fails, checkpoints of such modules hold what rank 0 has trained on its own."""
    first, second = run_ranks(_save)
    for plain, final, computing, other in (first, second):
        assert_same(other, final)
        for ours, expected, on_first in zip(computing, plain, first[0], strict=True):
            assert_same(ours, expected)
            assert_same(ours, on_first)
