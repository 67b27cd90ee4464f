"""Each process knows who has started it."""

import multiprocessing
import os

import pytest

from lightning_commopt.launch.environment import launcher_pid


@pytest.mark.parametrize(
    ("start_method", "is_forked", "variables", "is_known"),
    [
        ("popen", False, {}, False),
        ("popen", True, {}, False),
        ("popen", False, {"TORCHELASTIC_RUN_ID": "job"}, True),
        ("fork", True, {}, True),
        ("fork", False, {}, False),
    ],
)
def test_the_process_that_outlives_all_ranks(
    start_method: str, is_forked: bool, variables: dict[str, str], is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it fails, a rank that still uploads is ended as rank 0 has gone, or ranks outlive their launcher."""
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: is_forked or None)
    monkeypatch.setattr(os, "environ", variables)
    assert launcher_pid(start_method) == (os.getppid() if is_known else None)
