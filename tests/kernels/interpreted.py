"""Runs a module of tests as a program in which Triton interprets its kernels, on CPU tensors."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from types import ModuleType
from unittest import mock

import pytest
import torch

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def run_interpreted(file: str) -> None:
    """Runs ``file``, which ends with `main`. Triton decides when it is imported whether it compiles or interprets."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, file], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "agree\n"


def main(both_forms_agree: Callable[[str], None]) -> None:
    """The program that `run_interpreted` runs."""
    assert os.environ["TRITON_INTERPRET"] == "1"
    both_forms_agree("cpu")
    print("agree")


@contextmanager
def fused(*modules: ModuleType) -> Iterator[None]:
    """Makes modules with kernels run their Triton forms on any device."""
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, "use_triton", return_value=True))
        yield
