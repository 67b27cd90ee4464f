"""What is said of values that are refused, for golden files."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

Call = tuple[Callable[..., object], dict[str, Any]]
"""A function, and arguments that it must refuse."""


def one_by_one(function: Callable[..., object], **values: Iterable[Any]) -> list[Call]:
    """Returns a call for every value of every argument."""
    return [(function, {name: value}) for name, of_name in values.items() for value in of_name]


def refusals(calls: Iterable[Call], error: type[Exception] = ValueError) -> str:
    """Returns what each call raises; asserts that all of them do, and raise an error of this type."""
    lines = []
    for function, arguments in calls:
        with pytest.raises(error) as caught:
            function(**arguments)
        call = f"{function.__name__}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"
        lines += [call, f"    {type(caught.value).__name__}: {caught.value}"]
    return "\n".join(lines)
