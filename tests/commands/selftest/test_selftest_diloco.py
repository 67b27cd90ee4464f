"""The check of DiLoCo passes, and notices what it is for."""

from unittest.mock import patch

import pytest
from torch import Tensor

from lightning_commopt.commands.selftest import diloco
from lightning_commopt.commands.selftest.run import CHECKS
from lightning_commopt.sync.diloco.outer import OuterSGD
from lightning_commopt.testing.places import CPU
from support.warm_ranks import run_ranks


def _check() -> object:
    def half(self: OuterSGD, buffer: Tensor | None, difference: Tensor) -> Tensor:
        return difference / 2

    with patch.object(OuterSGD, "update", half), pytest.raises(AssertionError, match="not close"):
        diloco._mean_of_weights(CPU)
    return diloco._mean_of_weights(CPU)


def test_the_ranks_end_with_the_mean() -> None:
    """If it fails, a machine on which exchanges are broken passes, or none does."""
    assert run_ranks(_check) == ["2 plans, 8 steps"] * 2
    assert [check.name for check in CHECKS if check.name.startswith("DiLoCo")]
