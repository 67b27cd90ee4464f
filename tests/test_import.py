"""What importing the package does, and what it leaves to later: registering names with Lightning when that comes."""

import importlib
import importlib.util
import logging
import pickle
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from lightning_commopt.compat.import_hook import call_after_import

_NAMES = """
trainers = lightning.pytorch.strategies.StrategyRegistry.get("commopt_ddp_bf16")
of_fabric = lightning.fabric.strategies.STRATEGY_REGISTRY.get("commopt_ddp_bf16")
assert type(trainers) is lightning_commopt.CommOptDDP, type(trainers)
assert type(of_fabric) is lightning_commopt.fabric.CommOptDDP, type(of_fabric)
assert trainers.plan == of_fabric.plan == lightning_commopt.CommPlan(comm_hook="bf16")
"""
_ORDERS = {
    "ours first": """
import sys, lightning_commopt
assert not {"torch", "lightning", "torchmetrics", "hydra", "numpy"} & sys.modules.keys(), sorted(sys.modules)
import lightning
assert not [name for name in sys.modules if name.startswith("lightning_commopt.sync")], "registering loads all of it"
""",
    "Lightning first": "import lightning.pytorch, lightning_commopt, importlib; importlib.reload(lightning_commopt)",
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("order", _ORDERS)
def test_names_are_registered_in_any_order(order: str) -> None:
    """If it fails, strategy="commopt_ddp_bf16" is unknown, or the import of this package waits for torch."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", _ORDERS[order] + "\n" + _NAMES], check=True, timeout=120)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that nobody has imported; of another name in every test."""
    name = f"imported_later_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


@pytest.fixture
def called(module: str) -> list[ModuleType]:
    """The modules that the function was called with."""
    calls: list[ModuleType] = []
    call_after_import(module, calls.append)
    return calls


def test_called_after_the_import(module: str, called: list[ModuleType]) -> None:
    """If it fails, the function runs too early or too often, or the module keeps a loader that is not its own."""
    assert called == []
    imported = importlib.import_module(module)
    importlib.import_module(module)
    assert called == [imported]
    assert imported.VALUE == 1
    assert type(imported.__loader__) is type(importlib.import_module("support.ranks").__loader__)
    assert imported.__spec__ is not None
    assert imported.__spec__.loader is imported.__loader__
    assert pickle.loads(pickle.dumps(imported.__spec__)).name == module


def test_called_at_once_if_imported_already(module: str) -> None:
    """If it fails, it matters which package is imported first."""
    imported = importlib.import_module(module)
    calls: list[ModuleType] = []
    call_after_import(module, calls.append)
    assert calls == [imported]


def test_called_again_after_a_reload(module: str, called: list[ModuleType]) -> None:
    """If it fails, a registry that is new after a reload lacks our names."""
    imported = importlib.import_module(module)
    importlib.reload(imported)
    assert called == [imported, imported]


def test_looking_for_a_module_does_not_import_it(module: str, called: list[ModuleType]) -> None:
    """If it fails, tools that look for modules see a loader that cannot tell the source."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.loader.get_source(module) == "VALUE = 1\n"  # type: ignore[union-attr]
    assert pickle.loads(pickle.dumps(spec)).origin == spec.origin
    assert not called
    importlib.import_module(module)
    assert len(called) == 1


@pytest.mark.parametrize("is_first", [True, False])
def test_other_finders(module: str, called: list[ModuleType], is_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, the package does not get on with others that change how modules are imported."""

    class Other:
        """Asks all finders, ours included, as other import hooks do."""

        is_asking = False

        def find_spec(self, fullname: str, path: object, target: object = None) -> object:
            if self.is_asking:
                return None
            self.is_asking = True
            try:
                return importlib.util.find_spec(fullname)
            finally:
                self.is_asking = False

    monkeypatch.setattr(sys, "meta_path", [Other(), *sys.meta_path] if is_first else [*sys.meta_path, Other()])
    assert importlib.import_module(module).VALUE == 1
    assert set(map(id, called)) == {id(sys.modules[module])}


def test_an_error_does_not_break_the_import(module: str, caplog: pytest.LogCaptureFixture) -> None:
    """If it fails, a fault of ours keeps a user from importing Lightning."""

    def fail(imported: ModuleType) -> None:
        raise RuntimeError("broken on purpose")

    call_after_import(module, fail)
    with caplog.at_level(logging.WARNING):
        assert importlib.import_module(module).VALUE == 1
    assert "broken on purpose" in caplog.text


def test_an_error_of_the_module_itself_comes_through(module: str, called: list[ModuleType], tmp_path: Path) -> None:
    """If it fails, an import error of Lightning is hidden."""
    (tmp_path / f"{module}.py").write_text("raise ArithmeticError('its own')\n")
    with pytest.raises(ArithmeticError, match="its own"):
        importlib.import_module(module)
    assert called == []
    assert module not in sys.modules


def test_a_module_that_there_is_not() -> None:
    """If it fails, a package that is not installed looks as if it were broken."""
    call_after_import("commopt_no_such_module", print)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("commopt_no_such_module")
