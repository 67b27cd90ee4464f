import signal

import pytest

from lightning_commopt.netlab import why_not


@pytest.fixture(scope="session", autouse=True)
def interrupts_count() -> None:
    """Makes tests that interrupt themselves the same where a shell has started them in the background."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def lab_machine() -> None:
    """Skips a test that needs the lab on a machine that cannot make one, for the reason that users are told."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
