"""Methods of one object, such as a loop of Lightning, that several of ours wrap."""

import copy
import itertools
import pickle
import threading
from functools import partial
from typing import Any

import pytest

from lightning_commopt.compat.wrapping import wrap_method


class Loop:
    def __init__(self) -> None:
        self.called: list[Any] = []

    def run(self, value: int) -> None:
        self.called.append(value)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_wrappers_are_removed_in_any_order(order: tuple[int, ...]) -> None:
    """If it fails, a callback that ends before another removes its wrapper, or leaves its own behind."""
    loop = Loop()

    def around(name: str, inner: Any, value: int) -> None:
        loop.called.append(name)
        inner(value)

    undo = [wrap_method(loop, "run", partial(around, name)) for name in "abc"]
    left = set(range(3))
    for number in (None, *order):
        if number is not None:
            left.remove(number)
            undo[number]()
        loop.called.clear()
        loop.run(7)
        assert loop.called == [*("abc"[one] for one in sorted(left, reverse=True)), 7]
    assert vars(loop) == {"called": loop.called}


def test_what_others_have_put_in_its_place_stays() -> None:
    """If it fails, a method that a user or another tool has replaced is the class's again after the fit."""
    loop = Loop()
    loop.run = before = lambda value: loop.called.append(-value)  # type: ignore[method-assign]
    undo = wrap_method(loop, "run", lambda inner, value: inner(value + 1))
    loop.run(7)
    ours = loop.run
    loop.run = since = lambda value: ours(10 * value)  # type: ignore[method-assign]
    loop.run(7)
    undo()
    assert loop.run is since
    loop.run(7)
    assert loop.called == [-8, -71, -70]

    loop.run = before  # type: ignore[method-assign]
    wrap_method(loop, "run", lambda inner, value: inner(value + 1))()
    assert loop.run is before


def test_copies_have_their_own_method() -> None:
    """If it fails, programs that copy or pickle a callback within a fit with DiLoCo raise."""
    loop = Loop()
    wrap_method(loop, "run", partial(lambda lock, inner, value: inner(-value), threading.Lock()))
    for copied in (copy.deepcopy(loop), pickle.loads(pickle.dumps(loop))):
        copied.run(7)
        assert (copied.called, loop.called) == ([7], [])
