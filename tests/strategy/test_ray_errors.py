"""What a wrong use of Ray is told, where Ray itself is not needed; ``tests/programs`` trains with Ray."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

from lightning_commopt.strategy.adapters import BASES, adapter_for
from support.lightnings import PACKAGE, LightningEnvironment, MisconfigurationException, Trainer
from support.ranks import run_ranks
from support.strategy_models import trainer


@pytest.mark.parametrize(
    ("package", "of_train", "reason"),
    [
        (None, None, "import of ray halted"),
        ("__version__ = '2.9.3'", None, "this is Ray 2.9.3"),
        ("__version__ = '2.60.0'", "raise ImportError('no pandas')", "no pandas"),
    ],
)
def test_without_a_ray_that_fits(package: str | None, of_train: str | None, reason: str, tmp_path: Path) -> None:
    """If it fails, a user without Ray, with an old one or without its part for training gets to know no cure."""
    for path, text in ((tmp_path / "ray", package), (tmp_path / "ray" / "train", of_train)):
        if text is not None:
            path.mkdir()
            (path / "__init__.py").write_text(text)
    others = {name: module for name, module in sys.modules.items() if name.partition(".")[0] != "ray"}
    others.pop("lightning_commopt.ray", None)
    hidden = {} if package else {"ray": None}
    with (
        mock.patch.dict(sys.modules, others | hidden, clear=True),
        mock.patch.object(sys, "path", [str(tmp_path), *sys.path]),
        pytest.raises(ImportError) as raised,
    ):
        import_module("lightning_commopt.ray")
    told = str(raised.value)
    assert told.startswith("lightning_commopt.ray needs Ray Train 2.51 or newer: pip install 'lightning-commopt[ray]'")
    assert reason in told


def _environment() -> Any:
    return type("RayLightningEnvironment", (LightningEnvironment,), {"__module__": "ray.train.lightning"})()


@pytest.mark.parametrize("name", sorted(BASES))
def test_the_environment_of_ray(name: str) -> None:
    """If it fails, Ray's own error is all that shows: it names three classes of Ray."""
    strategy = adapter_for(PACKAGE, name)()
    with pytest.raises(MisconfigurationException, match=rf"lightning_commopt\.ray\.{name}"):
        Trainer(accelerator="cpu", devices=2, strategy=strategy, plugins=[_environment()], logger=False)


def _without_the_environment() -> str:
    sys.modules["ray.train"] = ModuleType("ray.train")
    strategy = adapter_for(PACKAGE)()
    with pytest.raises(MisconfigurationException) as raised:
        trainer(strategy, devices=1)
    return str(raised.value)


def test_a_worker_of_ray_without_its_environment() -> None:
    """If it fails, each worker trains alone, or the message blames an earlier training run."""
    for message in run_ranks(_without_the_environment):
        assert "lightning_commopt.ray.CommOptDDP" in message
