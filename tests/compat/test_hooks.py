"""Who owns the hook that a thread is in, as Lightning calls hooks."""

import sys
from typing import Any

import pytest

from lightning_commopt.compat.hooks import hook_owner
from support.lightnings import Callback, LightningDataModule, Logger
from support.strategy_models import Tiny, loader, trainer
from support.warm_ranks import run_ranks

FOUND: dict[str, str | None] = {}


def _note(where: str) -> None:
    FOUND[where] = hook_owner(sys._getframe())


class Asking(Callback):
    def on_train_start(self, *_: Any) -> None:
        _note("callback")


class Model(Tiny):
    def on_train_start(self) -> None:
        _note("module")

    def optimizer_step(self, *arguments: Any, **options: Any) -> None:
        _note("step")
        self.log("loss", 1.0)
        super().optimizer_step(*arguments, **options)

    def on_train_epoch_end(self) -> None:
        raise KeyError("ends the fit")


class Data(LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader()

    def val_dataloader(self) -> Any:
        return loader()

    def on_exception(self, exception: BaseException) -> None:
        _note("datamodule")


class Log(Logger):
    name = version = "log"

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        _note("logger")

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


def _owners() -> dict[str, str | None]:
    options: dict[str, Any] = {"callbacks": [Asking()], "logger": Log(), "log_every_n_steps": 1}
    with pytest.raises(KeyError, match="ends the fit"):
        trainer("auto", **options).fit(Model(), datamodule=Data())
    return FOUND


def test_hooks_as_lightning_calls_them() -> None:
    """If it fails, the report of a hang names no owner of the hook that a rank is in, or another one."""
    owners = {"callback": "Asking", "module": "Model", "datamodule": "Data", "logger": "Log", "step": None}
    assert run_ranks(_owners, world_size=1) == [owners]
