"""The check of DiLoCo passes, and notices what it is for."""

from unittest.mock import patch

import pytest
from torch import Tensor

from lightning_commopt.commands.selftest import diloco
from lightning_commopt.commands.selftest.run import CHECKS
from lightning_commopt.sync.diloco.outer import OuterSGD
from lightning_commopt.testing.places import Place
from support.ranks import run_ranks

_PLACE = Place(name="CPU", device_type="cpu", backend="gloo")


def _check(is_broken: bool) -> object:
    def half(self: OuterSGD, buffer: Tensor | None, difference: Tensor) -> Tensor:
        return difference / 2

    if not is_broken:
        return diloco._mean_of_weights(_PLACE)
    with patch.object(OuterSGD, "update", half), pytest.raises(AssertionError, match="not close"):
        diloco._mean_of_weights(_PLACE)
    return ""


@pytest.mark.parametrize("is_broken", [False, True])
def test_the_ranks_end_with_the_mean(is_broken: bool) -> None:
    """If it fails, a machine on which exchanges are broken passes, or none does."""
    assert run_ranks(_check, is_broken) == (["", ""] if is_broken else ["2 plans, 8 steps"] * 2)
    assert [check.name for check in CHECKS if check.name.startswith("DiLoCo")]
