"""Damaged states of gradient sync: training starts with a residual of zero on all ranks, after one warning."""

import copy
import random
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from lightning_commopt import CommOptDDP, CommOptModelParallel
from lightning_commopt.sync.checkpoint import KEY, open_checkpoint, to_checkpoint
from lightning_commopt.sync.state import CheckpointError
from support.cross_section import sampled
from support.sharded_model import Sharded
from support.strategy_models import Params, Tiny, assert_same, loader, trainer
from support.warm_ranks import run_ranks

_NUM_DAMAGES = 6
_PLAIN: list[Any] = [None, "spam", -1, 2.5, [], {}]
_KINDS = ("ddp", "file", "directory")
_FEEDBACK = {"name": "int8", "error_feedback": True, "block_size": 16}
_HOOKS = {"ddp": {"name": "powersgd", "start_step": 1}, "file": _FEEDBACK, "directory": _FEEDBACK}


def _run(kind: str, hook: Any, path: Path | None, epochs: int) -> tuple[Any, Any]:
    is_sharded = kind != "ddp"
    strategy: Any
    if is_sharded:
        strategy = CommOptModelParallel(comm_hook=hook, save_distributed_checkpoint=kind == "directory")
    else:
        strategy = CommOptDDP(comm_hook=hook, bucket_cap_mb=0.002)
    model, run = Sharded() if is_sharded else Tiny(), trainer(strategy, max_epochs=epochs)
    with torch.random.fork_rng():
        run.fit(model, loader(24), ckpt_path=path)
    return model, run


def _save(kind: str, path: Path) -> None:
    _, run = _run(kind, _HOOKS[kind], None, 1)
    run.save_checkpoint(path)


def _resume_all(kind: str, hook: Any, paths: list[Path]) -> list[tuple[Params, list[str]]]:
    outcomes = []
    for path in paths:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model, _ = _run(kind, hook, path, 3)
        state = model.state_dict()
        params = {name: (x if kind == "ddp" else x.full_tensor()).numpy().copy() for name, x in state.items()}
        outcomes.append((params, [str(x.message) for x in caught if "comm_hook" in str(x.message)]))
        dist.barrier()
    return outcomes


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields all dicts and lists within a value, each with all its keys or indices."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield value, key
        yield from _places(item)


def _damage(saved: Any, choose: random.Random) -> str:
    """Removes or replaces something in ``saved``; returns what."""
    container, key = choose.choice(list(_places(saved)))
    old = container[key]
    if choose.random() < 0.5:
        del container[key]
        return f"without {key!r}"
    container[key] = choose.choice([x for x in _PLAIN if isinstance(old, Tensor) or x != old])
    return f"{key!r} = {container[key]!r}"


def _damaged_copies(path: Path, folder: Path, seed: str) -> dict[str, Path]:
    """Returns damaged copies of a checkpoint by what was done to them, and one without a state, "none"."""
    choose, copies = random.Random(seed), {}
    for number in range(_NUM_DAMAGES + 1):
        where = folder / f"{number}.ckpt"
        (shutil.copytree if path.is_dir() else shutil.copy)(path, where)
        file = where / "meta.pt" if path.is_dir() else where
        checkpoint = torch.load(file, weights_only=True)
        if number:
            before = copy.deepcopy(checkpoint[KEY])
            copies[f"{number}: {_damage(checkpoint[KEY], choose)}"] = where
            assert str(checkpoint[KEY]) != str(before)
        else:
            del checkpoint[KEY]
            copies["none"] = where
        torch.save(checkpoint, file)
    if path.is_dir():
        for name in ("lightning_commopt", "lightning_commopt/__1_0.distcp", "lightning_commopt/.metadata"):
            where = folder / f"without {len(copies)}.ckpt"
            shutil.copytree(path, where)
            shutil.rmtree(where / name) if (where / name).is_dir() else (where / name).unlink()
            copies[f"without {name}"] = where
    return copies


@pytest.mark.parametrize(("kind", "seed"), sampled([(kind, seed) for kind in _KINDS for seed in (0, 1)], [("ddp", 0)]))
def test_a_damaged_state_is_left_out_everywhere(kind: str, seed: int, tmp_path: Path) -> None:
    """If it fails, a damaged checkpoint ends a training, or ranks go on with different halves of it."""
    if kind != "ddp" and not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        pytest.skip("FSDP2 takes other collectives from torch 2.9 on")
    run_ranks(_save, kind, tmp_path / "intact")
    copies = _damaged_copies(tmp_path / "intact", tmp_path, f"{kind} {seed}")
    first, second = run_ranks(_resume_all, kind, _HOOKS[kind], [*copies.values(), tmp_path / "intact"])
    (fresh, no_messages), *damaged, (resumed, _) = first
    assert no_messages == []
    assert any((value != fresh[name]).any() for name, value in resumed.items()), "the state makes no difference"
    for what, (params, messages), (others, _) in zip([*copies][1:], damaged, second[1:-1], strict=True):
        assert len(messages) == 1, (what, messages)
        assert "it starts from zero" in messages[0], what
        assert_same(params, fresh, of=what)
        assert_same(others, fresh, of=what)


def test_a_file_made_of_a_directory_says_where_its_tensors_are() -> None:
    """If it fails, a consolidated checkpoint, whose tensors have no data, ends a training."""
    saved = to_checkpoint(None, 3, [{"states": [], "residuals": {"weight": torch.empty(3, device="meta")}}])
    with pytest.raises(CheckpointError, match="in the folder lightning_commopt of the directory"):
        open_checkpoint(saved).of_rank(0, 1, None)


@pytest.mark.parametrize("version", [2, 4, "3", None, True])
def test_other_versions_are_refused_by_their_number(version: Any) -> None:
    with pytest.raises(CheckpointError, match=f"version is {version!r}, but only version 3 can be read"):
        open_checkpoint({**to_checkpoint(None, 1, []), "version": version})


@pytest.mark.parametrize("name", ["ops", "float128", "load", 3, None])
def test_a_dtype_is_none_but_a_dtype(name: Any) -> None:
    """If it fails, the text of a file is looked up among the functions of torch."""
    bucket = {"index": 0, "names": ["weight"], "shapes": [[2]], "strides": [[1]], "dtype": name, "state": {}}
    saved = to_checkpoint(None, 1, [{"states": [bucket], "residuals": {}}])
    with pytest.raises(CheckpointError, match="damaged"):
        open_checkpoint(saved).of_rank(0, 1, None)
