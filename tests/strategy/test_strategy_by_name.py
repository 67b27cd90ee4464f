"""The strategy as Lightning's registry and its CLI make it."""

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from lightning_commopt import Cast, CommPlan, DiLoCoPlan, Int8, PowerSGD
from lightning_commopt.compressors.catalog import ready_compressors
from lightning_commopt.fabric import CommOptDDP as FabricCommOptDDP
from lightning_commopt.fabric import CommOptDiLoCo as FabricCommOptDiLoCo
from lightning_commopt.plan.ddp import ddp_options
from lightning_commopt.strategy.adapters import ADAPTERS
from support.cross_section import sampled
from support.lightnings import ADAPTER, PACKAGE
from support.strategy_models import SelfFed, trainer
from support.warm_ranks import run_ranks

_HOOKS = {"": None, **{f"_{name}": compressor for name, compressor in ready_compressors().items() if name != "topk"}}
_OF_LIGHTNING = [name for name, entry in StrategyRegistry.items() if entry["strategy"] is DDPStrategy]


def test_aliases_are_those_of_ddp() -> None:
    """If it fails, a name that Lightning has for ddp is missing, for the Trainer or for Fabric."""
    assert "ddp_fork_find_unused_parameters_true" in _OF_LIGHTNING
    expected = {name.replace("ddp", f"commopt_ddp{suffix}", 1) for name in _OF_LIGHTNING for suffix in _HOOKS}
    assert {"_bf16", "_fp16", "_int8", "_int4", "_powersgd"} < _HOOKS.keys()
    registries = [import_module(f"{package}.strategies").StrategyRegistry for package in ADAPTERS]
    for registry in (*registries, STRATEGY_REGISTRY):
        # topk is an example's, which another test of this process may have registered before Lightning was imported.
        assert {name for name in registry if name.startswith("commopt_ddp") and "topk" not in name} == expected
    for alias, is_in_fabric in (
        ("commopt_model_parallel", False),
        ("commopt_diloco", True),
        ("commopt_diloco_int4", True),
    ):
        assert [alias in registry for registry in (*registries, STRATEGY_REGISTRY)] == [True, True, is_in_fabric]


@pytest.mark.parametrize("name", _OF_LIGHTNING)
@pytest.mark.parametrize("suffix", sampled(_HOOKS, by_default=["_int8"]))
def test_alias(suffix: str, name: str) -> None:
    """If it fails, strategy="commopt_ddp..." means something else than "ddp..." with this comm hook."""
    alias = name.replace("ddp", f"commopt_ddp{suffix}", 1)
    with catch_warnings():
        simplefilter("ignore")  # Lightning's, of notebooks
        by_class = {
            import_module(adapter).CommOptDDP: import_module(package)
            .Trainer(strategy=alias, logger=False, barebones=True, accelerator="cpu", devices=2)
            .strategy
            for package, adapter in ADAPTERS.items()
        }
        by_class[FabricCommOptDDP] = Fabric(strategy=alias, accelerator="cpu", devices=2).strategy
    of_lightning = StrategyRegistry.get(name)
    for cls, strategy in by_class.items():
        assert type(strategy) is cls
        assert strategy.plan.comm_hook == _HOOKS[suffix]
        assert strategy._start_method == of_lightning._start_method
        assert strategy._ddp_kwargs == of_lightning._ddp_kwargs


@pytest.mark.parametrize("package", ADAPTERS)
def test_alias_of_diloco(package: str) -> None:
    """If it fails, strategy="commopt_diloco_int8" is another strategy, or has lost its hook."""
    run = import_module(package).Trainer(
        strategy="commopt_diloco_int8", logger=False, barebones=True, accelerator="cpu", devices=2
    )
    assert type(run.strategy) is import_module(ADAPTERS[package]).CommOptDiLoCo
    of_fabric: Any = Fabric(strategy="commopt_diloco_int8", accelerator="cpu", devices=2).strategy
    assert type(of_fabric) is FabricCommOptDiLoCo
    assert run.strategy.plan == of_fabric.plan == DiLoCoPlan(comm_hook=Int8())


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_launcher_of_scripts_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, who uses us in a notebook is sent to Lightning's ddp_notebook, without our options."""
    monkeypatch.setattr(import_module("lightning.fabric.utilities.imports"), "_IS_INTERACTIVE", True)
    makers: list[Any] = [partial(import_module(package).Trainer, logger=False) for package in ADAPTERS]
    for make in (*makers, Fabric):
        for alias in ("commopt_ddp", "commopt_ddp_spawn"):
            with pytest.raises(Exception, match="use strategy='commopt_ddp_notebook'"):
                make(strategy=alias, accelerator="cpu", devices=2)
        make(strategy="commopt_ddp_notebook", accelerator="cpu", devices=2)


def _fit_by_alias() -> Any:
    run = trainer("commopt_ddp_bf16")
    run.fit(SelfFed())
    strategy: Any = run.strategy
    assert type(strategy) is import_module(ADAPTER).CommOptDDP
    return strategy.wire_bytes


def test_alias_trains() -> None:
    """If it fails, an alias gives a strategy without its hook."""
    expected = 6 * sum(parameter.numel() * 2 for parameter in SelfFed().parameters())
    assert run_ranks(_fit_by_alias) == [expected] * 2


def _cli(arguments: list[str], run: bool = False, package: str = PACKAGE) -> Any:
    pytest.importorskip("jsonargparse")
    cli = import_module(f"{package}.cli")
    model = SelfFed if package == PACKAGE else import_module(f"{package}.demos.boring_classes").BoringModel

    quiet = {
        "accelerator": "cpu",
        "devices": 2,
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
    }
    return cli.LightningCLI(
        model,
        args=arguments,
        run=run,
        save_config_callback=None,
        trainer_defaults={**quiet, "enable_model_summary": False, "max_epochs": 1},
    )


_ARGUMENTS = [
    "--trainer.strategy=lightning_commopt.CommOptDDP",
    "--trainer.strategy.bucket_cap_mb=100",
    "--trainer.strategy.comm_hook=bf16",
]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("package", ADAPTERS)
def test_cli_arguments(package: str) -> None:
    """If it fails, LightningCLI cannot set the options of the strategy."""
    strategy = _cli(_ARGUMENTS, package=package).trainer.strategy
    assert type(strategy) is import_module(ADAPTERS[package]).CommOptDDP
    assert strategy.plan.bucket_cap_mb == 100
    assert strategy.plan.comm_hook == Cast(dtype=torch.bfloat16)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("bucket_cap_mb", ["3.5", "[1, 2.5]"])
def test_cli_yaml(bucket_cap_mb: str, tmp_path: Path) -> None:
    """If it fails, a YAML file of LightningCLI cannot set the options of the strategy."""
    if bucket_cap_mb.startswith("[") and "bucket_cap_mb_list" not in ddp_options():
        pytest.skip("this torch takes no list of buckets")
    config = tmp_path / "config.yaml"
    config.write_text(
        f"""
        trainer:
          strategy:
            class_path: lightning_commopt.CommOptDDP
            init_args:
              static_graph: true
              bucket_cap_mb: {bucket_cap_mb}
              comm_hook: {{name: powersgd, matrix_rank: 2, start_step: 5}}
        """
    )
    plan = _cli([f"--config={config}"]).trainer.strategy.plan
    assert plan.static_graph is True
    assert plan.bucket_cap_mb == (3.5 if bucket_cap_mb == "3.5" else (1, 2.5))
    assert plan.comm_hook == PowerSGD(matrix_rank=2, start_step=5)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("package", ADAPTERS)
def test_cli_makes_diloco(package: str, tmp_path: Path) -> None:
    """If it fails, LightningCLI cannot set the options of DiLoCo, from its command line or from YAML."""
    ours = import_module(ADAPTERS[package]).CommOptDiLoCo
    options = ["sync_every=10", "fragments=2", "comm_hook=int8", "outer_lr=0.5", "inner=ddp"]
    given = [f"--trainer.strategy.{option}" for option in options]
    strategy = _cli(["--trainer.strategy=lightning_commopt.CommOptDiLoCo", *given], package=package).trainer.strategy
    plan = DiLoCoPlan(sync_every=10, fragments=2, comm_hook=Int8(), outer_lr=0.5, inner=CommPlan())
    assert type(strategy) is ours
    assert strategy.plan == plan
    config = tmp_path / "config.yaml"
    config.write_text(
        """
        trainer:
          strategy:
            class_path: lightning_commopt.CommOptDiLoCo
            init_args: {sync_every: 10, fragments: 2, comm_hook: {name: int8}, outer_lr: 0.5, inner: {comm_hook: bf16}}
        """
    )
    strategy = _cli([f"--config={config}"], package=package).trainer.strategy
    assert type(strategy) is ours
    assert strategy.plan == plan.replaced(inner={"comm_hook": "bf16"})


def _fit_by_cli() -> int:
    return _cli(["fit", *_ARGUMENTS], run=True).trainer.strategy.wire_bytes


@pytest.mark.exhaustive
def test_cli_trains() -> None:
    """If it fails, a strategy that LightningCLI made does not train."""
    expected = 3 * sum(parameter.numel() * 2 for parameter in SelfFed().parameters())
    assert run_ranks(_fit_by_cli) == [expected] * 2
