"""What Hydra refuses, and which name that exists is suggested instead."""

import pytest
from hydra.errors import HydraException

from lightning_commopt.launch.conf_path import conf_dir
from lightning_commopt.train.sweep.display import hint
from support.composed import composed


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("strategy/comm_hook=powersdg", "strategy/comm_hook=powersdg: did you mean 'powersgd'?"),
        ("strategy/comm_hook=BFloat16", "strategy/comm_hook=BFloat16: did you mean 'bf16'?"),
        ("experiment=quickstat", "experiment=quickstat: did you mean 'quickstart'?"),
        ("experimnt=quickstart", "experimnt: did you mean 'experiment'?"),
        ("strategy/comm_hok=bf16", "strategy/comm_hok: did you mean 'strategy/comm_hook'?"),
        ("strategy.bucket_cap=1", "strategy.bucket_cap: did you mean 'bucket_cap_mb'?"),
        ("strategy.com_hook.name=bf16", "strategy.com_hook: did you mean 'comm_hook'?"),
        ("sed=3", "sed: did you mean 'seed'?"),
        ("hydra.swep.dir=there", "hydra.swep: did you mean 'sweep'?"),
        ("xyzzy=3", None),
        ("strategy/comm_hook=xyzzy", None),
        ("seed=[", None),
    ],
)
def test_the_nearest_name_that_exists_is_suggested(override, meant):
    """If it fails, a typing error ends in a list of names to compare by eye, or in a wrong suggestion."""
    with pytest.raises(HydraException) as refused:
        composed(override)
    assert hint(refused.value, conf_dir()) == meant


def test_no_error_has_no_hint():
    assert hint(None, conf_dir()) is None
