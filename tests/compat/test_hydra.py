from importlib.metadata import version

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf
from packaging.version import Version

from lightning_commopt.compat.hydra import allow_targets, packages_of_targets, register_resolver, store_config


def test_targets_of_installed_packages_are_made():
    """If it fails, commopt-train refuses a user's own model under Hydra 1.4, or warns of each of its own classes."""
    config = {"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 3}
    with allow_targets(["lightning_commopt"]), allow_targets(packages_of_targets({"model": config})):
        assert instantiate(config).out_features == 3


@pytest.mark.skipif(Version(version("hydra-core")) < Version("1.3.4"), reason="Hydra makes whatever it is told")
def test_targets_of_the_standard_library_are_refused():
    """Either by Hydra's list of what is dangerous, since 1.3.4, or because nobody allows it."""
    config = {"_target_": "os.system", "_args_": ["true"]}
    with allow_targets(["lightning_commopt"]), allow_targets(packages_of_targets(config)):  # noqa: SIM117
        with pytest.raises(Exception, match=r"os\.system"):
            instantiate(config)


def test_packages_of_targets_looks_everywhere():
    config = OmegaConf.create(
        {
            "callbacks": {"one": {"_target_": "mine.Callback"}},
            "strategy": {"_target_": "lightning_commopt.CommOptDDP", "comm_hook": {"_target_": "mine.topk.TopK"}},
            "layers": [[{"_target_": "torch.nn.Tanh"}], {"_target_": "builtins.dict"}],
            "none": None,
        }
    )
    assert packages_of_targets(OmegaConf.to_container(config)) == ["lightning_commopt", "mine", "torch"]


def test_what_is_registered_twice_is_replaced_without_a_warning():
    """If it fails, every sweep of a process after the first one warns."""
    for value in (1, 2):
        register_resolver("commopt_test.value", lambda value=value: value)
        store_config(group="commopt_test", name="twice", node={"value": value})
    assert OmegaConf.create({"value": "${commopt_test.value:}"}).value == 2
