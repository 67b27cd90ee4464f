"""Runs operations in one of their forms; Triton's also in its interpreter, on CPU tensors."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
import torch

from lightning_commopt.compressors.kernels import c_library, dispatch
from support.c_kernels import must_run_in_c

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def run_interpreted(file: str) -> None:
    """Runs ``file``, which ends with `main`. Triton decides when it is imported whether it compiles or interprets."""
    path = os.pathsep.join(sys.path)  # pytest's, which has the folder of `support`
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, file], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "agree\n"


def main(both_forms_agree: Callable[[str], None]) -> None:
    """The program that `run_interpreted` runs."""
    assert os.environ["TRITON_INTERPRET"] == "1"
    with checked_multiples():
        both_forms_agree("cpu")
    print("agree")


@contextmanager
def checked_multiples() -> Iterator[None]:
    """Makes the interpreter check the multiples that kernels promise: a wrong one is a misaligned access on a GPU."""
    from triton.runtime.interpreter import TensorHandle

    def check(self: Any, name: str, values: list[int]) -> None:
        assert name != "tt.divisibility" or not (self.data % values).any(), f"{self.data} is no multiple of {values}"

    with mock.patch.object(TensorHandle, "set_attr", check):
        yield


@contextmanager
def in_form(form: str, *operations: str) -> Iterator[None]:
    """Makes operations run in "torch" or "triton" on any device; in "c" those that are named, or any, have to run."""
    if form == "c":
        if c_library.load() is None:
            pytest.skip("there is no C compiler")
        with must_run_in_c(*operations):
            yield
        return
    with mock.patch.object(dispatch, "form_for", return_value=form):
        yield
