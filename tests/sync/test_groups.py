"""The end of a process that has synchronized gradients over gloo."""

import atexit
import time
from unittest import mock

import pytest

from lightning_commopt.sync.groups import let_gloo_finish_at_exit


def test_one_wait_is_registered_however_often_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a process that trains a hundred times waits a hundred times when it ends, or not at all."""
    register = mock.Mock()
    monkeypatch.setattr(atexit, "register", register)
    let_gloo_finish_at_exit.cache_clear()
    for _ in range(3):
        let_gloo_finish_at_exit()
    let_gloo_finish_at_exit.cache_clear()  # who trains in this process after this test registers in earnest
    (wait, seconds), _ = register.call_args
    assert register.call_count == 1
    assert wait is time.sleep
    assert 0 < seconds < 1
