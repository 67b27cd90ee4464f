"""What Hydra refuses, and which names that exist are suggested instead."""

from collections.abc import Callable

import pytest
from hydra.errors import HydraException

from lightning_commopt.launch.conf_path import conf_dir
from lightning_commopt.train.sweep.display import hint
from support.composed import composed

OVERRIDES = [
    *("strategy/comm_hook=powersdg", "strategy/comm_hook=BFloat16", "experiment=quickstat", "experimnt=quickstart"),
    *("strategy/comm_hok=bf16", "strategy.bucket_cap=1", "strategy.com_hook.name=bf16", "sed=3"),
    *("hydra.swep.dir=there", "xyzzy=3", "strategy/comm_hook=xyzzy", "seed=[", "strategy.sync_evry=3"),
]


def test_the_nearest_name_that_exists_is_suggested(golden: Callable[[str, str], None]) -> None:
    """If it fails, a typing error ends in a list of names to compare by eye, or in a wrong suggestion."""
    hints = []
    for override in OVERRIDES:
        with pytest.raises(HydraException) as refused:
            composed(override)
        hints.append(f"{override} -> {hint(refused.value, conf_dir())}")
    golden("hints", "\n".join(hints))


def test_no_error_has_no_hint() -> None:
    assert hint(None, conf_dir()) is None
