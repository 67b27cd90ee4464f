import pickle
import threading
import warnings

import nvtx  # type: ignore[import-untyped]
import pytest
import torch
from line import Line as OneLayer
from line import trainer_for
from recorded_domain import RecordedDomain
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_commopt import CommOptDDP
from lightning_commopt.callbacks.nvtx_ranges import COLORS, NVTXRanges
from support.cross_section import sampled
from support.lightnings import Callback, DDPStrategy, LightningOptimizer, ModelCheckpoint
from support.ranks import run_ranks

STEP = ["get batch", "forward", "backward", "optimizer step"]
ACCUMULATED = STEP[:-1]


@pytest.fixture
def domain(monkeypatch):
    recorded = RecordedDomain()
    monkeypatch.setattr(nvtx, "get_domain", lambda name: recorded)
    return recorded


class Line(OneLayer):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


class TwoSteps(Line):
    """Steps twice in a batch, by hand."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()


class Failing(Line):
    """Raises in the second batch, or in validation, where it is told to."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def training_step(self, batch, batch_idx):
        if self.where == "forward" and batch_idx == 1:
            raise RuntimeError("on purpose")
        return super().training_step(batch, batch_idx)

    def on_after_backward(self):
        if self.where == "backward" and self.trainer.fit_loop.batch_idx == 1:
            raise RuntimeError("on purpose")

    def validation_step(self, batch, batch_idx):
        if self.where == "validation" and not self.trainer.sanity_checking:
            raise RuntimeError("on purpose")

    def on_save_checkpoint(self, checkpoint):
        if self.where == "checkpoint":
            raise RuntimeError("on purpose")


class Busy(TwoSteps):
    """Saves in the middle of a batch, and goes on training when an epoch is over."""

    def training_step(self, batch, batch_idx):
        self.trainer.save_checkpoint("a.ckpt")
        super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        TwoSteps.training_step(self, [torch.ones(2, 3)], 0)


class Endless(IterableDataset[torch.Tensor]):
    def __iter__(self):
        return iter(torch.linspace(0, 1, 12).reshape(4, 3).split(1))


def loader(num_batches=3, num_ranks=1):
    samples = torch.linspace(0, 1, 6 * num_batches * num_ranks).reshape(-1, 3)
    return DataLoader(TensorDataset(samples), batch_size=2)


def fit(model=None, data=None, ckpt_path=None, callbacks=(), **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ranges = NVTXRanges()
        trainer = trainer_for([*callbacks, ranges], **settings)
        data = loader() if data is None else data
        trainer.fit(model or Line(), data, loader(1), ckpt_path=ckpt_path)
    return ranges, trainer


def batch(index, parts):
    return [f"Batch {index}", *([part] for part in parts)]


def test_batches_of_two_epochs_with_accumulation_and_validation(domain):
    fit(accumulate_grad_batches=2, num_sanity_val_steps=1, max_epochs=2)
    epochs = [
        [batch(first, ACCUMULATED), batch(first + 1, STEP), batch(first + 2, STEP), ["validation"]] for first in (0, 3)
    ]
    assert domain.tree == [["validation"], *epochs[0], *epochs[1]]
    assert domain.is_balanced
    assert domain.threads == {threading.get_ident()}


def test_what_comes_between_batches_is_part_of_none(domain, tmp_path):
    """ModelCheckpoint saves after a batch, and another one after a validation in the epoch and at its end."""
    fit(
        data=loader(4),
        val_check_interval=2,
        callbacks=[
            ModelCheckpoint(tmp_path / "steps", every_n_train_steps=3, save_weights_only=True),
            ModelCheckpoint(tmp_path / "epochs", save_top_k=-1),
        ],
    )
    batches = [batch(index, STEP) for index in range(4)]
    validation = [["validation"], ["checkpoint"]]
    assert domain.tree == [*batches[:2], *validation, batches[2], ["checkpoint"], batches[3], *validation]
    assert domain.is_balanced


def test_steps_by_hand(domain):
    fit(model=TwoSteps(), data=loader(2))
    by_hand = ["forward", "backward", "forward", "optimizer step"]
    assert domain.tree == [batch(i, ["get batch", *by_hand, *by_hand, "forward"]) for i in range(2)] + [["validation"]]


def test_a_checkpoint_in_a_batch_and_steps_outside_of_any(domain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fit(model=Busy(), data=loader(1))
    parts = batch(0, ["get batch", "forward", *2 * ["backward", "forward", "optimizer step", "forward"]])
    parts[2].append(["checkpoint"])
    assert domain.tree == [parts, ["validation"]]
    assert domain.is_balanced


@pytest.mark.parametrize(
    ("settings", "num_batches"),
    [
        ({"max_steps": 2}, 2),
        ({"limit_train_batches": 1, "max_epochs": 2}, 2),
        ({"data": DataLoader(Endless(), batch_size=None)}, 4),
        ({"fast_dev_run": 2}, 2),
    ],
)
def test_no_batch_is_awaited_that_does_not_come(domain, settings, num_batches):
    fit(limit_val_batches=0, **settings)
    batches = [tree for tree in domain.tree if tree != ["validation"]]
    assert batches == [batch(index, STEP) for index in range(num_batches)]
    assert domain.is_balanced


def test_a_model_that_skips_the_rest_of_an_epoch_leaves_nothing_open(domain):
    class Skipping(Line):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 1 else None

    fit(model=Skipping(), max_epochs=2, limit_val_batches=0)
    skipped = ["get batch", "forward"]
    assert domain.tree == [batch(0, STEP), batch(1, skipped), batch(2, STEP), batch(3, skipped)]
    assert domain.is_balanced


def test_a_resumed_fit_goes_on_counting(domain, tmp_path):
    fit(data=loader(4), callbacks=[ModelCheckpoint(tmp_path, every_n_train_steps=2)], max_steps=2)
    before = len(domain.tree)
    fit(data=loader(4), ckpt_path=tmp_path / "epoch=0-step=2.ckpt", limit_val_batches=0)
    assert domain.tree[before:] == [batch(2, STEP[1:]), batch(3, STEP)]


@pytest.mark.parametrize("where", ["forward", "backward", "validation", "checkpoint"])
def test_an_exception_leaves_nothing_open(domain, tmp_path, where):
    ranges = NVTXRanges()
    checkpoints = ModelCheckpoint(tmp_path, every_n_train_steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = trainer_for([checkpoints, ranges], num_sanity_val_steps=1)
        with pytest.raises(RuntimeError, match="on purpose"):
            trainer.fit(Failing(where), loader(), loader(1))
    assert domain.is_balanced
    assert set(trainer.callbacks) == {ranges, checkpoints}
    assert "save_checkpoint" not in trainer.__dict__
    assert not trainer.strategy.sync_observers
    last = domain.tree[-1]
    while len(last) > 1:
        last = last[-1]
    assert last == [where]


def test_a_trainer_that_fits_twice(domain):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ranges = NVTXRanges()
        before = pickle.dumps(ranges)
        trainer = trainer_for([Callback(), ranges], limit_val_batches=0)
        callbacks = list(trainer.callbacks)
        model = Line()
        trainer.fit(model, loader(1))
        trainer.validate(model, loader(1), verbose=False)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(model, loader(1))
    assert domain.tree == [batch(0, STEP), batch(1, STEP)]
    assert domain.is_balanced
    assert trainer.callbacks == callbacks
    assert pickle.loads(pickle.dumps(ranges)).state_dict() == {} == pickle.loads(before).state_dict()


def test_without_a_profiler_nothing_is_touched(tmp_path):
    class Looks(Callback):
        def on_train_batch_end(self, trainer, *args):
            self.seen = (
                trainer.callbacks,
                trainer.__dict__.get("save_checkpoint"),
                hasattr(trainer.strategy, "sync_observers"),
            )

    looks, checkpoints = Looks(), ModelCheckpoint(tmp_path)
    ranges, _ = fit(callbacks=[looks, checkpoints])
    assert looks.seen == ([looks, ranges, checkpoints], None, False)


def test_names_and_colours(domain):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ranges = NVTXRanges(colors={"forward": "cyan", "validation": 0xFF112233, "Batch": 7})
        trainer_for([ranges]).fit(Line(), loader(1), loader(1))
    colors = dict(domain.attributes)
    assert colors["Batch 0"] == 7
    assert (colors["forward"], colors["validation"]) == (COLORS["cyan"], 0xFF112233)
    kept = ["get batch", "backward", "optimizer step"]
    assert [colors[name] for name in kept] == [COLORS[color] for color in ("purple", "red", "yellow")]


def on_two_ranks(kind):
    recorded = RecordedDomain()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvtx, "get_domain", lambda name: recorded)
        watched = fit_in_buckets(kind)
    return watched, fit_in_buckets(kind), recorded.events, recorded.payloads, recorded.is_balanced, recorded.tree


def fit_in_buckets(kind):
    strategies = {
        "ddp": lambda: DDPStrategy(bucket_cap_mb=1e-5, find_unused_parameters=False),
        "none": lambda: CommOptDDP(bucket_cap_mb=1e-5),
        "powersgd": lambda: CommOptDDP(comm_hook="powersgd", bucket_cap_mb=1e-5),
        "int8": lambda: CommOptDDP(comm_hook="int8"),
    }
    model = Line()
    settings = {"devices": 2, "strategy": strategies[kind](), "accumulate_grad_batches": 2, "limit_val_batches": 0}
    fit(model=model, data=loader(4, num_ranks=2), **settings)
    return [p.detach().numpy() for p in model.parameters()]


@pytest.mark.parametrize("kind", sampled(["ddp", "none", "powersgd", "int8"], by_default=["ddp", "int8"]))
def test_every_bucket_is_a_range_in_backward_and_changes_nothing(kind):
    for parameters, expected, events, payloads, is_balanced, tree in run_ranks(on_two_ranks, kind):
        assert all((mine == other).all() for mine, other in zip(parameters, expected, strict=True))
        assert is_balanced
        assert tree == [batch(index, STEP if index % 2 else ACCUMULATED) for index in range(4)]
        num_bytes = sum(p.nbytes for p in parameters)
        assert sum(map(sum, payloads.values())) == 2 * num_bytes  # two syncs
        assert set(payloads) == {f"bucket {index}" for index in range(len(payloads))}
        inside = None
        for event, name in events:
            if event in ("push", "pop") and not name.startswith("Batch"):
                inside = name if event == "push" else None
            assert event not in ("start", "end") or inside == "backward", events
