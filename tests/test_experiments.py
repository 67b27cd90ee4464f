"""Every job of every experiment composes, is valid, and is what the experiment's first lines say."""

import itertools

import pytest
import yaml
from hydra.utils import instantiate
from omegaconf import OmegaConf

from lightning_commopt.compat.hydra import allow_targets
from lightning_commopt.launch.conf_path import conf_dir
from lightning_commopt.plan.ddp import DDP_OPTION_SINCE
from lightning_commopt.train.sweep.config import ConfigError, check_config, spread_over_hosts
from lightning_commopt.train.sweep.resolvers import divide, multiply
from support.composed import composed
from support.cross_section import sampled

EXPERIMENTS = sorted(file.stem for file in (conf_dir() / "experiment").glob("*.yaml"))
CUMULATIVE = ("one_bucket", "static_graph", "bucket_view", "bf16", "several_buckets")


def jobs(experiment):
    """Returns the overrides of each job of an experiment, as Hydra's sweeper makes them."""
    params = yaml.safe_load((conf_dir() / "experiment" / f"{experiment}.yaml").read_text())["hydra"]["sweeper"][
        "params"
    ]
    lists = [[f"{name}={value}" for value in str(values).split(",")] for name, values in params.items()]
    return [[f"experiment={experiment}", *own] for own in itertools.product(*lists)]


def strategy_of(config):
    values = OmegaConf.to_container(config.strategy, resolve=True)
    assert isinstance(values, dict)
    return {name: value for name, value in values.items() if value is not None}


@pytest.mark.parametrize("experiment", sampled(EXPERIMENTS, by_default=["diloco", "quickstart", "scaling"]))
def test_every_job_of_an_experiment_can_be_run(experiment):
    for overrides in jobs(experiment):
        config = composed(*overrides)
        check_config(config)
        with allow_targets(["lightning_commopt", "lightning"]):
            instantiate(config.strategy, _convert_="all")
    assert len(jobs(experiment)) > 1


@pytest.mark.parametrize("experiment", sampled(["four_methods", "ladder", "scaling"], ["scaling"]))
def test_two_hosts_are_enough_for_every_job_of_an_experiment(experiment, monkeypatch):
    """Also for those of one process, which have one host."""
    monkeypatch.setattr("lightning_commopt.train.sweep.resolvers.why_no_lab", lambda: None)
    for overrides in jobs(experiment):
        check_config(composed(*overrides, "link=1gbit", "hosts=2", "trainer.accelerator=cpu"))


def test_fsdp_of_a_model_that_does_not_shard_itself_is_an_error_before_anything_starts():
    boring = "lightning.pytorch.demos.boring_classes.BoringModel"
    config = composed("strategy=fsdp", f"model._target_={boring}")
    with pytest.raises(ConfigError, match=r"strategy=fsdp needs a model with configure_model, .*, got .*BoringModel"):
        check_config(config)


@pytest.mark.parametrize("target", ["torchvision.models.get_model", "no.such.Model", "null"])
def test_what_fsdp_is_to_shard_is_left_to_who_makes_it_where_it_is_no_class(target):
    check_config(composed("strategy=fsdp", f"model._target_={target}"))


@pytest.mark.parametrize("options", [[], ["link=1gbit", "hosts=2"]])
def test_fsdp_shards_over_the_ranks_of_all_nodes(options, monkeypatch):
    monkeypatch.setattr("lightning_commopt.train.sweep.resolvers.why_no_lab", lambda: None)
    config = composed("strategy=fsdp", "ranks=4", "trainer.accelerator=cpu", *options)
    assert spread_over_hosts(config).strategy.data_parallel_size == 4


def test_every_variant_of_the_ladder_adds_to_the_one_before():
    variants = [strategy_of(composed("experiment=ladder", f"variant={variant}", "ranks=4")) for variant in CUMULATIVE]
    changes = [
        {name: value for name, value in after.items() if before.get(name) != value}
        for before, after in itertools.pairwise([strategy_of(composed("experiment=ladder")), *variants])
    ]
    assert changes == [
        {"bucket_cap_mb": 2000},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"comm_hook": {"name": "bf16", "accumulate": None}},
        {"bucket_cap_mb": 100},
    ]


@pytest.mark.parametrize("variant", sampled(["one_process", "ddp_one_process"], by_default=["one_process"]))
def test_variants_of_one_process_have_one_however_many_there_are_else(variant):
    assert composed("experiment=ladder", f"variant={variant}", "ranks=4").trainer.devices == 1
    assert composed("experiment=ladder", "variant=powersgd", "ranks=4").trainer.devices == 4


@pytest.mark.parametrize("num_batches", [1, 2, 4])
def test_accumulation_keeps_the_samples_of_a_step(num_batches):
    config = composed("experiment=ladder_accumulation", f"trainer.accumulate_grad_batches={num_batches}")
    assert config.data.batch_size * num_batches == config.samples_of_a_rank


@pytest.mark.exhaustive
def test_four_methods_are_28_runs_with_as_many_samples_in_a_step():
    configs = [composed(*overrides) for overrides in jobs("four_methods")]
    runs = {(config.model.size, config.strategy._target_, config.trainer.devices) for config in configs}
    assert len(runs) == 28
    assert {config.data.batch_size * config.trainer.devices for config in configs} == {1024}


def test_a_batch_that_ranks_cannot_share_is_an_error():
    config = composed("experiment=four_methods", "method=ddp", "ranks=3")
    with pytest.raises(ConfigError, match="1024 cannot be divided by 3 x 1"):
        check_config(config)


@pytest.mark.parametrize("values", [(10, 3), (10, 0), (10, 2.5), (True, 1)])
def test_divide_refuses_a_remainder_and_what_is_no_count(values):
    with pytest.raises(ValueError, match=r"cannot be divided|integers above 0"):
        divide(*values)


def test_multiply_refuses_what_is_no_count():
    with pytest.raises(ValueError, match=r"commopt\.multiply takes integers above 0, got 'auto'"):
        multiply("auto", 2)  # type: ignore[arg-type]


def test_newer_options_are_left_alone_by_all_experiments():
    """They would be errors in older torch."""
    for experiment in EXPERIMENTS:
        text = (conf_dir() / "experiment" / f"{experiment}.yaml").read_text()
        assert not [name for name in DDP_OPTION_SINCE if name in text]
