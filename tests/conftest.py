import pytest

from lightning_commopt.netlab import why_not


@pytest.fixture(scope="session")
def lab_machine() -> None:
    """Skips a test that needs the lab on a machine that cannot make one, for the reason that users are told."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
