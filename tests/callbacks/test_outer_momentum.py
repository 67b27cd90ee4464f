"""OuterMomentum: the outer optimizer of DiLoCo around any strategy, against a few lines of torch."""

import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_commopt import CommOptDDP, CommOptDiLoCo, CommOptModelParallel, OptionError
from lightning_commopt.callbacks import OuterMomentum
from lightning_commopt.text import validation
from support.collectives import takes_collectives
from support.lightnings import Callback, DDPStrategy, ModelCheckpoint
from support.sharded_model import Sharded
from support.strategy_models import (
    AveragingWeights,
    BatchNormed,
    FreezeLater,
    Frozen,
    Gan,
    Manual,
    Params,
    Thaw,
    Thawing,
    Tiny,
    loader,
    trainer,
)
from support.warm_ranks import run_ranks

_OPTIONS: dict[str, Any] = {"sync_every": 4, "outer_lr": 0.8, "outer_momentum": 0.6}


def _weights(module: nn.Module) -> Params:
    return {name: x.detach().clone().numpy() for name, x in module.named_parameters()}


def _run(run: Any, model: Tiny, samples: int, ckpt_path: Any = None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's own: no validation, few workers
        run.fit(model, loader(samples), ckpt_path=ckpt_path)


def _fit(model: Tiny, strategy: Any = "auto", *, ckpt_path: Any = None, **options: Any) -> Params:
    callbacks = [OuterMomentum(**_OPTIONS), *options.pop("callbacks", [])]
    run = trainer(strategy, **{"max_epochs": 2, "callbacks": callbacks, **options})
    _run(run, model, 40, ckpt_path)
    return _weights(model)


def _reference(model: Tiny, accumulate: int = 1, loss_scale: float = 1.0) -> Params:
    """Trains two epochs of ten batches with ``torch.optim.SGD`` inside and outside, as `_OPTIONS` say."""
    inner: Any = model.configure_optimizers()
    trained = [x for x in model.parameters() if x.requires_grad]
    slow = [x.detach().clone() for x in trained]
    outer = torch.optim.SGD(slow, lr=0.8, momentum=0.6, nesterov=True)
    batches = [batch for _ in range(2) for batch in loader(40)]
    for number, batch in enumerate(batches, 1):
        (model.loss(batch) * loss_scale / accumulate).backward()
        if number % accumulate:
            continue
        inner.step()
        inner.zero_grad()
        if number // accumulate % 4 == 0:
            with torch.no_grad():
                for own, fast in zip(slow, trained, strict=True):
                    own.grad = own - fast
                outer.step()
                for own, fast in zip(slow, trained, strict=True):
                    fast.copy_(own)
    return _weights(model)


def _assert_equal(ours: Params, expected: Params) -> None:
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)


def _assert_close(ours: Params, expected: Params) -> None:
    for name, value in expected.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(("model", "accumulate"), [(Tiny, 2), (Frozen, 1)])
def test_it_is_sgd_on_what_the_steps_have_changed(model: Callable[[], Tiny], accumulate: int) -> None:
    """If it fails, the outer optimizer is another one than DiLoCo's, or counts batches for steps."""
    ours = _fit(model(), accumulate_grad_batches=accumulate)
    _assert_close(ours, _reference(model(), accumulate))
    before = _weights(model())
    changed = {name for name in ours if not np.array_equal(ours[name], before[name])}
    assert changed == {name for name, x in model().named_parameters() if x.requires_grad}


def test_manual_optimization_counts_steps_and_moves_all_parameters() -> None:
    _assert_close(_fit(Manual(accumulate=2)), _reference(Tiny(), 2, loss_scale=2.0))
    # Both optimizers step in each batch, and each batch is a step: the critic is frozen in the first half of it.
    run = trainer("auto", max_epochs=1, callbacks=[moves := OuterMomentum(sync_every=5, outer_lr=0.5)])
    model = Gan()
    _run(run, model, 20)
    state = moves.state_dict()
    assert state["num_steps"] == 0
    assert state["slow"].keys() == state["momenta"].keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(state["slow"][name], parameter.detach(), rtol=0, atol=0)


class _Setting(Tiny):
    def on_train_start(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(0.1)


def test_weights_that_a_hook_sets_before_the_first_batch_are_no_training() -> None:
    """If it fails, the first move multiplies what the hook has changed."""
    expected = Tiny()
    _Setting.on_train_start(expected)  # type: ignore[arg-type]
    _assert_close(_fit(_Setting()), _reference(expected))


def test_averages_of_weights_stay_as_they_are() -> None:
    """If it fails, the epoch that computes BatchNorm's statistics for StochasticWeightAveraging moves its averages."""
    model, averaging = BatchNormed(), AveragingWeights()
    run = trainer("auto", max_epochs=2, callbacks=[OuterMomentum(sync_every=7), averaging])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's own: few workers
        run.fit(model, loader(40), loader(8))  # a validation sets gradients to None
    _assert_equal(_weights(model), averaging.average)


def test_lr_one_without_momentum_changes_nothing() -> None:
    """If it fails, the weights move elsewhere than where the outer optimizer says."""
    model = Tiny()
    run = trainer("auto", max_epochs=1, callbacks=[OuterMomentum(sync_every=3, outer_lr=1.0, outer_momentum=0.0)])
    _run(run, model, 40)
    plain = Tiny()
    _run(trainer("auto", max_epochs=1), plain, 40)
    _assert_close(_weights(model), _weights(plain))


def test_a_parameter_that_is_frozen_stays_as_it_is() -> None:
    class Watching(FreezeLater):
        frozen: torch.Tensor

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            super().on_train_epoch_start(trainer, pl_module)
            self.frozen = pl_module.layers[0].weight.detach().clone()

    watching, model = Watching(), Tiny()
    _fit(model, callbacks=[watching])
    np.testing.assert_array_equal(_weights(model)["layers.0.weight"], watching.frozen.numpy())


def test_a_parameter_that_is_trained_later_takes_part_from_the_next_move_on() -> None:
    """If it fails, it is moved by a momentum that it has not, or never."""
    callback, model = OuterMomentum(**_OPTIONS), Thawing()
    run = trainer("auto", max_epochs=2, callbacks=[Thaw(), callback])
    _run(run, model, 40)  # trained from step 10 on, moved after 12, where it starts, and 16
    momenta = callback.state_dict()["momenta"]
    assert momenta.keys() == dict(model.named_parameters()).keys()
    assert all(momentum.any() for momentum in momenta.values())


def _save_and_resume(folder: Path, strategy: Callable[[], Any]) -> None:
    saving = ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)  # after 5 steps, within a round
    uninterrupted = _fit(Tiny(), strategy(), enable_checkpointing=True, callbacks=[saving])
    resumed = _fit(Tiny(), strategy(), ckpt_path=folder / "epoch=0.ckpt")
    _assert_equal(resumed, uninterrupted)


def _fit_on_ranks(strategy: Callable[[], Any]) -> Params:
    return _fit(Tiny(), strategy())


def test_ranks_stay_equal() -> None:
    first, second = run_ranks(_fit_on_ranks, partial(CommOptDDP, comm_hook="int8"))
    _assert_equal(first, second)


def test_it_resumes_bit_for_bit_within_a_round(tmp_path: Path) -> None:
    """If it fails, the slow weights or their momentum are lost with each interruption."""
    run_ranks(_save_and_resume, tmp_path, DDPStrategy)


def test_a_checkpoint_of_a_resumed_fit_without_a_batch_keeps_the_momentum(tmp_path: Path) -> None:
    """If it fails, a fit that is resumed when it has ended, saved again and prolonged begins a new momentum."""
    saved = []
    for path in (None, tmp_path / "first.ckpt"):
        run = trainer("auto", max_epochs=2, callbacks=[OuterMomentum(**_OPTIONS)])
        _run(run, Tiny(), 40, path)
        run.save_checkpoint(tmp_path / "first.ckpt")
        (state,) = (x for name, x in torch.load(tmp_path / "first.ckpt")["callbacks"].items() if "Outer" in name)
        saved.append(state)
    assert saved[0]["momenta"]
    assert saved[1]["num_steps"] == saved[0]["num_steps"]
    for key in ("slow", "momenta"):
        assert saved[1][key].keys() == saved[0][key].keys()
        assert all(torch.equal(x, saved[0][key][name]) for name, x in saved[1][key].items())


def test_a_state_that_no_batch_has_followed_is_left_to_its_fit(tmp_path: Path) -> None:
    """If it fails, folds of a cross-validation with one callback begin with the weights of the fold before."""
    path, callback, expected = tmp_path / "first.ckpt", OuterMomentum(**_OPTIONS), _reference(Tiny())
    run = trainer("auto", max_epochs=1, callbacks=[callback])
    _run(run, Tiny(), 40)
    run.save_checkpoint(path)
    for stage in ("test", "fit"):  # the fit is over where it was saved
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Lightning's own of few workers
            getattr(run, stage)(Tiny(), loader(8), ckpt_path=path)
        model = Tiny()
        _run(trainer("auto", callbacks=[callback]), model, 40)
        _assert_close(_weights(model), expected)


def _fit_shards(folder: Path) -> tuple[Params, Params]:
    def strategy(is_distributed: bool = False) -> Any:
        return CommOptModelParallel(2, 1, save_distributed_checkpoint=is_distributed)

    def fit(ckpt_path: Path | None = None) -> Params:
        model, callbacks = Sharded(), [OuterMomentum(**_OPTIONS)]
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Lightning's own of few workers
            # A validation before the first batch leaves parameters gathered.
            run = trainer(strategy(), max_epochs=2, callbacks=callbacks, num_sanity_val_steps=1)
            run.fit(model, loader(40), loader(8), ckpt_path=ckpt_path)
        return {name: x.full_tensor().numpy() for name, x in model.state_dict().items()}

    run = trainer(strategy(is_distributed=True), max_epochs=1, callbacks=[OuterMomentum()])
    _run(run, Sharded(), 8)
    with pytest.raises(OptionError, match="save_distributed_checkpoint=False"):
        run.save_checkpoint(folder / "distributed")
    model = Sharded()
    with torch.random.fork_rng():
        run = trainer(strategy(), max_epochs=1, callbacks=[OuterMomentum(**_OPTIONS)])
        _run(run, model, 40)
        run.save_checkpoint(folder / "sharded.ckpt")
    return fit(), fit(ckpt_path=folder / "sharded.ckpt")


@takes_collectives
def test_shards_move_as_whole_parameters_do(tmp_path: Path) -> None:
    """If it fails, FSDP2's ranks move other weights than DDP's, or do not resume exactly."""
    (whole, resumed), others = run_ranks(_fit_shards, tmp_path)
    for name, value in whole.items():
        np.testing.assert_array_equal(value, others[0][name])
        np.testing.assert_array_equal(value, resumed[name])
    _assert_close(whole, run_ranks(_fit_on_ranks, DDPStrategy)[0])


def _fit_with_both() -> None:
    with pytest.raises(OptionError, match="OuterMomentum and CommOptDiLoCo exclude each other"):
        _fit(Tiny(), CommOptDiLoCo())


def test_what_is_refused_when_a_fit_begins() -> None:
    """If it fails, two outer optimizers move the same weights."""
    run_ranks(_fit_with_both, world_size=1)


class _StopAfterEpoch(Callback):
    def on_train_epoch_end(self, run: Any, pl_module: Any) -> None:
        run.should_stop = run.max_epochs == -1


@pytest.mark.parametrize(
    ("num_epochs", "momentum", "words"),
    [
        (4, 0.5, None),
        (1, 0.7, "sync_every=1 and 10 exchanges: compare the loss with outer_momentum=0.5 and without OuterMom"),
        (-1, 0.9, "sync_every=1: compare the loss with outer_momentum=0.5 and without OuterMom"),  # without a known end
    ],
)
def test_fit_too_short_for_its_momentum_warns(num_epochs: int, momentum: float, words: str | None) -> None:
    """If it fails, somebody loses quality to the papers' momentum in a fit that is too short for it, without a word."""
    validation.warn_once.cache_clear()
    callbacks = [OuterMomentum(sync_every=1, outer_momentum=momentum), _StopAfterEpoch()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer("auto", max_epochs=num_epochs, callbacks=callbacks).fit(Tiny(), loader(40))
    warned = [str(warning.message) for warning in caught if "outer_momentum" in str(warning.message)]
    assert len(warned) == (words is not None)
    assert words is None or re.search(words, warned[0])


def test_exchanges_that_are_told_of_manual_optimization_are_conditional() -> None:
    """If it fails, a fit that steps in every second batch is told of twice the exchanges that it will have."""
    validation.warn_once.cache_clear()
    callbacks = [OuterMomentum(sync_every=1, outer_momentum=0.9)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer("auto", max_epochs=1, callbacks=callbacks).fit(Manual(accumulate=2), loader(40))
    assert any("and 10 exchanges if each batch is a step: compare" in str(warning.message) for warning in caught)
