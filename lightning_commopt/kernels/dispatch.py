"""One operation in several forms: plain torch defines it, Triton runs it on CUDA, C on CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from lightning_commopt.kernels import c_library

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def also_in(*forms: str) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Makes a plain torch operation run in Triton or in C where it can.

    The other forms have the same name and arguments, in a module beside that of the operation: ``low_rank_triton`` and
    ``low_rank_c`` beside ``low_rank``. That module is imported when it is first needed. A form that does not support
    what it is given returns ``NotImplemented``, as operators do, and the plain one runs.

    Args:
        forms: "triton", "c" or both.
    """

    def decorate(plain: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        @wraps(plain)
        def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            form = form_for(*args, *kwargs.values())
            if form in forms:
                module = import_module(f"{plain.__module__}_{form}")
                result = getattr(module, plain.__name__)(*args, **kwargs)
                if result is not NotImplemented:
                    return result
            return plain(*args, **kwargs)

        return run

    return decorate


def form_for(*args: Any) -> str:
    """Returns the form of an operation with these arguments, the first of which is a tensor.

    Returns:
        "triton" on CUDA where Triton is installed, "c" on CPU where there is a C compiler and all floating-point
        tensors are float32, else "torch".
    """
    if args[0].is_cuda and has_triton():
        return "triton"
    dtypes = {x.dtype for x in args if isinstance(x, Tensor) and x.is_floating_point()}
    if args[0].device.type == "cpu" and dtypes <= {torch.float32} and c_library.load() is not None:
        return "c"
    return "torch"


@cache
def has_triton() -> bool:
    """Returns whether Triton is installed."""
    return find_spec("triton") is not None
