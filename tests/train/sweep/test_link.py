"""What `link` and `hosts` say of a run, and which values are refused."""

import copy
from collections.abc import Callable
from functools import cache

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from lightning_commopt.launch.environment import LAB_RANK_VARIABLE
from lightning_commopt.train.sweep import resolvers
from lightning_commopt.train.sweep.config import ConfigError, check_config, link_note, spread_over_hosts
from support.composed import composed as composed_anywhere
from support.cross_section import sampled
from support.refusals import one_by_one, refusals


@pytest.fixture(autouse=True)
def machine_has_a_lab(monkeypatch):
    monkeypatch.setattr(resolvers, "why_no_lab", lambda: None)


def composed(*overrides: str) -> DictConfig:
    return composed_anywhere("trainer.accelerator=cpu", *overrides)


@cache
def defaults() -> DictConfig:
    return composed()


def checked(overrides: str) -> None:
    config = copy.deepcopy(defaults())  # composing it anew with each override takes a hundred times as long
    for override in OverridesParser.create().parse_overrides(overrides.split()):
        OmegaConf.update(config, override.key_or_group, override.value(), force_add=override.is_add())
    check_config(config)


REFUSED = [
    *("link=fast", "link=1000", "link=1gbit ranks=4 hosts=3", "link=1gbit ranks=4 hosts=8", "link=1gbit hosts=0"),
    *("link=1gbit hosts=two", "link=1gbit ranks=300", "hosts=2", "link=1gbit trainer.accelerator=gpu"),
    *("link=1gbit trainer.accelerator=auto", "link=1gbit trainer.devices=auto", "link=1gbit trainer.devices=[0,1]"),
    *("link=1gbit trainer.num_nodes=-1", "repeat=2", "ranks=0", "ranks=-1", "trainer.num_nodes=0"),
    # A run that is all warm-up would end without the rate that it was made for.
    *("trainer.max_steps=10", "trainer.max_steps=1 callbacks.speed.num_warmup_steps=1"),
    *("+trainer.strategy=ddp", "+trainer.default_root_dir=here"),
    *("num_warmup_steps=-1", "num_warmup_steps=2.5", "trainer.devices=two", "ranks='0,x'"),
]


def test_a_value_that_cannot_be_run_is_refused(golden: Callable[[str, str], None]) -> None:
    golden("refused_values", refusals(one_by_one(checked, overrides=REFUSED), ConfigError))


@pytest.mark.parametrize("devices", ["auto", "'-1'", "'0,'", "[0,1]"])
def test_the_devices_that_a_trainer_takes_are_not(devices):
    check_config(composed(f"trainer.devices={devices}", "trainer.accelerator=gpu"))


@pytest.mark.parametrize("variable", sampled(["RANK", "LOCAL_RANK"], by_default=["LOCAL_RANK"]))
def test_a_rank_of_torchrun_opens_no_lab(monkeypatch, variable):
    monkeypatch.setenv(variable, "0")
    with pytest.raises(ConfigError, match=f"without torchrun, in one process .{variable} is set"):
        check_config(composed("link=1gbit"))
    monkeypatch.setenv(LAB_RANK_VARIABLE, "1")
    check_config(composed("link=1gbit"))


def test_without_a_lab_the_note_has_the_reason(monkeypatch):
    monkeypatch.setattr(resolvers, "why_no_lab", lambda: "the network lab needs Linux, this is plan9")
    check_config(composed())
    with pytest.raises(ConfigError, match="link=1gbit: the network lab needs Linux, this is plan9"):
        check_config(composed("link=1gbit"))


@pytest.mark.parametrize(
    ("overrides", "devices", "num_nodes"),
    [
        (["link=1gbit", "ranks=1"], 1, 1),
        (["link=1gbit", "ranks=4"], 1, 4),
        (["link=1gbit", "ranks=4", "hosts=2"], 2, 2),
        (["link=1gbit", "ranks=1", "hosts=2"], 1, 1),
        (["link=1gbit", "ranks=2", "trainer.num_nodes=3", "hosts=2"], 3, 2),
        (["link=unlimited", "strategy=single", "trainer.devices=1", "ranks=8"], 1, 1),
        (["ranks=3"], 3, 1),
    ],
)
def test_hosts_are_the_nodes_of_the_trainer(overrides, devices, num_nodes):
    """If it fails, ranks meet another number of peers than the configuration that they record says."""
    config = composed(*overrides, "data.batch_size=${trainer.num_nodes}")
    before = OmegaConf.to_yaml(config)
    check_config(config)
    trained = spread_over_hosts(config)
    assert (trained.trainer.devices, trained.trainer.num_nodes) == (devices, num_nodes)
    assert trained.data.batch_size == num_nodes, "what depends on them follows"
    assert spread_over_hosts(trained) == trained
    assert OmegaConf.to_yaml(config) == before


class TestTheQuickstart:
    """If it fails, the first command ends in "stay with it", or in an error where there is no lab."""

    QUICKSTART = "experiment=quickstart"

    def test_has_two_hosts_with_a_slow_link(self):
        config = composed(self.QUICKSTART)
        check_config(config)
        assert config.link == "100mbit"
        assert (spread_over_hosts(config).trainer.devices, spread_over_hosts(config).trainer.num_nodes) == (1, 2)
        assert "link=100mbit: the ranks run on 2 hosts" in str(link_note(config))

    def test_says_why_where_there_is_no_lab(self, monkeypatch):
        monkeypatch.setattr(resolvers, "why_no_lab", lambda: "the network lab needs Linux, this is plan9")
        config = composed(self.QUICKSTART)
        check_config(config)
        assert config.link is None
        assert str(link_note(config)).endswith("the network lab needs Linux, this is plan9")

    @pytest.mark.parametrize(
        ("overrides", "variables"),
        [
            (["link=null"], {}),
            (["trainer.accelerator=gpu"], {}),
            ([], {"RANK": "0", "LOCAL_RANK": "0"}),
            ([], {"SLURM_PROCID": "1"}),
        ],
    )
    def test_has_no_link_that_is_not_wanted_or_under_another_launcher(self, monkeypatch, overrides, variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        config = composed(self.QUICKSTART, *overrides)
        check_config(config)
        assert config.link is None
        assert link_note(config) is None

    def test_keeps_its_link_in_a_rank_of_the_lab(self, monkeypatch):
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv(LAB_RANK_VARIABLE, "1")
        monkeypatch.setattr(resolvers, "why_no_lab", lambda: "not within a lab")
        assert composed(self.QUICKSTART).link == "100mbit"

    def test_says_nothing_of_a_link_that_was_asked_for(self):
        assert link_note(composed(self.QUICKSTART, "link=1gbit")) is None
