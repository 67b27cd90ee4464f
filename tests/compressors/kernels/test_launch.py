"""A repeated launch runs what Triton would run: kernels are compiled for a device that is not there, and not run."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from forms import needs_triton
from torch import Tensor

pytest.importorskip("triton")
import triton
import triton.language as tl
from compiled_kernels import _Device
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from lightning_commopt.compressors.kernels import launch_triton

pytestmark = needs_triton
Launched = list[tuple[Any, ...]]


@triton.jit
def _scale(x, out, numel, FACTOR: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < numel, 0) * FACTOR, at < numel)


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launched]:
    """What reaches the driver: which compiled kernel, its grid, and its arguments."""
    found: Launched = []

    def get_ready(kernel: Any) -> None:
        def run(x: int, y: int, z: int, stream: Any, function: Any, packed: Any, *rest: Any) -> None:
            args = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in rest[3:]]
            found.append((kernel.hash, x, y, z, *args))

        setattr(kernel, "_run" if hasattr(CompiledKernel, "run") else "run", run)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(CompiledKernel, "_init_handles", get_ready)
    monkeypatch.setattr(launch_triton, "_prepared", {})
    driver.set_active(_Device(90))
    yield found
    with suppress(RuntimeError):  # this machine may have no device
        driver.reset_active()


X, OUT = torch.zeros(4096), torch.zeros(4096)
CASES: list[tuple[Tensor, Tensor, int, float, int]] = [
    (X, OUT, 16, 2.0, 1),
    (OUT, X, 16, 2.0, 1),  # other addresses
    (X[1:], OUT, 16, 2.0, 1),  # not aligned
    (X, OUT[1:], 16, 2.0, 1),
    (X, OUT, 17, 2.0, 1),
    (X, OUT, 1, 2.0, 1),
    (X, OUT, 2**31, 2.0, 1),
    (X, OUT, 16, 3.0, 1),
    (X, OUT, 16, 2.0, 7),
    (X.bfloat16(), OUT, 16, 2.0, 1),
]


def launch(case: tuple[Tensor, Tensor, int, float, int]) -> None:
    x, out, numel, factor, programs = case
    launch_triton.launch(_scale, (programs, 1, 1), x, out, numel, FACTOR=factor, BLOCK=16, enable_fp_fusion=True)


@pytest.mark.exhaustive
@pytest.mark.skipif(not launch_triton._repeats, reason="this Triton is asked every time")
def test_a_repeated_launch_is_the_one_that_triton_would_make(launched: Launched) -> None:
    """If it fails, a kernel reads memory in wide accesses that is not aligned, or runs with what an earlier one had."""
    with mock.patch.object(launch_triton, "_repeats", False):
        for case in CASES:
            launch(case)
    asked = list(launched)
    assert len({kernel for kernel, *_ in asked}) == 8
    for case in CASES:
        launch(case)
    launched.clear()
    with mock.patch.object(JITFunction, "run", side_effect=AssertionError("asks Triton again")):
        for case in CASES:
            launch(case)
    assert launched == asked


@pytest.mark.skipif(not launch_triton._repeats, reason="this Triton is asked every time")
@pytest.mark.usefixtures("launched")
def test_launches_on_another_device_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, tensors of one device are given to a kernel that is loaded on another one."""
    asked, run = [], JITFunction.run

    def ask(kernel: Any, *args: Any, **options: Any) -> Any:
        asked.append(kernel)
        return run(kernel, *args, **options)

    monkeypatch.setattr(JITFunction, "run", ask)
    for device, num_asked in ((-1, 1), (-1, 1), (1, 2), (1, 3)):  # -1 is the current one
        monkeypatch.setattr(Tensor, "get_device", lambda tensor, device=device: device)
        launch(CASES[0])
        assert len(asked) == num_asked


def test_what_triton_does_not_compile_is_asked_for_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, nothing runs from the second step on, in the interpreter or another form of a kernel."""
    run = mock.Mock(return_value=None)
    monkeypatch.setattr(JITFunction, "run", run)
    for _ in range(3):
        launch(CASES[0])
    assert run.call_count == 3
