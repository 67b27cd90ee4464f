"""Slow programs of a test module, two at a time, and only those that the selected tests ask for."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import pytest

T = TypeVar("T")


@contextmanager
def two_at_a_time(
    request: pytest.FixtureRequest, parameter: str, run: Callable[[str], T]
) -> Iterator[dict[str, Future[T]]]:
    """Starts a call for every value that a parameter has in the selected tests of a module, in their order.

    Ranks that are launched import one after another, so that a program alone keeps only one core busy.

    Args:
        request: of a fixture with the module's scope.
        parameter: its name in the tests.
        run: called with each of its values, in another thread.

    Yields:
        What each call will return, by the parameter's value.
    """
    specs = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    values = dict.fromkeys(spec.params[parameter] for spec in specs if spec is not None and parameter in spec.params)
    pool = ThreadPoolExecutor(2)
    try:
        yield {value: pool.submit(run, value) for value in values}
    finally:
        pool.shutdown(cancel_futures=True)
