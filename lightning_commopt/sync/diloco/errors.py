"""Errors of ranks that do not take part in the same exchanges."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from lightning_commopt.compat.lightning import MisconfigurationException


class MembersError(RuntimeError):
    """The ranks can no longer agree on who takes part; the message says why."""


class UnequalStepsError(MisconfigurationException):
    """The ranks have taken different numbers of optimizer steps; the message has the numbers and a remedy."""


@contextmanager
def store_errors() -> Generator[None, None, None]:
    """Returns a context in which the loss of the store raises a `MembersError` that says which process has ended."""
    try:
        yield
    except MembersError:
        raise
    except RuntimeError as error:
        raise MembersError(
            "the store of the process group is lost, so the ranks can no longer agree on who takes part: the process"
            f" that hosts it has ended, which is torchrun's agent, or without torchrun rank 0 ({error})"
        ) from error
