"""Why a port cannot be reached."""

import pytest

from lightning_commopt.launch.interfaces import resolve, try_port
from support.known import known


@pytest.mark.parametrize("name", ["trainer..svc", "x" * 64])
def test_a_name_that_no_host_can_have(name: str) -> None:
    """If it fails, a MASTER_ADDR with an empty part ends what would explain that it cannot be resolved."""
    failure = known(try_port(name, 29500, limit_s=1))
    assert not failure.is_refused
    assert f"the name {name} cannot be resolved" in failure.message
    assert resolve(name) is None
