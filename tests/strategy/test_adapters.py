"""The Trainers of both packages take the strategy, and train the same."""

import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_commopt.callbacks import CommTimeMonitor, SpeedMonitor
from lightning_commopt.plan import CommPlan
from lightning_commopt.strategy.adapters import ADAPTERS
from support.cross_section import sampled
from support.warm_ranks import run_ranks

_OTHER = {"lightning.pytorch": "pytorch_lightning", "pytorch_lightning": "lightning.pytorch"}


def _fit(package: str, strategy: Any, *callbacks: Any, **options: Any) -> tuple[list[Tensor], Any]:
    """Trains a package's own BoringModel on two ranks, and returns its parameters and its Trainer."""
    lightning = import_module(package)
    lightning.seed_everything(5)
    model = import_module(f"{package}.demos.boring_classes").BoringModel()
    model.layer = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 2))
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_steps": 5}
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        callbacks=list(callbacks),
        limit_val_batches=0,
        **{"enable_checkpointing": False, **quiet, **options},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's own
        trainer.fit(model)
    return [parameter.detach().clone() for parameter in model.parameters()], trainer


def _equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def _trained_in_each_package() -> list[list[bool]]:
    stock, _ = _fit("pytorch_lightning", "ddp")
    equal = []
    for comm_hook in (None, "int8"):
        trained = []
        for package, adapter in ADAPTERS.items():
            parameters, trainer = _fit(package, import_module(adapter).CommOptDDP(comm_hook=comm_hook))
            assert (trainer.strategy.wire_bytes > 0) == (trainer.strategy.gradient_sync.num_syncs == 0)
            trained.append(parameters)
        equal += [[_equal(*trained), _equal(trained[0], stock)]]
    return equal


def test_both_packages_train_to_the_same_bits() -> None:
    """If it fails, one of the two packages is synchronized in another way."""
    assert run_ranks(_trained_in_each_package) == [[[True, True], [True, False]]] * 2


def _handed_to_the_other(package: str) -> None:
    own, _ = _fit(package, import_module(ADAPTERS[package]).CommOptDDP(comm_hook="powersgd"))
    strategy = import_module(ADAPTERS[_OTHER[package]]).CommOptDDP(comm_hook="bf16", bucket_cap_mb=1)
    strategy.apply_plan(CommPlan.from_dict({"comm_hook": "powersgd"}))  # before there is a Trainer
    speed, comm_time = SpeedMonitor(num_warmup_steps=1), CommTimeMonitor(num_warmup_steps=1, save_records=False)
    trained, trainer = _fit(package, strategy, speed, comm_time)
    assert trainer.strategy is strategy
    assert type(strategy) is import_module(ADAPTERS[package]).CommOptDDP
    assert isinstance(strategy, import_module(f"{package}.strategies").DDPStrategy)
    assert strategy._ddp_kwargs == strategy.plan.ddp_kwargs()
    assert strategy.wire_bytes > 0
    assert speed.num_steps == 4
    assert comm_time.summary["gradient_bytes"] == 4 * sum(each.numel() for each in trained)
    assert _equal(own, trained)


@pytest.mark.parametrize("package", sampled(ADAPTERS, by_default=["pytorch_lightning"]))
def test_a_strategy_goes_over_to_the_package_of_its_trainer(package: str) -> None:
    """If it fails, `lightning_commopt.CommOptDDP` depends on which package was imported first."""
    run_ranks(_handed_to_the_other, package)


@pytest.mark.parametrize("package", ADAPTERS)
def test_a_derived_strategy_does_not(package: str) -> None:
    """If it fails, what a user's class overrides is lost without a word."""

    class Derived(import_module(ADAPTERS[_OTHER[package]]).CommOptDDP):  # type: ignore[misc]
        pass

    with pytest.raises(Exception, match=f"derived from {ADAPTERS[package]}.CommOptDDP"):
        import_module(package).Trainer(accelerator="cpu", devices=2, strategy=Derived(), logger=False)


_ALONE = """
import sys
from importlib import import_module

package, missing = sys.argv[1], sys.argv[2].split(",")


class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Missing())
from lightning_commopt import CommOptDDP, CommPlan, OptionError, PowerSGD
from lightning_commopt.callbacks import CommTimeMonitor, CUDAProfilerWindow, NVTXRanges, RunRecorder, SpeedMonitor

lightning = import_module(package)
callbacks = CommTimeMonitor(), NVTXRanges(), SpeedMonitor(), RunRecorder()
assert all(isinstance(callback, lightning.Callback) for callback in callbacks)
assert issubclass(OptionError, import_module(f"{package}.utilities.exceptions").MisconfigurationException)
quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
if __name__ == "__main__":
    for strategy in ("commopt_ddp_bf16_fork", CommOptDDP(comm_hook="bf16", start_method="fork")):
        trainer = lightning.Trainer(
            accelerator="cpu", devices=2, strategy=strategy, callbacks=list(callbacks), max_steps=2, **quiet
        )
        assert type(trainer.strategy) is CommOptDDP
        trainer.fit(import_module(f"{package}.demos.boring_classes").BoringModel())
    assert not [name for name in sys.modules if name.partition(".")[0] in missing]
"""


@pytest.mark.parametrize(
    ("package", "missing"),
    [("lightning.pytorch", "pytorch_lightning,lightning_fabric"), ("pytorch_lightning", "lightning")],
)
@pytest.mark.exhaustive
def test_one_package_is_enough(package: str, missing: str, tmp_path: Path) -> None:
    """If it fails, a project that has only one of the packages cannot use this one."""
    script = tmp_path / "alone.py"
    script.write_text(_ALONE)
    command = [sys.executable, "-W", "ignore", str(script), package, missing]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
