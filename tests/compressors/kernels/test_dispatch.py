"""Which form of an operation runs."""

import inspect
from importlib import import_module
from types import ModuleType

import pytest
import torch
from forms import needs_triton
from torch import Tensor

from lightning_commopt.compressors.kernels import (
    blockwise,
    c_library,
    dispatch,
    elementwise,
    factors,
    low_rank,
)
from lightning_commopt.compressors.kernels.factors import Matrix, Parts
from support.every_compressor import COMPRESSORS

FLOAT32 = torch.zeros(1)
BOTH = ("triton", "c")


@pytest.mark.parametrize(
    ("arguments", "form"),
    [
        ((FLOAT32,), "c"),
        ((FLOAT32, None, FLOAT32.byte(), 128), "c"),
        ((FLOAT32.byte(), FLOAT32), "c"),
        ((FLOAT32.double(),), "torch"),
        ((FLOAT32, FLOAT32.bfloat16()), "torch"),
        ((FLOAT32.to("meta"),), "torch"),
    ],
)
def test_only_float32_on_cpu_runs_in_c(
    arguments: tuple[Tensor, ...], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it fails, other dtypes are read as if they were float32, or C is not used."""
    monkeypatch.setattr(c_library, "load", object)
    assert dispatch.form_for(BOTH, *arguments) == form
    monkeypatch.setattr(c_library, "load", lambda: None)
    assert dispatch.form_for(BOTH, *arguments) == "torch"


def test_no_compiler_runs_for_an_operation_without_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, training with bf16 waits for a library that it does not use."""
    monkeypatch.setattr(c_library, "load", pytest.fail)
    assert elementwise.all_finite(FLOAT32).item()
    assert not any(COMPRESSORS[name].claims.has_c_kernels for name in ("all_reduce", "bf16"))
    assert all(COMPRESSORS[name].claims.has_c_kernels for name in ("powersgd", "int8", "hierarchical_powersgd"))


def functions(module: ModuleType) -> dict[str, list[str]]:
    """Returns the parameters of what a module defines for others."""
    return {
        name: list(inspect.signature(function).parameters)
        for name, function in vars(module).items()
        if inspect.isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_")
    }


@needs_triton
@pytest.mark.parametrize("operations", [blockwise, elementwise, factors, low_rank])
def test_all_forms_take_the_same_arguments(operations: ModuleType) -> None:
    """If it fails, an operation breaks on another device, or has a form that never runs."""
    plain = functions(operations)
    for suffix in ("triton", "c") if operations in (blockwise, low_rank) else ("triton",):
        forms = functions(import_module(f"{operations.__name__}_{suffix}"))
        assert forms
        assert forms.items() <= plain.items()


def test_a_form_may_leave_the_work_to_plain_torch() -> None:
    """If it fails, what C does not support is not done at all."""
    flat, out = torch.ones(6), torch.zeros(6)
    thin = torch.ones(2), torch.ones(3)
    low_rank.subtract_product(flat * 2, Parts((Matrix(0, 2, 3, 1),)), thin, out, torch.tensor(True))
    assert out.equal(flat)
