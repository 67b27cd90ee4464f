import signal

import pytest

from lightning_commopt.netlab import why_not


@pytest.fixture(scope="session", autouse=True)
def signals_count() -> None:
    """Makes tests that interrupt themselves the same in the background and under nohup, where signals are ignored."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@pytest.fixture(scope="session")
def lab_machine() -> None:
    """Skips a test that needs the lab on a machine that cannot make one, for the reason that users are told."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
