"""Compressors by name: how names are spelled, and compressors that are somebody else's."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import instantiate

from lightning_commopt.compat.hydra import allow_targets, packages_of_targets
from lightning_commopt.compressors import (
    AllReduce,
    Cast,
    Compressor,
    Int8,
    PowerSGD,
    compressor_from_config,
    compressor_names,
    compressor_to_config,
    register_compressor,
    registry,
)
from lightning_commopt.compressors.registry import compressor_name, names_with_option
from lightning_commopt.plan import CommPlan, OptionError
from lightning_commopt.sync.checkpoint import SavedState
from lightning_commopt.sync.state import CheckpointError
from support.every_compressor import COMPRESSORS
from support.own_compressors import Averages


@dataclass(frozen=True, kw_only=True)
class Mine(Averages):
    """With an option."""

    size: Any = 1


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_BUCKET_ENTRIES", dict(registry._BUCKET_ENTRIES))


@pytest.mark.parametrize(
    ("written", "compressor"),
    [
        *((name, PowerSGD()) for name in ("powersgd", "powerSGD", "PowerSGD", "power_sgd", "POWER-SGD")),
        *((name, Cast(dtype=torch.bfloat16)) for name in ("bf16", "BF16", "bfloat16")),
        *((name, Cast(dtype=torch.float16)) for name in ("fp16", "FP16", "float16", "half")),
        ("Int8", Int8()),
        ("allreduce", AllReduce()),
        ("None", None),
    ],
)
def test_spelling(written: str, compressor: Compressor | None) -> None:
    """If it fails, a name is refused that has one meaning only, or a plan keeps it as it was written."""
    assert compressor_from_config(written) == compressor
    assert CommPlan(comm_hook=written) == CommPlan(comm_hook=compressor)  # type: ignore[arg-type]
    if compressor is not None:
        assert compressor_to_config(compressor)["name"] in compressor_names()


@pytest.mark.parametrize("compressor", COMPRESSORS.values(), ids=COMPRESSORS)
def test_every_compressor_has_a_name(compressor: Compressor) -> None:
    """If it fails, a compressor cannot be written in YAML, or is another one when read."""
    config = compressor_to_config(compressor)
    assert config["name"] in compressor_names()
    assert compressor_from_config(json.loads(json.dumps(config))) == compressor


def test_options_by_name() -> None:
    """If it fails, an option that is given to the strategy is not led back to its compressor."""
    assert names_with_option("warm_start") == ["low_rank", "powersgd"]


@pytest.mark.usefixtures("own_registry")
def test_own_compressor_by_name() -> None:
    """If it fails, a compressor that a user has registered cannot be named in a configuration."""
    register_compressor("my_own", aliases=("mine",))(Mine)
    assert "my_own" in compressor_names()
    assert compressor_from_config({"name": "MyOwn", "size": 3}) == compressor_from_config({"name": "mine", "size": 3})
    assert compressor_to_config(Mine(size=3)) == {"name": "my_own", "size": 3}
    assert compressor_name(Mine()) == "my_own"
    register_compressor("my_own", aliases=("mine",))(Mine)  # a module that is loaded again

    class Other(Mine):
        pass

    with pytest.raises(ValueError, match=r"is already the name of .*\.Mine"):
        register_compressor("my_own")(Other)


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize("name", ["PowerSGD", "half", "None", "my.own", ""])
def test_a_name_that_is_taken(name: str) -> None:
    """If it fails, a name of ours means something else in one project."""
    with pytest.raises(ValueError, match=r"is already the name|must not be"):
        register_compressor(name)(Mine)
    assert compressor_from_config("powersgd") == PowerSGD()


def test_own_compressor_by_import_path() -> None:
    """If it fails, a compressor that nobody has registered cannot be written down, and read again."""
    config = compressor_to_config(Mine(size=2))
    assert config == {"name": f"{__name__}.Mine", "size": 2}
    assert compressor_from_config(config) == Mine(size=2)
    assert CommPlan.from_json(CommPlan(comm_hook=Mine(size=2)).to_json()).comm_hook == Mine(size=2)
    assert compressor_name(Mine()) == "Mine"


def test_own_compressor_by_target() -> None:
    """If it fails, a compressor that Hydra makes from the strategy's configuration is not taken."""
    config = {"_target_": "lightning_commopt.CommOptDDP", "comm_hook": {"_target_": f"{__name__}.Mine", "size": 2}}
    with allow_targets(packages_of_targets(config)):
        assert instantiate(config).plan.comm_hook == Mine(size=2)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module.TopK", "cannot be imported .ModuleNotFoundError"),
        (f"{__name__}.TopK", "cannot be imported .AttributeError"),
        ("json.dumps", "must be a subclass of Compressor"),
        ("..TopK", "cannot be imported"),
    ],
)
def test_a_bad_import_path(path: str, message: str) -> None:
    """If it fails, a wrong path ends in an error that does not name it."""
    with pytest.raises(OptionError, match=message):
        CommPlan(comm_hook=path)  # type: ignore[arg-type]


def test_a_checkpoint_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, whoever writes a checkpoint decides what is imported where it is read."""
    (tmp_path / "never_imported.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    description = json.dumps({"name": "error_feedback", "inner": "never_imported.TopK"})
    for kind in ("buckets", "units"):
        saved = SavedState(kind=kind, compressor=description, num_syncs=1, num_ranks=1, load=lambda rank: {})
        with pytest.raises(CheckpointError, match="its compressor is not registered"):
            saved.of_rank(0, 1, PowerSGD())
    assert "never_imported" not in sys.modules
    assert compressor_from_config(f"{__name__}.Mine") == Mine()


def test_what_cannot_be_written() -> None:
    """If it fails, a configuration is written that nothing can read."""

    @dataclass(frozen=True, kw_only=True)
    class Local(Mine):
        pass

    with pytest.raises(ValueError, match="has no import path"):
        compressor_to_config(Local())
    with pytest.raises(ValueError, match="cannot be written as JSON"):
        compressor_to_config(Mine(size=torch.float32))
