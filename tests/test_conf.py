import dataclasses
import itertools

import pytest
from hydra.errors import ConfigCompositionException, MissingConfigException
from hydra.utils import instantiate
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from torch.distributed.fsdp import FSDPModule

import lightning_commopt.launch.conf_path
from lightning_commopt import CommOptDDP, CommPlan, DiLoCoPlan, Int4, PowerSGD
from lightning_commopt.compat.hydra import allow_targets
from lightning_commopt.compressors import compressor_from_config
from lightning_commopt.launch.conf_path import conf_dir
from lightning_commopt.plan.ddp import ddp_options
from lightning_commopt.train.sweep.config import ConfigError, check_config, sync_method
from support.composed import composed
from support.cross_section import sampled


def options(group):
    return sorted(file.stem for file in (conf_dir() / group).glob("*.yaml"))


@pytest.fixture(autouse=True)
def targets():
    with allow_targets(["lightning_commopt", "lightning"]):
        yield


@pytest.mark.parametrize("comm_hook", options("strategy/comm_hook"))
def test_every_comm_hook_makes_the_strategy_that_it_says(comm_hook):
    has_lists = "bucket_cap_mb_list" in ddp_options()
    config = composed(f"strategy/comm_hook={comm_hook}", f"strategy.bucket_cap_mb={'[1,25]' if has_lists else 25}")
    check_config(config)
    strategy = instantiate(config.strategy, _convert_="all")
    assert isinstance(strategy, CommOptDDP)
    assert strategy.plan.bucket_cap_mb == ((1, 25) if has_lists else 25)
    assert strategy.plan.comm_hook == compressor_from_config(dict(config.strategy.comm_hook))
    assert sync_method(config) == comm_hook.removesuffix("_rank_8")


def test_powersgd_has_all_its_options_with_their_own_defaults():
    config = composed("strategy/comm_hook=powersgd")
    assert instantiate(config.strategy, _convert_="all").plan.comm_hook == PowerSGD()
    assert set(config.strategy.comm_hook) == {"name", *(field.name for field in dataclasses.fields(PowerSGD))}


def test_commopt_has_all_options_of_a_plan_and_sets_none():
    config = composed()
    assert set(CommPlan.options()) <= set(config.strategy)
    assert instantiate(config.strategy, _convert_="all").plan.to_dict() == {}


def test_diloco_has_all_options_of_a_plan_with_their_defaults():
    config = composed("strategy=diloco")
    assert set(DiLoCoPlan.options()) <= set(config.strategy)
    assert instantiate(config.strategy, _convert_="all").plan == DiLoCoPlan()
    assert sync_method(config) == "diloco"
    config = composed("strategy=diloco", "strategy/comm_hook=int4", "strategy.sync_every=10", "strategy.inner=ddp")
    check_config(config)
    strategy = instantiate(config.strategy, _convert_="all")
    assert strategy.plan == DiLoCoPlan(sync_every=10, comm_hook=Int4(), inner=CommPlan())
    assert sync_method(config) == strategy.plan.sync_method == "diloco_int4"
    local = instantiate(composed("strategy=local_sgd", "strategy/comm_hook=int4").strategy, _convert_="all").plan
    assert local == DiLoCoPlan(comm_hook=Int4(), outer_lr=1.0, outer_momentum=0.0)


@pytest.mark.parametrize("strategy", options("strategy"))
def test_every_strategy_is_made(strategy):
    if strategy == "commopt_fsdp_int8" and not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        pytest.skip("FSDP2 takes other collectives from torch 2.9 on")
    config = composed(f"strategy={strategy}", "trainer.devices=1")
    check_config(config)
    assert isinstance(instantiate(config.strategy, _convert_="all"), Strategy)


COMBINED = list(itertools.product(*map(options, ("trainer", "callbacks", "logger"))))


@pytest.mark.parametrize(("trainer", "callbacks", "logger"), sampled(COMBINED, by_default=COMBINED[::7]))
def test_every_trainer_takes_every_callback_and_logger(trainer, callbacks, logger, tmp_path):
    config = composed(f"trainer={trainer}", f"callbacks={callbacks}", f"logger={logger}", output_dir=tmp_path)
    check_config(config)
    made_callbacks = [instantiate(callback) for callback in config.callbacks.values()]
    made_loggers = [instantiate(item) for item in config.logger.values()]
    assert all(isinstance(callback, Callback) for callback in made_callbacks)
    assert all(isinstance(item, Logger) for item in made_loggers)
    trainer = instantiate(config.trainer, _partial_=True)(
        callbacks=made_callbacks, logger=made_loggers or False, devices=1
    )
    assert trainer.loggers == made_loggers


@pytest.mark.exhaustive
@pytest.mark.parametrize("experiment", options("experiment"))
def test_every_experiment_composes_with_every_strategy_and_comm_hook(experiment):
    check_config(composed(f"experiment={experiment}", "strategy=ddp"))
    for comm_hook in options("strategy/comm_hook"):
        check_config(composed(f"experiment={experiment}", f"strategy/comm_hook={comm_hook}"))


@pytest.mark.parametrize("data", options("data"))
def test_every_data_is_made(data):
    assert isinstance(instantiate(composed(f"data={data}").data, _convert_="all"), LightningDataModule)


@pytest.mark.parametrize("model", sampled(options("model"), by_default=["digits_cnn", "gpt", "mlp"]))
def test_every_model_is_made(model):
    small = {"vit_l_32": ["model.name=resnet18"]}.get(model, [])
    if small:
        pytest.importorskip("torchvision")
    assert isinstance(instantiate(composed(f"model={model}", *small).model, _convert_="all"), LightningModule)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["strategy.bucket_cap_mb=-1"], r"bucket_cap_mb must be .* above 0.* got -1"),
        (["strategy/comm_hook=powersgd", "strategy.comm_hook.matrix_rank=0"], "matrix_rank must be .* got 0"),
        (["strategy.comm_hook=bf17"], "'bf17' is unknown; known names: none, "),
        (["strategy.static_graph=3"], "static_graph must be true, false or None, got 3"),
        (["strategy=commopt_fsdp", "strategy.plan=auto"], "plan='auto' has nothing to choose: for sharded models"),
        (["strategy=commopt_fsdp", "strategy.comm_hook=powersgd"], "'powersgd' averages whole gradients"),
        (["strategy=diloco", "strategy.overlap=30"], "overlap=30 is too large for sync_every=30"),
        (["strategy=single", "trainer.devices=2"], "one device, got trainer.devices=2"),
        (["seed=${nowhere}"], "nowhere"),
        (["seed=abc"], "seed must be an integer of at least 0, got 'abc'"),
    ],
)
def test_a_value_that_cannot_be_run_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        check_config(composed(*overrides))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("strategy.bucket_cap=1", "Key 'bucket_cap' is not in struct"),
        ("strategy.comm_hook.matrix_rank=1", "Key 'matrix_rank' is not in struct"),
        ("strategy/comm_hook=foo", "Could not find 'strategy/comm_hook/foo'"),
    ],
)
def test_a_name_that_is_unknown_is_refused(override, message):
    with pytest.raises((ConfigCompositionException, MissingConfigException)) as raised:
        composed(override)
    assert message in f"{raised.value} {raised.value.__cause__}"


def test_conf_dir_in_a_wheel_comes_first(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "lightning_commopt"
    (package / "conf").mkdir(parents=True)
    monkeypatch.setattr(lightning_commopt.launch.conf_path, "__file__", str(package / "sweep" / "conf_path.py"))
    with pytest.raises(FileNotFoundError, match="reinstall"):
        conf_dir()
    (package / "conf" / "train.yaml").touch()
    assert conf_dir() == package.resolve() / "conf"
