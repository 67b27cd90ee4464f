"""DiLoCo with models whose parameters and buffers are others in the course of a fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_commopt import CommOptDiLoCo
from support.diloco_fits import MEANS, fit
from support.lightnings import Callback, LightningModule, ModelCheckpoint, Trainer
from support.strategy_models import FreezeLater, Gan, Params, Tiny, assert_same, loader, numbers, trainer
from support.warm_ranks import run_ranks


class _Alternating(Gan):
    """Unfreezes its critic only within a step, as image translation does."""

    def __init__(self) -> None:
        super().__init__()
        self.critic.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.critic.requires_grad_(True)
        super().training_step(batch, batch_idx)
        self.critic.requires_grad_(False)

    def on_train_batch_end(self, *args: Any) -> None:
        self.own = numbers(self)


def _alternate() -> tuple[Params, Params]:
    model = _Alternating()
    final = fit(model, sync_every=4, **MEANS)
    return model.own, final


def test_parameters_that_are_unfrozen_only_within_steps_are_exchanged() -> None:
    """If it fails, all that other ranks than the first have trained of them is lost."""
    (first, final), (second, other) = run_ranks(_alternate)
    assert (first["critic.0.weight"] != second["critic.0.weight"]).any()
    assert_same(final, {name: (x + second[name]) / 2 for name, x in first.items()}, rtol=1e-6)
    assert_same(final, other)


class _Seen(Callback):
    """Keeps the weights after each batch."""

    def __init__(self) -> None:
        self.weights: list[Params] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.weights.append(numbers(pl_module))


def _freeze(folder: Path) -> tuple[list[Params], Params, Params]:
    seen = _Seen()
    saving = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    final = fit(Tiny(), FreezeLater(), seen, saving, enable_checkpointing=True)
    return seen.weights, final, fit(Tiny(), FreezeLater(), ckpt_path=folder / "epoch=0.ckpt")


def test_parameters_that_are_frozen_stay_as_they_are(tmp_path: Path) -> None:
    """If it fails, momentum moves what is frozen, or a fit that resumes between training and exchange drops a move."""
    (seen, final, resumed), (_, other, _) = run_ranks(_freeze, tmp_path)
    frozen = {name for name in final if name.startswith("layers.0")}
    for name, x in final.items():  # frozen after step 3, and exchanged after steps 2, 4 and 6
        assert (x != seen[2][name]).any()
        assert (x == seen[3][name]).all() == (name in frozen), name
    assert_same(final, other)
    assert_same(resumed, final)


class _Growing(Tiny):
    """Gets a layer in the second epoch, another one in its place in the third, and one that is left behind."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.extra: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(self.norm(x))
        return output if self.extra is None else output + self.extra(x)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch > 0:
            optimizer: Any = self.optimizers()
            width = 2 + self.current_epoch
            self.extra = nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
            with torch.no_grad():
                for parameter in self.extra.parameters():
                    parameter.add_(self.global_rank)
            optimizer.add_param_group({"params": [*self.extra.parameters()]})

    def on_train_batch_end(self, *args: Any) -> None:
        self.own = numbers(self)

    def on_train_epoch_end(self) -> None:
        self.late = nn.Linear(2, 2)
        nn.init.constant_(self.late.weight, self.global_rank)


def _grow() -> tuple[Params, Params]:
    model = _Growing()
    final = fit(model, sync_every=4, max_epochs=3, fragments=2, **MEANS)
    return model.own, final


def test_layers_that_a_hook_adds_are_exchanged() -> None:
    """If it fails, each rank trains a new layer alone, or from a layer that it has taken the place of."""
    (first, final), (second, other) = run_ranks(_grow)
    trained = {name for name in first if "late" not in name and "num_batches" not in name}
    assert any((first[name] != second[name]).any() for name in trained if "extra" in name)
    assert_same(final, other)
    means = {name: (first[name] + second[name]) / 2 for name in trained}
    assert_same({name: final[name] for name in trained}, means, rtol=1e-6)


class _Caching(Tiny):
    """Has caches that grow with what a rank has seen, one in place, as observers of quantization do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("range", torch.ones(0), persistent=False)
        self.register_buffer("mask", torch.ones(1, dtype=torch.bool), persistent=False)
        self.register_buffer("angles", torch.ones(1), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.mask = torch.ones(2 + batch_idx + self.global_rank, dtype=torch.bool)
        self.angles = torch.ones(len(self.mask))
        self.get_buffer("range").resize_(len(self.mask)).fill_(1.0)
        return super().training_step(batch, batch_idx)


def _fit_twice() -> list[tuple[Params, Params]]:
    models = _Caching(), Tiny()
    return [(fit(models[0]), fit(models[1])) for _ in range(2)]


def test_caches_may_have_any_size() -> None:
    """If it fails, ranks send each other buffers of different sizes, and one of them dies of it."""
    first, second = run_ranks(_fit_twice)
    for (caching, plain), (other, _) in zip(first, second, strict=True):
        assert_same(caching, plain)
        assert_same(caching, other)


class _Remembering(_Caching):
    """Puts buffers in the place of others in inference mode, which ``trainer.validate`` uses beside NCCL."""

    worst: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("worst", torch.zeros(()))

    @torch.inference_mode()
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.worst = torch.maximum(self.worst, self.loss(batch))
        self.angles = torch.full((3 + self.global_rank,), float(self.global_rank))


def _validate_first() -> tuple[Params, Params, bool]:
    model, other = _Remembering(), Tiny()
    for each in (model, other):
        run = trainer(CommOptDiLoCo(sync_every=2))
        run.validate(each, loader(8), verbose=False)
        run.fit(each, loader(), loader(8))
    return numbers(model), numbers(other), model.worst.is_inference()


def test_buffers_of_inference_mode_are_exchanged() -> None:
    """If it fails, a fit after a validation in inference mode, or with one in it, ends with an error."""
    for remembering, plain, is_inference in run_ranks(_validate_first):
        worst = remembering.pop("worst")
        assert worst > 0
        assert not is_inference
        assert_same(remembering, plain)
