"""Lets several parts of ours wrap one method of one object, such as a loop of the Trainer or a callback."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


def wrap_method(owner: object, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Makes one object call ``around(method, *args)`` instead of a method; returns a function that undoes it.

    A method may be wrapped several times, with the last wrapper outermost, and unwrapped in any order. Keyword
    arguments are passed on, and what ``around`` returns is the result. A function that other code has put in the
    method's place, before or after, stays there.
    """
    own = vars(owner).get(name)
    chain = own if isinstance(own, _Wrapped) else _Wrapped(getattr(owner, name), is_own=own is not None)
    setattr(owner, name, chain)
    chain.arounds.append(around)

    def undo() -> None:
        chain.arounds.remove(around)
        if not chain.arounds and vars(owner).get(name) is chain:
            if chain.is_own:
                setattr(owner, name, chain.inner)
            else:
                delattr(owner, name)

    return undo


class _Wrapped:
    """A method with the functions that are called around it; ``is_own`` if the object has it, not only its class."""

    def __init__(self, inner: Callable[..., Any], *, is_own: bool) -> None:
        self.inner = inner
        self.is_own = is_own
        self.arounds: list[Callable[..., Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self.inner
        for around in self.arounds:
            call = partial(around, call)
        return call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Returns what a copy of the object has in this place: its own method, as those around it are of one object."""
        return partial, (self.inner,)
