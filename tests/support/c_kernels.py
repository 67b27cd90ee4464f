"""Whether operations run in C: where a kernel declines, plain torch runs, and a comparison compares it with itself."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from lightning_commopt.compressors.kernels import dispatch


@contextmanager
def must_run_in_c(*operations: str) -> Iterator[None]:
    """Fails at its end unless all of these operations have run in C; without names, unless any has."""
    ran: set[str] = set()
    find = dispatch._in_form

    def find_noted(form: str, module: str, name: str) -> Callable[..., Any]:
        operation = find(form, module, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            result = operation(*args, **kwargs)
            if form == "c" and result is not NotImplemented:
                ran.add(name)
            return result

        return run

    with mock.patch.object(dispatch, "_in_form", find_noted):
        yield
    assert ran, "nothing ran in C"
    assert ran.issuperset(operations), f"only {sorted(ran)} ran in C"
