"""Operations with several forms: plain torch defines an operation, Triton runs it on CUDA, and C on CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from lightning_commopt.compressors.kernels import c_library

_uses_triton = True
_is_plain = False
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def also_in(*forms: str) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Decorates a plain torch operation that has other forms, so that it runs in Triton or C if possible.

    The other forms have the same name and arguments. Their modules are beside that of the operation, such as
    ``low_rank_triton`` and ``low_rank_c`` beside ``low_rank``, and are imported when they are first needed. A form that
    does not support its arguments returns ``NotImplemented``, as operators do, and the plain one runs.

    Args:
        forms: names of the other forms, "triton", "c" or both.
    """

    def decorate(plain: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        @wraps(plain)
        def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            form = form_for(forms, *args, *kwargs.values())
            if form != "torch":
                result: _Result = _in_form(form, plain.__module__, plain.__name__)(*args, **kwargs)
                if result is not NotImplemented:
                    return result
            return plain(*args, **kwargs)

        return run

    return decorate


def form_for(forms: Sequence[str], *args: Any) -> str:
    """Returns the form in which an operation runs.

    Args:
        forms: names of its forms besides plain torch.
        *args: arguments of the operation, the first of which is a tensor.

    Returns:
        "triton" on CUDA if Triton works, "c" on CPU if there is a C compiler and all floating-point tensors are
        float32, else "torch".
    """
    if _is_plain:
        return "torch"
    device = args[0].device.type
    if device == "cuda" and "triton" in forms and has_triton():
        return "triton"
    dtypes = {x.dtype for x in args if isinstance(x, Tensor) and x.is_floating_point()}
    if device == "cpu" and "c" in forms and dtypes <= {torch.float32} and c_library.load() is not None:
        return "c"
    return "torch"


def has_triton() -> bool:
    """Returns whether Triton is installed and has not been found not to work."""
    return _uses_triton and not _is_plain and _finds_triton()


def do_without_triton() -> None:
    """Makes all operations of this process run in plain torch on CUDA from this call on."""
    global _uses_triton
    _uses_triton = False


@contextmanager
def in_plain_torch() -> Iterator[None]:
    """Returns a context in which all operations of this process run in plain torch."""
    global _is_plain
    before, _is_plain = _is_plain, True
    try:
        yield
    finally:
        _is_plain = before


@cache
def _in_form(form: str, module: str, name: str) -> Callable[..., Any]:
    return cast(Callable[..., Any], getattr(import_module(f"{module}_{form}"), name))


@cache
def _finds_triton() -> bool:
    return find_spec("triton") is not None
