"""Fits with DiLoCo that are saved, and resumed exactly, or from their global weights."""

import os
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_commopt import CommOptDDP, CommOptDiLoCo
from lightning_commopt.sync.checkpoint import KEY
from support.lightnings import Callback, LightningModule, ModelCheckpoint, OnExceptionCheckpoint, Trainer, callbacks
from support.ranks import run_ranks_or_raise
from support.strategy_models import BatchNormed, Params, assert_same, loader, numbers, trainer
from support.warm_ranks import run_ranks

_OVERLAPPED = {
    "sync_every": 4,
    "fragments": 2,
    "overlap": 1,
    "comm_hook": {"name": "int4", "error_feedback": True, "block_size": 32},
}
_ONE_BY_ONE = {**_OVERLAPPED, "sync_every": 10, "fragments": 10, "fragment_by": "bytes"}


class _Steady(BatchNormed):
    """Trains on a batch that depends on step and rank only, since Lightning begins an epoch anew that it resumes."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        generator = torch.Generator().manual_seed(4 * self.global_step + self.global_rank)
        x = torch.randn(batch[0].shape, generator=generator)
        return super().training_step((x, x.sum(1, keepdim=True).sin()), batch_idx)


class _Other(_Steady):
    """Has a layer of another width, and keeps what it has where a checkpoint has other shapes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers[2], self.layers[4] = nn.Linear(24, width), nn.Linear(width, 1)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        own, state = self.state_dict(), checkpoint["state_dict"]
        state |= {name: x for name, x in own.items() if x.shape != state[name].shape}
        checkpoint["optimizer_states"] = []


class _OtherBuffer(_Other):
    """Has a buffer of another shape."""

    def __init__(self) -> None:
        super().__init__(24)
        self.norm.num_batches_tracked = torch.zeros(1, dtype=torch.int64)


class _Complex(_Steady):
    """Has an empty parameter, and a complex one after an odd number of real elements."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.phase = nn.Parameter(torch.ones(6, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x * self.phase).abs() * self.scale)


class _Replacing(Callback):
    """Saves other weights than the model has, as averages over steps are."""

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {name: torch.ones_like(x) for name, x in checkpoint["state_dict"].items()}


class _Start(Callback):
    """Keeps the weights that a fit starts with, and the number of steps in its rounds."""

    weights: Params
    num_steps: int

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.weights, self.num_steps = numbers(pl_module), cast(Any, trainer.strategy).rounds.num_steps


def _fit(
    folder: Path,
    max_steps: int,
    resumed: Path | None = None,
    /,
    *others: Callback,
    precision: Any = None,
    save_top_k: int = -1,
    num_nodes: int = 1,
    make: Callable[[], LightningModule] = _Steady,
    **options: Any,
) -> Params:
    """Trains on the ranks of the group, with a checkpoint after each step; returns the final weights."""
    model = make()
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=save_top_k, monitor="step", mode="max")
    fit = trainer(
        CommOptDiLoCo(**options),
        max_steps=max_steps,
        max_epochs=99,
        limit_val_batches=0,
        precision=precision,
        devices=dist.get_world_size() // num_nodes,
        num_nodes=num_nodes,
        callbacks=[saving, *others],
        enable_checkpointing=True,
    )
    fit.fit(model, loader(48), ckpt_path=resumed)
    fit.save_checkpoint(folder / "ended.ckpt")
    return numbers(model)


_INNER = {"comm_hook": {"name": "int8", "error_feedback": True}}


def _resume_on_nodes(folder: Path) -> Params:
    rank = dist.get_rank()
    os.environ.update(LOCAL_RANK=str(rank % 2), NODE_RANK=str(rank // 2))
    return _resume_everywhere(folder, {**_OVERLAPPED, "inner": _INNER, "num_nodes": 2}, [5])


@pytest.mark.exhaustive
def test_fit_across_nodes_resumes_exactly(tmp_path: Path) -> None:
    """If it fails, what DDP's hook within a node or the exchange across nodes keeps on a rank is not saved."""
    ranks = run_ranks(_resume_on_nodes, tmp_path, world_size=4)
    for other in ranks[1:]:
        assert_same(ranks[0], other)


def _resume_everywhere(folder: Path, options: dict[str, Any], steps: list[int]) -> Params:
    expected = _fit(folder / "whole", 9, **options)
    for step in steps:
        # One from the middle of a fit, and one from after the end of a fit, which has exchanged once more.
        _fit(folder / f"until_{step}", step, **options)
        for source in (f"whole/step={step}", f"until_{step}/ended"):
            got = _fit(folder / f"{source}_resumed", 9, folder / f"{source}.ckpt", **options)
            assert_same(got, expected, of=source)
    return expected


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        pytest.param(_OVERLAPPED, [4, 9], id="overlapped"),
        pytest.param({**_ONE_BY_ONE, "make": _Complex}, [5], id="complex"),
        pytest.param(
            {"sync_every": 3, "make": _Complex}, [4], id="complex_in_one_fragment", marks=pytest.mark.exhaustive
        ),
        pytest.param(_OVERLAPPED, [1, 2, 3, 5, 6, 7, 8], id="all_steps", marks=pytest.mark.exhaustive),
        pytest.param({"sync_every": 3}, [1, 2, 3], id="plain", marks=pytest.mark.exhaustive),
        pytest.param(
            {**_OVERLAPPED, "precision": "bf16-true"}, [5, 6, 9], id="bf16_true", marks=pytest.mark.exhaustive
        ),
        # Lightning loads the weights of a checkpoint into a module in float32, before it makes it one in float64.
        pytest.param({**_OVERLAPPED, "precision": "64-true"}, [5, 9], id="64_true", marks=pytest.mark.exhaustive),
    ],
)
def test_resumed_fit_equals_the_uninterrupted_one(options: dict[str, Any], steps: list[int], tmp_path: Path) -> None:
    """If it fails, a part of the state of a round is lost in a checkpoint, or mixed up between ranks."""
    first, second = run_ranks(_resume_everywhere, tmp_path, options, steps)
    assert_same(first, second)


def _read(file: Path) -> Any:
    return torch.load(file, weights_only=True)


def _saved(folder: Path) -> Params:
    final = _fit(folder / "saved", 6, sync_every=4, outer_momentum=0.5)
    _fit(folder / "rotated", 4, sync_every=2, save_top_k=1)
    _fit(folder / "plain", 2, sync_every=2, save_comm_state=False)
    return final


def _resumed(checkpoint: Path, **options: Any) -> tuple[Params, int, list[str]]:
    """Returns the weights and the number of steps with which a fit resumes, and the warnings of DiLoCo."""
    start = _Start()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _fit(Path("resumed"), 8, checkpoint, start, **{"sync_every": 4, "outer_momentum": 0.5, **options})
    return start.weights, start.num_steps, [str(x.message) for x in caught if "All workers resume" in str(x.message)]


def test_checkpoints_hold_global_weights_that_load_anywhere(tmp_path: Path) -> None:
    """If it fails, a checkpoint has rank 0's own weights, needs this package, or leaves files behind."""
    final, _ = run_ranks(_saved, tmp_path)
    folder = tmp_path / "saved"
    states = {step: _read(folder / f"step={step}.ckpt") for step in (4, 5, 6)}
    assert_same_tensors(states[4]["state_dict"], states[5]["state_dict"])
    own = [_read(folder / "lightning_commopt_ranks" / "step=5.ckpt" / f"rank_{rank}.ckpt") for rank in range(2)]
    assert not torch.equal(own[0]["weights"][0][0], own[1]["weights"][0][0])
    momenta = [part["entries"]["optimizer_states"][0]["state"][0]["momentum_buffer"] for part in own]
    assert not torch.equal(*momenta)
    assert_same_tensors(states[5]["state_dict"], states[6]["state_dict"])
    ended = _read(folder / "ended.ckpt")["state_dict"]
    assert_same({name: x.double().numpy() for name, x in ended.items()}, final)
    plain = trainer("auto", max_steps=7, max_epochs=99, limit_val_batches=0, devices=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Lightning, on what this fit leaves out
        plain.fit(BatchNormed(), loader(48), ckpt_path=folder / "step=5.ckpt")
    assert sorted(x.name for x in (tmp_path / "rotated" / "lightning_commopt_ranks").iterdir()) == [
        "ended.ckpt",
        "step=4.ckpt",
    ]
    assert sorted(x.name for x in (tmp_path / "plain").iterdir()) == ["ended.ckpt", "step=1.ckpt", "step=2.ckpt"]


def assert_same_tensors(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.equal(got[name], x), name


def _circumstances(folder: Path) -> dict[str, tuple[Params, int, list[str]]]:
    file = folder / "saved" / "step=5.ckpt"
    link = folder / "last.ckpt"
    if dist.get_rank() == 0:
        link.symlink_to(file)
        ranks = folder / "saved" / "lightning_commopt_ranks"
        shutil.copy(ranks / "step=5.ckpt" / "rank_1.ckpt", ranks / "step=4.ckpt" / "rank_1.ckpt")
    dist.barrier()
    return {
        "link": _resumed(link, outer_lr=0.3),
        "plan": _resumed(file, sync_every=3),
        "foreign": _resumed(folder / "saved" / "step=4.ckpt"),
        "stock": _resumed(folder / "plain" / "step=2.ckpt"),
    }


@pytest.mark.exhaustive
def test_other_circumstances_resume_from_the_global_weights(tmp_path: Path) -> None:
    """If it fails, ranks resume from different states, or a user is not told what is lost; more cases are Fabric's."""
    run_ranks(_saved, tmp_path)
    first, second = run_ranks(_circumstances, tmp_path)
    expected = {name: x.double().numpy() for name, x in _read(tmp_path / "saved" / "step=5.ckpt")["state_dict"].items()}
    assert (first["link"][0]["layers.0.weight"] != second["link"][0]["layers.0.weight"]).any()
    assert_same(first["plan"][0], expected)
    for case in ("plan", "foreign", "stock"):
        assert_same(first[case][0], second[case][0], of=case)
    assert [first[case][1] for case in ("link", "plan", "foreign", "stock")] == [5, 0, 4, 0]
    told = {case: "".join(texts) for case, (_, _, texts) in first.items()}
    assert told["link"] == told["stock"] == ""
    assert "because it was saved with another plan, " in told["plan"]
    assert "because the file of rank 1 belongs to another checkpoint. They lose" in told["foreign"]
    assert ["the outer momentum" in told[case] for case in ("plan", "foreign")] == [True, False]


def _resume_others(folder: Path) -> list[tuple[Params, int, list[str]]]:
    options: dict[str, Any] = {"sync_every": 4, "outer_momentum": 0.5}
    _fit(folder / "replaced", 2, None, _Replacing(), **options)
    _fit(folder / "plain", 2, **options)
    return [
        _resumed(folder / "replaced" / "step=2.ckpt"),
        *(_resumed(folder / "plain" / "step=2.ckpt", make=make) for make in (partial(_Other, 20), _OtherBuffer)),
    ]


def test_weights_that_hooks_put_in_the_place_of_others_are_those_to_resume_from(tmp_path: Path) -> None:
    """If it fails, global weights and ranks' own are of different models, or the resume ends in an error of shapes."""
    first, second = run_ranks(_resume_others, tmp_path)
    for (weights, num_steps, _), (others, *_) in zip(first, second, strict=True):
        assert_same(weights, others)
        assert num_steps == 0
    assert all((x == 1).all() for x in first[0][0].values())
    saved = _read(tmp_path / "plain" / "step=2.ckpt")["state_dict"]
    assert (first[1][0]["layers.0.weight"] == saved["layers.0.weight"].numpy()).all()
    reasons = [text.partition(", because ")[2].partition(". They lose")[0] for *_, texts in first for text in texts]
    assert reasons == [
        "a hook has replaced the weights of the last exchanges by others",
        *["the model has parameters or buffers of other shapes"] * 2,
    ]
    assert not any("optimizer states" in text for *_, texts in first for text in texts)  # each rank has its own


def _change_and_resume(folder: Path) -> tuple[Params, Params, list[str]]:
    """Returns the weights that a fit starts with, those that the model was given before, and the warnings."""
    model, start = _Steady(), _Start()
    fit = trainer(CommOptDiLoCo(sync_every=2), max_steps=3, limit_val_batches=0)
    fit.fit(model, loader(48))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    given = numbers(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit.save_checkpoint(folder / "given.ckpt")
    _fit(folder, 4, folder / "given.ckpt", start, sync_every=2)
    return start.weights, given, [str(x.message) for x in caught if "that each rank needs" in str(x.message)]


def test_weights_that_a_model_is_given_after_a_fit_are_those_to_resume_from(tmp_path: Path) -> None:
    """If it fails, a fit resumes from other weights than those in its checkpoint."""
    ranks = run_ranks(_change_and_resume, tmp_path)
    for start, given, _ in ranks:
        assert_same(start, given)
    assert "has the weights that the model was given after the fit" in ranks[0][2][0]


class _Breaking(Callback):
    """Raises between two batches on one rank, or on all."""

    def __init__(self, rank: int | None) -> None:
        self._rank = rank

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 3 and self._rank in (None, trainer.global_rank):
            raise ArithmeticError("broken on purpose")


def _break(folder: Path, rank: int | None) -> None:
    trainer(
        CommOptDiLoCo(sync_every=2),
        limit_val_batches=0,
        enable_checkpointing=True,
        callbacks=[_Breaking(rank), OnExceptionCheckpoint(folder)],
    ).fit(_Steady(), loader(48))


@pytest.mark.parametrize("rank", [0, pytest.param(None, marks=pytest.mark.exhaustive)])
def test_checkpoint_at_an_exception(rank: int | None, tmp_path: Path) -> None:
    """If it fails, none is written, since the rank that has failed waits for the others, which wait for it."""
    answers = run_ranks_or_raise(_break, tmp_path, rank, world_size=2, limit_s=60)
    assert all(trace is not None for _, trace in answers)
    saved = _read(tmp_path / "on_exception.ckpt")
    assert saved["global_step"] == 3
    assert (KEY in saved) == (rank is None)


def _by_others(folder: Path) -> list[str]:
    """Returns the warnings of the other strategy when each of ours loads a checkpoint of the other."""
    told = []
    saved = folder / "saved" / "step=5.ckpt"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = _Steady()
        fit = trainer(CommOptDDP(comm_hook="bf16"), max_steps=7, max_epochs=99, limit_val_batches=0)
        fit.fit(model, loader(48), ckpt_path=saved)
        fit.save_checkpoint(folder / "ddp.ckpt")
        of_lightning = trainer("ddp", max_steps=5, max_epochs=99, limit_val_batches=0)
        of_lightning.fit(_Steady(), loader(48))
        of_lightning.save_checkpoint(folder / "of_lightning.ckpt")
    told += [str(x.message) for x in caught if "cannot be used" in str(x.message)]
    return [*told, *_resumed(folder / "ddp.ckpt")[2], *_resumed(folder / "of_lightning.ckpt")[2]]


@pytest.mark.exhaustive
def test_strategies_load_the_checkpoints_of_others(tmp_path: Path) -> None:
    """If it fails, a user cannot go from DDP to DiLoCo, or back, without errors, or is warned of losing nothing."""
    run_ranks(_saved, tmp_path)
    told, _ = run_ranks(_by_others, tmp_path)
    assert "because it was saved by CommOptDiLoCo, and only CommOptDiLoCo can resume from it" in told[0]
    assert "because it was saved by another strategy. They lose" in told[1]
    assert len(told) == 2


def _with_finders() -> tuple[Params, Params]:
    options: dict[str, Any] = {"sync_every": 3, "fragments": 2, "overlap": 1}
    found = _fit(
        Path("found"),
        5,
        None,
        callbacks.LearningRateFinder(num_training_steps=7, update_attr=False, early_stop_threshold=None),
        **options,
    )
    return found, _fit(Path("plain"), 5, None, **options)


@pytest.mark.exhaustive
def test_learning_rate_finder_leaves_no_trace() -> None:
    """If it fails, a checkpoint that is loaded in the middle of a fit does not begin the rounds anew."""
    for found, expected in run_ranks(_with_finders):
        assert_same(found, expected)
