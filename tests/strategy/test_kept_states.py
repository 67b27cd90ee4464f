"""Checkpoints that earlier versions wrote: what they say of gradient sync is read; see `support.kept_states`.

Policy: a version reads the files of its own and of the version before.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_commopt import CommOptDDP
from lightning_commopt.sync.checkpoint import KEY, READABLE_VERSIONS, open_checkpoint
from lightning_commopt.sync.state import CheckpointError
from support.cross_section import sampled
from support.kept_states import DDP, HERE
from support.lightnings import Callback
from support.strategy_models import Tiny, loader, trainer
from support.warm_ranks import run_ranks

_NUM_STEPS = 6  # before the checkpoint


class _Look(Callback):
    """Copies what a fit resumes with."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        state = trainer.strategy.gradient_sync.state()
        self.num_syncs = state.num_syncs
        self.residuals = {name: value.clone() for name, value in state.all_residuals().items()}


def _resumed(path: Path, hook: dict[str, Any]) -> tuple[int, dict[str, Tensor], list[str]]:
    look = _Look()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = trainer(CommOptDDP(comm_hook=hook, bucket_cap_mb=0.002), max_epochs=3, callbacks=[look])
        run.fit(Tiny(), loader(24), ckpt_path=path)
    messages = [str(warning.message) for warning in caught if "comm_hook" in str(warning.message)]
    return look.num_syncs, look.residuals, messages


def _with_version(path: Path, folder: Path, version: Any) -> Path:
    checkpoint = torch.load(path, weights_only=True)
    checkpoint[KEY]["version"] = version
    torch.save(checkpoint, folder / path.name)
    return folder / path.name


def _residuals_in(path: Path, rank: int) -> dict[str, Tensor]:
    saved = torch.load(path, weights_only=True)[KEY]
    return open_checkpoint(saved).of_rank(rank, 2, None).all_residuals()


@pytest.mark.parametrize(
    ("name", "version"),
    sampled([(name, version) for name in DDP for version in (2, 1)], by_default=[("int8", 1)]),
)
def test_ddps_residuals_are_read(tmp_path: Path, name: str, version: int) -> None:
    """If it fails, an upgrade of this package drops what error feedback has not sent yet."""
    path = HERE / "ddp_2" / f"{name}.ckpt"
    read = path if version == 2 else _with_version(path, tmp_path, version)
    for rank, (num_syncs, residuals, messages) in enumerate(run_ranks(_resumed, read, DDP[name])):
        expected = _residuals_in(path, rank)
        assert num_syncs == _NUM_STEPS
        assert messages == []
        assert residuals.keys() == expected.keys()
        assert len(residuals) == 6
        for parameter, residual in residuals.items():
            torch.testing.assert_close(residual, expected[parameter], rtol=0, atol=0)
        assert any(residual.abs().max() > 0 for residual in residuals.values())


@pytest.mark.parametrize("version", [0, READABLE_VERSIONS[-1] + 1, "2", None, True])
def test_other_versions_are_refused_by_their_number(version: Any) -> None:
    saved = torch.load(HERE / "ddp_2" / "int8.ckpt", weights_only=True)[KEY]
    with pytest.raises(CheckpointError, match=f"version is {version!r}, and those that can be read are 1-3"):
        open_checkpoint({**saved, "version": version})


@pytest.mark.parametrize("name", ["ops", "float128", "load", 3, None])
def test_a_dtype_is_none_but_a_dtype(name: Any) -> None:
    """If it fails, the text of a file is looked up among the functions of torch."""
    saved = torch.load(HERE / "ddp_2" / "int8.ckpt", weights_only=True)[KEY]
    saved["ranks"][0]["buckets"][0]["dtype"] = name
    with pytest.raises(CheckpointError, match="damaged"):
        open_checkpoint(saved).of_rank(0, 2, None)


def test_fsdp2s_versions_before_are_refused() -> None:
    """If it fails, a checkpoint of an unknown form is taken for one of DDP's."""
    with pytest.raises(CheckpointError, match="it is FSDP2's of version 2, of which only 3 can be read"):
        open_checkpoint({"version": 2, "sharded": {}, "units": {}, "ranks": []})
