"""Which values of a parameter the default run takes; the others are for --all."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def sampled(values: Iterable[Any], by_default: Collection[Any]) -> list[ParameterSet]:
    """Marks the values that only --all runs.

    Args:
        values: of one parameter; tuples for several.
        by_default: those that the default run takes, each of them one of the values.

    Returns:
        All values, for ``pytest.mark.parametrize``.
    """
    values = list(values)
    assert all(value in values for value in by_default), f"{by_default} are not all in {values}"
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=() if value in by_default else pytest.mark.exhaustive,
        )
        for value in values
    ]
